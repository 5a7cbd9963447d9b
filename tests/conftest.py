"""Fixtures shared by several folders of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """build/<name> of a tiny random model: checkpoint, ONNX graphs and engines."""
    from engines.build import build_engines
    from export.pair import ExportOptions, export_pair

    root = tmp_path_factory.mktemp("build")
    model = make_tiny_llama(root / "model")
    export_pair(ExportOptions(model=str(model), name="tiny", build_dir=root))
    build_engines(root / "tiny")
    return root / "tiny"
