"""The verifier against transformers: every architecture, and the graph's corner cases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

from export.checkpoint import load_target
from export.parity import Run, grid_indices, module_runner, onnx_runner, verifier_parity
from export.to_onnx import TORCH_DTYPES
from export.verifier import Verifier
from runtime.manifest import load_manifest
from runtime.spec import Dtype, KvDims, VerifierDims, verifier_inputs, verifier_outputs
from tests.helpers import TINY_TARGET_LAYERS, make_tiny_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    # A window that is configured but switched off, as Qwen checkpoints have it.
    "qwen2-window-off": ("qwen2", {"sliding_window": 16, "use_sliding_window": False}),
}


def torch_verifier(folder: Path, dtype: Dtype = "fp32") -> tuple[Run, VerifierDims]:
    config, weights = load_target(folder)
    decoder = config.decoder
    dims = VerifierDims(
        kv=KvDims(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim, 16, dtype),
        hidden_size=decoder.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        tapped_layers=TINY_TARGET_LAYERS,
    )
    module = Verifier(
        config,
        weights,
        dtype=TORCH_DTYPES[dtype],
        block_tokens=16,
        tapped_layers=TINY_TARGET_LAYERS,
    )
    return module_runner(module, verifier_outputs(dims)), dims


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    architecture, overrides = MODELS[name]
    if "rope_parameters" in overrides:
        overrides = {"rope_parameters": {"rope_theta": 10000.0, **overrides["rope_parameters"]}}
    make_tiny_model(tmp_path, architecture, **overrides)
    run, dims = torch_verifier(tmp_path)
    report = verifier_parity(run, dims, tmp_path, atol=1e-4)
    report.check()
    assert report.argmax_agreement == 1.0
    assert set(report.differences) == {"logits", "features", "keys", "values"}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_stays_close(dtype: Dtype, target_dir: Path) -> None:
    run, dims = torch_verifier(target_dir, dtype)
    report = verifier_parity(run, dims, target_dir, atol={"fp16": 0.05, "bf16": 0.4}[dtype])
    report.check()
    assert report.differences["logits"].max > 1e-4  # it did compute in half precision


def test_graph_equals_transformers(exported: Path) -> None:
    parity = load_manifest(exported / "onnx").parity["verifier"]
    assert parity["differences"]["logits"]["max"] < 1e-4
    assert parity["differences"]["features"]["max"] < 1e-4
    assert parity["argmax_agreement"] == 1.0


@pytest.fixture(scope="module")
def graph(exported: Path) -> tuple[Run, VerifierDims]:
    manifest = load_manifest(exported / "onnx")
    return onnx_runner(exported / "onnx" / manifest.artifacts["verifier"].path), manifest.verifier


def step(
    dims: VerifierDims,
    context_lens: list[int],
    segment_lens: list[int],
    *,
    logits_index: list[int] | None = None,
    pools: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Inputs of one step with fixed token ids; request r's blocks are 3r, 3r + 1, 3r + 2."""
    generator = torch.Generator().manual_seed(0)
    segments, contexts = torch.tensor(segment_lens), torch.tensor(context_lens)
    requests, tokens = len(segment_lens), sum(segment_lens)
    pad_index, unpad_index = grid_indices(segments)
    starts = [torch.arange(c, c + s) for c, s in zip(context_lens, segment_lens, strict=True)]
    shape = (3 * requests, 16, dims.kv.num_kv_heads, dims.kv.head_dim)
    wanted = range(tokens) if logits_index is None else logits_index
    values = {
        "token_ids": torch.randint(dims.vocab_size, (tokens,), generator=generator),
        "position_ids": torch.cat(starts),
        "pad_index": pad_index,
        "unpad_index": unpad_index,
        "segment_lens": segments,
        "context_lens": contexts,
        "block_table": torch.arange(3 * requests).reshape(requests, 3),
        "logits_index": torch.tensor(list(wanted), dtype=torch.int64),
        **{spec.name: torch.randn(shape, generator=generator) for spec in dims.kv.pool_specs()},
        **(pools or {}),
    }
    return {spec.name: values[spec.name] for spec in verifier_inputs(dims)}


def test_one_request_one_token_no_context(graph: tuple[Run, VerifierDims]) -> None:
    run, dims = graph
    outputs = run(step(dims, [0], [1]))
    assert outputs["logits"].shape == (1, dims.vocab_size)
    assert outputs["features"].shape == (1, dims.feature_size)
    assert outputs["k_new.0"].shape == (1, dims.kv.num_kv_heads, dims.kv.head_dim)


