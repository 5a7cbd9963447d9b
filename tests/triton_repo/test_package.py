"""Packaging on a folder of stand-in engines: complete, movable, atomic, and only when needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from export.errors import PublishError
from runtime.manifest import (
    FILE_NAME,
    Artifact,
    Builder,
    Manifest,
    ManifestError,
    hash_file,
    tokenizer_hash,
)
from runtime.spec import KvDims, VerifierDims
from triton_repo.package import PackageError, package


def publish_engines(build_dir: Path, weights: bytes = b"weights") -> None:
    """Write stand-in engines the way `engines` does: new files, the manifest last."""
    engines = build_dir / "engines"
    shutil.rmtree(engines, ignore_errors=True)
    (engines / "costs").mkdir(parents=True)
    (engines / "verifier.onnx").write_bytes(b"graph")
    (engines / "verifier.data").write_bytes(weights)
    (engines / "costs" / "cost.json").write_text("{}")
    (engines / "scratch.tmp").write_text("nobody names this file")
    dims = VerifierDims(KvDims(2, 1, 8, 16, "fp32"), 8, 32, 64, ())
    artifact = Artifact(
        "verifier.onnx",
        5 + len(weights),
        hash_file(engines / "verifier.data"),
        data_files=("verifier.data",),
    )
    manifest = Manifest(
        "tiny",
        "fp32",
        20,
        Builder("onnxruntime", "1"),
        dims,
        None,
        {"verifier": artifact},
        tokenizer_hash(build_dir / "hf"),
        (2,),
        cost="costs/cost.json",
    )
    (engines / FILE_NAME).write_text(manifest.to_json())


@pytest.fixture
def build_dir(tmp_path: Path) -> Path:
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "tokenizer.json").write_text("{}")
    (hf / "chat_template.jinja").write_text("{{ messages }}")
    (hf / "model.safetensors").write_text("not needed for serving")
    publish_engines(tmp_path)
    return tmp_path


def version_dir(build_dir: Path) -> Path:
    return build_dir / "repository" / "dspark" / "1"


def test_repository_holds_what_serving_needs_and_nothing_else(build_dir: Path) -> None:
    assert package(build_dir)
    version = version_dir(build_dir)
    assert sorted(os.listdir(build_dir / "repository")) == [".key", "dspark", "dspark_unary"]
    unary = build_dir / "repository" / "dspark_unary"
    assert {p.relative_to(unary).as_posix() for p in unary.rglob("*") if p.is_file()} == {
        "config.pbtxt",
        "1/model.py",
    }
    assert sorted(os.listdir(version.parent)) == ["1", "config.pbtxt"]
    assert sorted(os.listdir(version)) == [
        "engines",
        "model.py",
        "runtime",
        "tokenizer",
        "triton_repo",
    ]
    packaged = {p.relative_to(version).as_posix() for p in version.rglob("*") if p.is_file()}
    assert {p for p in packaged if p.startswith(("engines/", "tokenizer/"))} == {
        "engines/verifier.onnx",
        "engines/verifier.data",
        "engines/costs/cost.json",
        "engines/manifest.json",
        "tokenizer/tokenizer.json",
        "tokenizer/chat_template.jinja",
    }


def test_engine_files_take_no_space_twice(build_dir: Path) -> None:
    package(build_dir)
    weights = version_dir(build_dir) / "engines" / "verifier.data"
    assert weights.samefile(build_dir / "engines" / "verifier.data")


def test_second_time_does_nothing_and_a_change_packages_again(build_dir: Path) -> None:
    assert package(build_dir)
    before = version_dir(build_dir).stat()
    assert not package(build_dir)
    assert version_dir(build_dir).stat().st_mtime_ns == before.st_mtime_ns

    publish_engines(build_dir, b"other weights")
    assert package(build_dir)
    assert (version_dir(build_dir) / "engines" / "verifier.data").read_bytes() == b"other weights"
    assert not package(build_dir)

    (build_dir / "hf" / "generation_config.json").write_text("{}")
    assert package(build_dir)
    assert not package(build_dir)


def test_another_chat_template_is_another_tokenizer(build_dir: Path) -> None:
    (build_dir / "hf" / "chat_template.jinja").write_text("{{ other }}")
    with pytest.raises(PackageError, match="make engines"):
        package(build_dir)


def test_moved_repository_runs_on_its_own_sources(build_dir: Path, tmp_path: Path) -> None:
    package(build_dir)
    moved = tmp_path / "elsewhere"
    shutil.move(build_dir / "repository", moved)
    version = moved / "dspark" / "1"
    script = "import triton_repo.bridge, runtime.decoder as d; print(d.__file__)"
    # Isolated, as Triton's stub runs it: no PYTHONPATH, no working directory, no editable install.
    site_packages = next(p for p in sys.path if p.endswith("site-packages"))
    prefix = f"import sys; sys.path[:0] = [{str(version)!r}, {site_packages!r}]; "
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", prefix + script],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert run.stdout.strip() == str(version / "runtime" / "decoder.py"), run.stderr


def test_full_disk_leaves_the_old_repository(
    build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(build_dir)
    publish_engines(build_dir, b"other weights")

    def no_space(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", no_space)
    with pytest.raises(PublishError, match="the disk is full"):
        package(build_dir)
    assert (version_dir(build_dir) / "engines" / "verifier.data").read_bytes() == b"weights"
    assert sorted(p for p in os.listdir(build_dir) if not p.endswith(".lock")) == [
        "engines",
        "hf",
        "repository",
    ]


def test_copies_where_links_are_impossible(
    build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cross_device(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", cross_device)
    package(build_dir)
    assert (version_dir(build_dir) / "engines" / "verifier.data").read_bytes() == b"weights"


def test_refusals_name_the_command_that_helps(build_dir: Path) -> None:
    (build_dir / "hf" / "tokenizer.json").write_text('{"another": "tokenizer"}')
    with pytest.raises(PackageError, match="make engines"):
        package(build_dir)
    (build_dir / "engines" / FILE_NAME).unlink()
    with pytest.raises(ManifestError, match="make engines"):
        package(build_dir)
