"""Every graph rule broken once, by a graph of a few nodes; the project's own graphs break none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from engines.graph_rules import MAX_TOP_K, violations

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
INDEX = numpy_helper.from_array(np.array([[0], [1]], np.int64), "index")
TOO_MANY = numpy_helper.from_array(np.array([MAX_TOP_K + 1], np.int64), "k")
TWO = numpy_helper.from_array(np.array(2.0, np.float16), "two")


def node(kind: str, inputs: list[str], outputs: list[str] | None = None, **more: Any) -> NodeProto:
    return helper.make_node(kind, inputs, outputs or ["y"], name=f"the_{kind.lower()}", **more)


def save(
    path: Path,
    nodes: list[NodeProto],
    inputs: dict[str, tuple[int, list[Any]]],
    output: tuple[int, list[Any]] = (FLOAT, ["A", "B"]),
    constants: tuple[TensorProto, ...] = (),
    opset: int = 20,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(n, *about) for n, about in inputs.items()],
        [helper.make_tensor_value_info("y", *output)],
        list(constants),
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


X = {"x": (FLOAT, ["N", 4])}
BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "random numbers": (
        "node the_randomnormallike (RandomNormalLike): random numbers are inputs, TensorRT "
        "ignores seeds",
        {"nodes": [node("RandomNormalLike", ["x"])], "inputs": X},
    ),
    "data-dependent size": (
        "node the_nonzero (NonZero): the size of its result depends on data",
        {
            "nodes": [node("NonZero", ["x"])],
            "inputs": X,
            "output": (TensorProto.INT64, [2, "K"]),
        },
    ),
    "scatter with a sum": (
        "node the_scatternd (ScatterND): TensorRT has no reduction while scattering",
        {
            "nodes": [node("ScatterND", ["x", "index", "x"], reduction="add")],
            "inputs": {"x": (FLOAT, [2, 4])},
            "constants": (INDEX,),
        },
    ),
    "a large top-k": (
        f"node the_topk (TopK): k is {MAX_TOP_K + 1}, TensorRT's limit is {MAX_TOP_K}",
        {
            "nodes": [node("TopK", ["x", "k"], ["y", "places"])],
            "inputs": {"x": (FLOAT, ["N", "V"])},
            "constants": (TOO_MANY,),
        },
    ),
    "a top-k by data": (
        "node the_topk (TopK): k must be a constant",
        {
            "nodes": [node("TopK", ["x", "k"], ["y", "places"])],
            "inputs": {**X, "k": (TensorProto.INT64, [1])},
        },
    ),
    "uint32": (
        "value x: TensorRT has no UINT32",
        {
            "nodes": [node("Cast", ["x"], to=FLOAT)],
            "inputs": {"x": (TensorProto.UINT32, ["N", 4])},
        },
    ),
    "a vendor's operator": (
        "node the_gelu (Gelu): the operator is com.microsoft's own and not ONNX",
        {"nodes": [node("Gelu", ["x"], domain="com.microsoft")], "inputs": X},
    ),
    "a softmax in half": (
        "node the_softmax (Softmax): norms and softmax are computed in fp32",
        {
            "nodes": [node("Softmax", ["x"])],
            "inputs": {"x": (HALF, ["N", 4])},
            "output": (HALF, ["N", 4]),
        },
    ),
    "a norm in half": (
        "node the_pow (Pow): norms and softmax are computed in fp32",
        {
            "nodes": [node("Pow", ["x", "two"])],
            "inputs": {"x": (HALF, ["N", 4])},
            "output": (HALF, ["N", 4]),
            "constants": (TWO,),
        },
    ),
    "features in half": (
        "node the_cast (Cast): features are projected in fp32: they leave fp16's range",
        {
            "nodes": [node("Cast", ["context_features"], to=HALF)],
            "inputs": {"context_features": (FLOAT, ["C", 4])},
            "output": (HALF, ["C", 4]),
        },
    ),
    "a written pool": (
        "node the_scatternd (ScatterND): a pool is only read: new keys and values are outputs",
        {
            "nodes": [node("ScatterND", ["k_pool.0", "index", "x"])],
            "inputs": {"k_pool.0": (FLOAT, ["P", 4]), "x": (FLOAT, [2, 4])},
            "constants": (INDEX,),
        },
    ),
    "a nameless dimension": (
        "input x: dimension 0 has neither size nor name: equal sizes share a name",
        {"nodes": [node("Neg", ["x"])], "inputs": {"x": (FLOAT, [None, 4])}},
    ),
    "causal attention": (
        "node the_attention (Attention): the mask is an input: is_causal does not know about "
        "gathered pages",
        {
            "nodes": [node("Attention", ["x", "x", "x"], is_causal=1, TRT_decomposable=1)],
            "inputs": {"x": (FLOAT, ["R", 2, "S", 4])},
            "output": (FLOAT, ["R", 2, "S", 4]),
            "opset": 23,
        },
    ),
    "attention in fp32": (
        "node the_attention (Attention): in fp32 TensorRT needs TRT_decomposable=1: use MatMul "
        "and Softmax instead",
        {
            "nodes": [node("Attention", ["x", "x", "x"])],
            "inputs": {"x": (FLOAT, ["R", 2, "S", 4])},
            "output": (FLOAT, ["R", 2, "S", 4]),
            "opset": 23,
        },
    ),
    "lengths of keys": (
        "node the_attention (Attention): TensorRT drops nonpad_kv_seqlen silently: mask instead",
        {
            "nodes": [node("Attention", ["x", "x", "x", "", "", "", "lens"])],
            "inputs": {"x": (HALF, ["R", 2, "S", 4]), "lens": (TensorProto.INT64, ["R"])},
            "output": (HALF, ["R", 2, "S", 4]),
            "opset": 24,
        },
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_names_the_node_and_the_rule(name: str, tmp_path: Path) -> None:
    expected, graph = BROKEN[name]
    found = [str(v) for v in violations(save(tmp_path / "graph.onnx", **graph))]
    newer = graph.get("opset", 20)
    assert found == [
        *([f"the graph: opset {newer} is newer than 20"] if newer > 20 else []),
        expected,
    ]


def test_contradicting_types_are_found(tmp_path: Path) -> None:
    inputs = {"x": (FLOAT, ["N", 4]), "z": (HALF, ["N", 4])}
    path = save(tmp_path / "graph.onnx", [node("Add", ["x", "z"])], inputs)
    with pytest.raises(onnx.shape_inference.InferenceError):
        violations(path)


def test_the_projects_graphs_break_no_rule(tiny_pair_build: Path) -> None:
    for graph in ("verifier", "drafter"):
        assert violations(tiny_pair_build / "onnx" / f"{graph}.onnx") == []