def test_no_logits_wanted(graph: tuple[Run, VerifierDims]) -> None:
    run, dims = graph
    all_rows = run(step(dims, [5, 20], [3, 1]))
    none = run(step(dims, [5, 20], [3, 1], logits_index=[]))
    assert none["logits"].shape == (0, dims.vocab_size)
    torch.testing.assert_close(none["features"], all_rows["features"], rtol=0, atol=1e-5)


def test_wanted_rows_are_those_rows(graph: tuple[Run, VerifierDims]) -> None:
    run, dims = graph
    all_rows = run(step(dims, [5, 20], [3, 1]))["logits"]
    some = run(step(dims, [5, 20], [3, 1], logits_index=[3, 0]))["logits"]
    torch.testing.assert_close(some, all_rows[[3, 0]], rtol=0, atol=1e-5)


def test_unused_slots_do_not_show(graph: tuple[Run, VerifierDims]) -> None:
    """Slots past each context may hold anything finite: results are equal to the last bit."""
    run, dims = graph
    contexts = [0, 17, 33]
    clean = step(dims, contexts, [2, 4, 1])
    dirty = {name: tensor.clone() for name, tensor in clean.items()}
    for spec in dims.kv.pool_specs():
        tokens = dirty[spec.name].reshape(3, 48, -1)
        for r, context in enumerate(contexts):
            tokens[r, context:] = torch.finfo(torch.float32).max * (-1) ** r
    before, after = run(clean), run(dirty)
    for name in before:
        assert torch.equal(before[name], after[name]), name


def test_a_segment_equals_its_tokens_one_by_one(graph: tuple[Run, VerifierDims]) -> None:
    """Causality and the cache's layout: writing each token's K/V gives the segment's logits."""
    run, dims = graph
    whole = step(dims, [14], [5])
    expected = run(whole)["logits"]
    pools = {spec.name: whole[spec.name].clone() for spec in dims.kv.pool_specs()}
    for i in range(5):
        one = step(dims, [14 + i], [1], pools=pools)
        one["token_ids"] = whole["token_ids"][i : i + 1]
        outputs = run(one)
        torch.testing.assert_close(outputs["logits"][0], expected[i], rtol=0, atol=1e-4)
        for spec in dims.kv.pool_specs():
            new = outputs[spec.name.replace("pool", "new")][0]
            pools[spec.name].flatten(0, 1)[14 + i] = new


FORBIDDEN = {"NonZero", "Multinomial", "CumProd", "Unique", "Attention"}
MAX_TOP_K = 3840  # TensorRT's


@pytest.mark.parametrize("artifact", ["verifier", "drafter"])
def test_graph_follows_the_rules(exported: Path, artifact: str) -> None:
    """One file must suit ONNX Runtime, TensorRT 10 and 11 and TensorRT-RTX."""
    manifest = load_manifest(exported / "onnx")
    model = onnx.load(exported / "onnx" / manifest.artifacts[artifact].path)
    operators = {node.op_type for node in model.graph.node}
    assert not operators & FORBIDDEN
    assert not {name for name in operators if name.startswith("Scatter")}
    assert {node.domain for node in model.graph.node} == {""}
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 20)]
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    top_k = [constants[n.input[1]] for n in model.graph.node if n.op_type == "TopK"]
    assert all(k.item() <= MAX_TOP_K for k in top_k)
    unsigned = {onnx.TensorProto.UINT32, onnx.TensorProto.UINT64}
    assert not {t.data_type for t in model.graph.initializer} & unsigned
    used = {name for node in model.graph.node for name in node.input}
    assert not {i.name for i in model.graph.input} - used  # TensorRT warns of unused inputs
    assert "/" not in "".join(str(node.metadata_props) for node in model.graph.node)


def test_graph_has_the_contract_in_its_order(exported: Path) -> None:
    manifest = load_manifest(exported / "onnx")
    model = onnx.load(exported / "onnx" / "verifier.onnx")
    for values, specs in (
        (model.graph.input, verifier_inputs(manifest.verifier)),
        (model.graph.output, verifier_outputs(manifest.verifier)),
    ):
        dims = [
            tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim)
            for value in values
        ]
        assert [(v.name, d) for v, d in zip(values, dims, strict=True)] == [
            (spec.name, spec.dims) for spec in specs
        ]
