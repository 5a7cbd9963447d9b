"""What a graph may hold so that one ONNX file serves ONNX Runtime, TensorRT 10, 11 and RTX.

Each rule stands for something that one of them refuses, or worse: computes differently without a
word. `violations` names every node that breaks one, and the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from runtime.spec import OPSET

MAX_TOP_K = 3840
SMALL_BYTES = 4096  # constants up to this size take part in shape inference

FORBIDDEN = {
    "Bernoulli": "random numbers are inputs, TensorRT ignores seeds",
    "Multinomial": "random numbers are inputs, TensorRT ignores seeds",
    "RandomNormal": "random numbers are inputs, TensorRT ignores seeds",
    "RandomNormalLike": "random numbers are inputs, TensorRT ignores seeds",
    "RandomUniform": "random numbers are inputs, TensorRT ignores seeds",
    "RandomUniformLike": "random numbers are inputs, TensorRT ignores seeds",
    "CumProd": "TensorRT has no cumulative product: compare a cumulative sum instead",
    "NonZero": "the size of its result depends on data",
    "Unique": "the size of its result depends on data",
}
SCATTERS = ("Scatter", "ScatterElements", "ScatterND")
# These lose a model's large activations in half precision.
FP32_ONLY = (
    "LayerNormalization",
    "Pow",
    "ReduceL2",
    "ReduceMean",
    "ReduceSumSquare",
    "RMSNormalization",
    "Softmax",
    "Sqrt",
)
HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
ALLOWED_DTYPES = (
    TensorProto.FLOAT,
    TensorProto.INT64,
    TensorProto.INT32,
    TensorProto.BOOL,
    *HALVES,
)
POOL_READERS = ("Gather", "GatherND", "Reshape", "Shape")
ATTENTION_NONPAD_INPUT = 6  # of opset 24: nonpad_kv_seqlen


@dataclass(frozen=True)
class Violation:
    """A node, or an input of the graph, and the rule that it breaks."""

    where: str
    rule: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}"


def violations(path: Path) -> list[Violation]:
    """Every rule that the graph at `path` breaks; weights are not read.

    Raises onnx.shape_inference.InferenceError when types or shapes contradict each other.
    """
    model = onnx.load(path, load_external_data=False)
    _drop_weights(model)
    model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    return list(_check(model))


def _drop_weights(model: ModelProto) -> None:
    """Turn large constants into inputs: the rules need their types, not two gigabytes of them."""
    graph = model.graph
    small = [t for t in graph.initializer if len(t.raw_data) <= SMALL_BYTES and not t.external_data]
    names = {t.name for t in small}
    for tensor in graph.initializer:
        if tensor.name not in names:
            graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    del graph.initializer[:]
    graph.initializer.extend(small)


def _check(model: ModelProto) -> Iterator[Violation]:
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version > OPSET:
            yield Violation("the graph", f"opset {opset.version} is newer than {OPSET}")
    graph = model.graph
    types = _types(graph)
    constants = {t.name: t for t in graph.initializer}
    for value in graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.dim_param and not dim.HasField("dim_value"):
                yield Violation(
                    f"input {value.name}",
                    f"dimension {axis} has neither size nor name: equal sizes share a name",
                )
    for name, dtype in types.items():
        if dtype not in ALLOWED_DTYPES:
            yield Violation(f"value {name}", f"TensorRT has no {TensorProto.DataType.Name(dtype)}")
    for node in graph.node:
        for rule in _broken(node, types, constants):
            yield Violation(f"node {node.name or node.output[0]} ({node.op_type})", rule)


def _types(graph: GraphProto) -> dict[str, int]:
    values = [*graph.input, *graph.value_info, *graph.output]
    types = {v.name: v.type.tensor_type.elem_type for v in values}
    return types | {t.name: t.data_type for t in graph.initializer}


def _broken(
    node: NodeProto, types: dict[str, int], constants: dict[str, TensorProto]
) -> Iterator[str]:
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    kind = node.op_type
    if node.domain not in ("", "ai.onnx"):
        yield f"the operator is {node.domain}'s own and not ONNX"
    if kind in FORBIDDEN:
        yield FORBIDDEN[kind]
    if kind in SCATTERS and attributes.get("reduction", b"none") != b"none":
        yield "TensorRT has no reduction while scattering"
    if kind == "TopK":
        k = constants.get(node.input[1])
        count = None if k is None else int(onnx.numpy_helper.to_array(k).item())
        if count is None:
            yield "k must be a constant"
        elif count > MAX_TOP_K:
            yield f"k is {count}, TensorRT's limit is {MAX_TOP_K}"
    if kind == "Attention":
        if attributes.get("is_causal"):
            yield "the mask is an input: is_causal does not know about gathered pages"
        if len(node.input) > ATTENTION_NONPAD_INPUT and node.input[ATTENTION_NONPAD_INPUT]:
            yield "TensorRT drops nonpad_kv_seqlen silently: mask instead"
        if types.get(node.input[0]) == TensorProto.FLOAT and not attributes.get("TRT_decomposable"):
            yield "in fp32 TensorRT needs TRT_decomposable=1: use MatMul and Softmax instead"
    if kind in FP32_ONLY and any(types.get(n) in HALVES for n in node.input):
        yield "norms and softmax are computed in fp32"
    if "context_features" in node.input and any(types.get(n) in HALVES for n in node.output):
        yield "features are projected in fp32: they leave fp16's range"
    if any("_pool." in name for name in node.input) and kind not in POOL_READERS:
        yield "a pool is only read: new keys and values are outputs"
