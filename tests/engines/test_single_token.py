"""Weights found on the grids of quantised checkpoints, and the graph for single tokens."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from engines import linear_graph, single_token
from engines.build import build_engines
from engines.single_token import find_grid
from export.pair import ExportOptions, export_pair
from runtime.batch import VerifySegment, pack_verify
from runtime.engine import load_engines
from runtime.manifest import load_manifest
from runtime.ort_engine import OrtEngine
from tests.helpers import make_tiny_model

SINGLE = "verifier_single_token"


@pytest.fixture(autouse=True)
def speed_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny weights are read in no time."""
    monkeypatch.setattr(single_token, "MAX_TIME", float("inf"))


def quantised(weight: NDArray[np.float32], kind: Kind) -> NDArray[np.float32]:
    return gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("kind", "bits"), [(Kind.Q4_0, 4), (Kind.Q4_1, 4), (Kind.Q8_0, 8)])
def test_finds_the_grid_of_a_checkpoint_in_its_values(kind: Kind, bits: int) -> None:
    weight = quantised(normal(20, 96), kind)
    weight[3, 32:64] = 0.25 if bits == 4 else 0  # a block of one value
    grid = find_grid(weight)
    assert grid is not None
    assert grid.bits == bits
    assert grid.q.max() < 2**bits
    blocks = grid.q.reshape(20, 3, 32).astype(np.float32)
    again = blocks * grid.d[..., None] + grid.m[..., None]
    np.testing.assert_array_equal(again.reshape(20, 96), weight)


def test_finds_grids_whose_ends_are_not_used() -> None:
    rng = np.random.default_rng(1)
    q = rng.integers(2, 12, (10, 64)).astype(np.float32).reshape(10, 2, 32)
    d, m = (rng.random((10, 2, 1)).astype(np.float16).astype(np.float32) for _ in range(2))
    weight = (q * d + m).reshape(10, 64)
    grid = find_grid(weight)
    assert grid is not None
    again = grid.q.reshape(10, 2, 32) * grid.d[..., None] + grid.m[..., None]
    np.testing.assert_array_equal(again.reshape(10, 64), weight)


def test_finds_grids_whose_steps_are_products_of_their_own() -> None:
    """As in Q4_K: fp16 times 6 bits, computed in fp32."""
    rng = np.random.default_rng(2)
    super_scale, super_min = (rng.random((20, 1, 1)).astype(np.float16) for _ in range(2))
    scale, minimum = (rng.integers(1, 64, (20, 8, 1)).astype(np.float32) for _ in range(2))
    q = rng.integers(0, 16, (20, 8, 32)).astype(np.float32)
    blocks = super_scale.astype(np.float32) * scale * q - super_min.astype(np.float32) * minimum
    weight = blocks.reshape(20, 256)
    grid = find_grid(weight)
    assert grid is not None
    again = grid.q.reshape(20, 8, 32) * grid.d[..., None] + grid.m[..., None]
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    assert (np.abs(again - blocks) <= 2.0**-22 * largest).all()


def test_weights_off_a_grid_stay_as_they_are() -> None:
    assert find_grid(normal(20, 64)) is None
    for kind in (Kind.Q4_1, Kind.Q8_0):
        weight = quantised(normal(20, 64), kind)
        weight[15, 40] += np.float32(1e-5)  # not among the first rows
        assert find_grid(weight) is None
    assert find_grid(quantised(normal(20, 64), Kind.Q4_1)[:, :48]) is None  # half a block


