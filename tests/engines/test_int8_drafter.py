"""The drafter's linear layers in int8: close to fp32, row by row, and only where that helps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from cli.main import main
from engines import int8_drafter
from engines.build import build_engines
from export.pair import ExportOptions, export_pair
from runtime.batch import DraftSegment, pack_draft
from runtime.manifest import load_manifest
from runtime.ort_engine import OrtEngine
from runtime.randomness import DraftNoise
from runtime.spec import drafter_inputs, drafter_outputs
from tests.helpers import make_tiny_drafter, make_tiny_llama

INPUTS, OUTPUTS = 256, 96


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


WEIGHT, BIAS = normal(OUTPUTS, INPUTS) / 16, normal(OUTPUTS, seed=1)


def linear(folder: Path, inputs: dict[str, tuple[str, ...]]) -> Path:
    """A graph of linear layers, the input of each and its bias if any by its output."""
    nodes = [helper.make_node("Gemm", own, [y], transB=1) for y, own in inputs.items()]
    names = sorted({own[0] for own in inputs.values()})
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["T", INPUTS]) for x in names],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, ["T", OUTPUTS]) for y in inputs],
        [numpy_helper.from_array(WEIGHT, "weight"), numpy_helper.from_array(BIAS, "bias")],
    )
    path = folder / "linear.onnx"
    opset = helper.make_opsetid("", 20)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    return path


def session(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_each_row_is_rounded_for_itself(tmp_path: Path) -> None:
    source = linear(tmp_path, {"y": ("x", "weight"), "z": ("x", "weight", "bias")})
    (path,) = int8_drafter.rewrite(source, tmp_path / "int8.onnx")
    x = normal(5, INPUTS, seed=2)
    x[1] *= 1e4
    x[2] *= 1e-4
    x[3] = 0
    run = session(path).run
    y, z = run(["y", "z"], {"x": x})
    exact = x @ WEIGHT.T
    for row in range(len(x)):
        scale = np.abs(exact[row]).max()
        np.testing.assert_allclose(y[row], exact[row], rtol=0, atol=0.02 * scale)
        np.testing.assert_allclose(z[row], y[row] + BIAS, rtol=0, atol=1e-6 * (1 + scale))
        np.testing.assert_array_equal(run(["y"], {"x": x[row : row + 1]})[0][0], y[row])


def test_features_and_narrow_layers_stay_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = linear(tmp_path, {"y": ("context_features", "weight"), "z": ("x", "weight")})
    (path,) = int8_drafter.rewrite(source, tmp_path / "int8.onnx")
    (left,) = (node for node in onnx.load(path).graph.node if node.op_type == "Gemm")
    assert left.output == ["y"]
    monkeypatch.setattr(int8_drafter, "MIN_INPUTS", INPUTS + 1)
    assert int8_drafter.rewrite(source, tmp_path / "none.onnx") == []
    assert not (tmp_path / "none.onnx").exists()


def build(root: Path, head: str) -> Path:
    """The engines of a tiny pair with a drafter that has layers of at least 32 inputs."""
    drafter = make_tiny_drafter(root / "drafter", head=head, draft_vocab_size=100)
    model = make_tiny_llama(root / "model")
    export_pair(ExportOptions(str(model), "tiny", drafter=drafter, build_dir=root))
    assert build_engines(root / "tiny")
    return root / "tiny" / "engines"


@pytest.fixture
def small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layers as well, whose speed does not matter."""
    monkeypatch.setattr(int8_drafter, "MIN_INPUTS", 32)
    monkeypatch.setattr(int8_drafter, "MAX_TIME", float("inf"))


@pytest.mark.usefixtures("small_layers_too")
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_drafts_are_made_in_int8(tmp_path: Path, head: str) -> None:
    folder = build(tmp_path, head)
    manifest = load_manifest(folder)
    dims = manifest.drafter
    assert dims is not None
    assert manifest.artifacts["drafter"].path == "drafter_int8.onnx"
    assert not (folder / "drafter.onnx").exists()

    zeros = np.zeros((dims.block_size, 1), np.float32)
    features = normal(7, dims.feature_size)
    segment = DraftSegment(features, 0, [0], 5, DraftNoise(zeros[:, 0], zeros))
    inputs = pack_draft([segment], dims.kv.block_tokens).inputs
    first = []
    for path in (folder / "drafter_int8.onnx", folder.parent / "onnx" / "drafter.onnx"):
        engine = OrtEngine(path, dims.kv, drafter_inputs(dims), drafter_outputs(dims), 1, 1)
        first.append(engine.run(inputs)["draft_logits"][0, 0])
        engine.close()
    assert (first[0] != first[1]).any()
    np.testing.assert_allclose(*first, rtol=0, atol=0.05 * np.abs(first[1]).max())


@pytest.mark.usefixtures("small_layers_too")
@pytest.mark.parametrize("change", ["MAX_DISTANCE", "MAX_TIME"])  # not precise, not faster
def test_int8_that_does_not_help_is_not_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: str,
) -> None:
    monkeypatch.setattr(int8_drafter, change, 0.0)
    folder = build(tmp_path, "vanilla")
    assert load_manifest(folder).artifacts["drafter"].path == "drafter.onnx"
    assert not list(folder.glob("drafter_int8*"))
    assert "drafts stay in fp32" in capsys.readouterr().err


@pytest.mark.usefixtures("small_layers_too")
def test_int8_is_not_used_where_fp32_is_asked_for(tmp_path: Path) -> None:
    folder = build(tmp_path, "vanilla")
    command = ["build", "--name", "tiny", "--build-dir", str(tmp_path), "--fp32-drafts"]
    assert main(command) == 0
    assert load_manifest(folder).artifacts["drafter"].path == "drafter.onnx"
