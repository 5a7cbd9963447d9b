"""One exported pair for all tests of the exporter: tracing costs seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.main import main
from tests.helpers import make_tiny_drafter, make_tiny_llama


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def drafter_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter with everything optional: reduced vocabulary, the target's tables, confidence."""
    directory = tmp_path_factory.mktemp("drafter")
    return make_tiny_drafter(directory, draft_vocab_size=100, own_embeddings=False)


@pytest.fixture(scope="session")
def exported(target_dir: Path, drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """build/<name> of `dspark export` for the pair."""
    build = tmp_path_factory.mktemp("build")
    args = ["export", "--model", str(target_dir), "--drafter", str(drafter_dir)]
    assert main([*args, "--name", "tiny", "--build-dir", str(build)]) == 0
    return build / "tiny"