def build(root: Path, architecture: str, share: float = 1.0) -> Path:
    """A tiny model, that share of its layers' weights in Q4_1 and its output layer in Q8_0."""
    model = make_tiny_model(root / "model", architecture)
    path = model / "model.safetensors"
    tensors = load_file(path)
    layers = [name for name in tensors if "_proj.weight" in name]
    for name in layers[: round(share * len(layers))]:
        tensors[name] = quantised(tensors[name], Kind.Q4_1)
    if share:
        tensors["lm_head.weight"] = quantised(tensors["lm_head.weight"], Kind.Q8_0)
    save_file(tensors, path, {"format": "pt"})
    export_pair(ExportOptions(model=str(model), name="tiny", build_dir=root))
    assert build_engines(root / "tiny")
    return root / "tiny"


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # the second has biases
def test_single_tokens_read_few_bits_and_get_the_same_logits(
    tmp_path: Path, architecture: str
) -> None:
    folder = build(tmp_path, architecture) / "engines"
    manifest = load_manifest(folder)
    path = folder / manifest.artifacts[SINGLE].path
    graph = onnx.load(path).graph
    bits = [
        next(a.i for a in node.attribute if a.name == "bits")
        for node in graph.node
        if node.op_type == "MatMulNBits"
    ]
    assert bits == [4] * 20 + [8]

    engine = load_engines(folder, manifest, num_blocks=2, threads=1).verifier
    alone = OrtEngine(
        folder / manifest.artifacts["verifier"].path,
        manifest.verifier.kv,
        list(engine._inputs.values()) + engine._pool_specs,
        engine._outputs + engine._new_specs,
        2,
        1,
    )
    tokens = [5, 9, 30, 7, 11]
    for n in (1, 2, 1, 1):  # K/V of one graph feed the other
        context, tokens_now = 5 - len(tokens), tokens[:n]
        tokens = tokens[n:]
        batch = pack_verify([VerifySegment(tokens_now, context, [0, 1], 1)], 16).inputs
        results = []
        for own in (engine, alone):
            results.append(own.run(batch))
            own.commit(np.arange(n), np.arange(context, context + n))
        for name, expected in results[1].items():
            scale = np.abs(expected).max()
            np.testing.assert_allclose(results[0][name], expected, rtol=0, atol=1e-5 * scale)
            if n == 1:
                assert (results[0][name] != expected).any(), "the same graph ran twice"
    engine.close()
    alone.close()


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_models_with_few_such_weights_have_one_graph(tmp_path: Path, share: float) -> None:
    folder = build(tmp_path, "llama", share) / "engines"
    assert SINGLE not in load_manifest(folder).artifacts
    assert not (folder / f"{SINGLE}.onnx").exists()


def test_weights_that_do_not_fit_the_file_go_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_graph, "MAX_FILE_BYTES", 10_000)
    folder = build(tmp_path, "llama") / "engines"
    assert load_manifest(folder).artifacts[SINGLE].data_files == (f"{SINGLE}.onnx.data",)


def test_weights_beside_a_graph_are_found_as_those_in_it(tmp_path: Path) -> None:
    inside = build(tmp_path, "llama") / "onnx" / "verifier.onnx"
    beside = tmp_path / "large.onnx"
    onnx.save(onnx.load(inside), beside, save_as_external_data=True, location="large.data")
    targets = [tmp_path / name for name in ("a.onnx", "b.onnx")]
    for source, target in zip((inside, beside), targets, strict=True):
        assert single_token.rewrite(source, target) == [target]
    first, second = (onnx.load(target).graph for target in targets)
    assert first.node == second.node
    for one, other in zip(first.initializer, second.initializer, strict=True):
        np.testing.assert_array_equal(*map(onnx.numpy_helper.to_array, (one, other)))


@pytest.mark.parametrize(
    ("change", "value"),
    [("FP32_ARITHMETIC", single_token.INT8_ARITHMETIC), ("MAX_TIME", 0.0)],  # inexact, not faster
)
def test_a_graph_that_does_not_help_is_not_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: str,
    value: float,
) -> None:
    monkeypatch.setattr(single_token, change, value)
    folder = build(tmp_path, "llama") / "engines"
    assert SINGLE not in load_manifest(folder).artifacts
    assert not (folder / f"{SINGLE}.onnx").exists()
    assert "stay as they are; with few bits" in capsys.readouterr().err
