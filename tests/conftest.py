"""Fixtures shared by several folders of tests."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from onnx import GraphProto

from tests.helpers import make_tiny_drafter, make_tiny_llama, shared_data_dir

# `make test-gpu` runs the tests of the loop on TensorRT engines.
TARGET = os.environ.get("DSPARK_TEST_TARGET", "onnxruntime")
NVIDIA_DEVICE = Path("/dev/nvidiactl")


def pytest_runtest_setup(item: pytest.Item) -> None:
    tensorrt = TARGET == "tensorrt" or importlib.util.find_spec("tensorrt")
    if item.get_closest_marker("gpu") and not (NVIDIA_DEVICE.exists() and tensorrt):
        pytest.skip("needs an NVIDIA GPU and TensorRT (pip install '.[tensorrt]'): make test-gpu")


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that its processes (`pytest -n`) share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def tiny_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """build/<name> of a tiny random model: checkpoint, ONNX graphs and engines."""
    from engines.build import build_engines
    from export.pair import ExportOptions, export_pair

    root = tmp_path_factory.mktemp("build")
    model = make_tiny_llama(root / "model")
    export_pair(ExportOptions(model=str(model), name="tiny", build_dir=root))
    build_engines(root / "tiny", TARGET)
    return root / "tiny"


@pytest.fixture(scope="session")
def tiny_pair_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_build`, with a random drafter of a reduced vocabulary."""
    from engines.build import build_engines
    from export.pair import ExportOptions, export_pair

    root = tmp_path_factory.mktemp("pair_build")
    model = make_tiny_llama(root / "model")
    drafter = make_tiny_drafter(root / "drafter", draft_vocab_size=100, own_embeddings=False)
    export_pair(ExportOptions(model=str(model), name="tiny", drafter=drafter, build_dir=root))
    build_engines(root / "tiny", TARGET)
    return root / "tiny"


@pytest.fixture(scope="session")
def measured_build(tiny_pair_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `tiny_pair_build` with a cost table (1 thread, 2 requests) and a calibration."""
    from engines.calibrate import calibrate
    from engines.cost_profile import profile

    folder = tmp_path_factory.mktemp("measured") / "tiny"
    for name in ("engines", "hf"):
        shutil.copytree(tiny_pair_build / name, folder / name)
    assert profile(folder, threads=1, max_requests=2, repeats=1)
    assert calibrate(folder, threads=1, num_rounds=60)
    return folder


@pytest.fixture(scope="session")
def embedded_build(shared_tmp: Path) -> Path:
    """build/smollm2 of the embedded model, as `make engines` leaves it; made when it is not."""
    from cli.main import main

    with FileLock(shared_tmp / "embedded.lock"):
        assert main(["export", *default_drafter()]) == 0
        assert main(["build", "--target", TARGET]) == 0
    return Path("build/smollm2")


def default_drafter() -> list[str]:
    """Arguments of `dspark export` for the embedded model's own drafter."""
    shipped = Path("models/dspark_smollm2_135m")
    return ["--drafter", str(shipped)] if (shipped / "config.json").is_file() else []


@pytest.fixture(scope="session")
def early_build(embedded_build: Path) -> Path:
    """The embedded model with the early drafter of the shared data, in fp32 as its reference."""
    from engines.build import build_engines
    from export.pair import ExportOptions, export_pair

    drafter = shared_data_dir() / "drafter_smollm2_early"
    folder = embedded_build.parent / "smollm2_early"
    if not folder.exists():  # start from the same verifier instead of exporting it again
        shutil.copytree(embedded_build / "onnx", folder / "onnx", copy_function=os.link)
    export_pair(ExportOptions(model=str(embedded_build / "hf"), name=folder.name, drafter=drafter))
    build_engines(folder, TARGET, int8_drafts=False)
    return folder


@pytest.fixture(scope="session", autouse=True)
def equal_modules_are_traced_once(shared_tmp: Path) -> Iterator[None]:
    """Tests export many models that differ in weights alone, and each trace takes seconds."""
    from export import to_onnx

    trace = to_onnx.trace

    def remembered(module: Any, examples: Any, inputs: Any, outputs: Any) -> Any:
        state = [
            [(name, type(part), _attributes(part)) for name, part in module.named_modules()],
            [(name, p.shape, p.dtype) for name, p in module.named_parameters()],
            [(name, b.tolist()) for name, b in module.named_buffers()],
            list(inputs),
            list(outputs),
        ]
        path = shared_tmp / hashlib.sha256(repr(state).encode()).hexdigest()
        with FileLock(f"{path}.lock"):
            if not path.exists():
                part = trace(module, examples, inputs, outputs)
                path.write_bytes(part.graph.SerializeToString())
        return to_onnx.Part(GraphProto.FromString(path.read_bytes()), tuple(outputs))

    to_onnx.trace = remembered
    yield
    to_onnx.trace = trace


def _attributes(module: Any) -> list[tuple[str, str]]:
    return sorted((k, repr(v)) for k, v in vars(module).items() if not k.startswith("_"))
