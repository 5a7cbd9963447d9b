"""From a torch module to one ONNX file: trace each kind of part once, repeat layers, add weights.

Tracing costs seconds per layer and a model has dozens of equal ones, so `trace` turns one module
into a graph without weights, and `GraphBuilder` places it as often as needed, each time with other
tensors for its parameters. The result has exactly the inputs and outputs of `runtime.spec`, in its
order, under its names and dimension symbols.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import torch
from onnx import GraphProto, NodeProto, TensorProto, helper
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_map

from export.verifier import Verifier
from runtime.spec import (
    OPSET,
    Dtype,
    TensorSpec,
    VerifierDims,
    verifier_inputs,
    verifier_outputs,
)

ONNX_DTYPES: dict[Dtype, int] = {
    "int64": TensorProto.INT64,
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}
TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "int64": torch.int64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
ONNX_BY_TORCH = {TORCH_DTYPES[name]: value for name, value in ONNX_DTYPES.items()}

MAX_INLINE_BYTES = 2_000_000_000  # protobuf ends at 2 GiB; the graph itself needs some of it
IR_VERSION = 10  # of the ONNX file format; every runtime that reads the opset reads it
ALIGNMENT = 4096  # of each tensor in the data file, so that it can be mapped


# Example sizes of the dimension symbols. Primes, so that no two dimensions of an example are equal
# by accident, which the tracer would take for a rule.
EXAMPLE_SIZES = {"R": 37, "N": 41, "S": 43, "C": 47, "M": 53, "P": 59, "L": 61}


@dataclass(frozen=True)
class Part:
    """A traced module: its graph without weights, and the names of its tensors."""

    graph: GraphProto
    outputs: tuple[str, ...]
    parameters: frozenset[str]


def example_inputs(specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Zeros of every spec's dtype and shape, symbols at their example size."""
    return {
        spec.name: torch.zeros(
            [EXAMPLE_SIZES[d] if isinstance(d, str) else d for d in spec.dims],
            dtype=TORCH_DTYPES[spec.dtype],
        )
        for spec in specs
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's progress lines and notes about its own internals off the terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def trace(
    module: nn.Module,
    args: tuple[Any, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
    fixed_sizes: Collection[int],
) -> Part:
    """Trace `module` on example `args`, whose leaves and results get the names given.

    Every dimension of the arguments is dynamic except those whose size is in `fixed_sizes`.
    """
    dynamic = tree_map(
        lambda leaf: {i: Dim.DYNAMIC for i, n in enumerate(leaf.shape) if n not in fixed_sizes},
        args,
    )
    with _quiet():
        program = torch.onnx.export(
            module.eval(),
            args,
            dynamo=True,
            opset_version=OPSET,
            # The exporter does not keep these apart from names it makes up; a prefix does.
            input_names=[f"in:{n}" for n in inputs],
            output_names=[f"out:{n}" for n in outputs],
            dynamic_shapes=dynamic,
        )
    assert program is not None
    graph = program.model.graph
    parameters = frozenset(dict(module.named_parameters()))
    lost = parameters - graph.initializers.keys()
    if lost:
        raise RuntimeError(f"the exporter folded parameters away: {', '.join(sorted(lost))}")
    for name in parameters:
        del graph.initializers[name]  # stays in use as a free name, given to each copy
    proto = onnx_ir.serde.serialize_graph(graph)
    for node in proto.node:
        node.ClearField("metadata_props")  # source lines of this machine
        node.ClearField("doc_string")
    return Part(proto, tuple(outputs), parameters)


class GraphBuilder:
    """Collects nodes and weights of one ONNX model."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self.weights: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def add(
        self,
        part: Part,
        prefix: str,
        module: nn.Module,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Place a copy of `part` with the parameters of `module`; its names get `prefix`.

        `inputs` says which value of the model feeds each input of the part, `outputs` renames
        some results. Returns the model's name of each output. A parameter that modules share is
        stored once.
        """
        results = {n: (outputs or {}).get(n, f"{prefix}out:{n}") for n in part.outputs}
        names = {f"in:{n}": value for n, value in inputs.items()}
        names |= {f"out:{n}": value for n, value in results.items()}
        for name, weight in module.named_parameters():
            names[name] = self._names.setdefault(id(weight), f"{prefix}{name}")
            self.weights[names[name]] = weight.data

        def renamed(name: str) -> str:
            return names.setdefault(name, f"{prefix}{name}") if name else ""

        for constant in part.graph.initializer:
            copy = TensorProto()
            copy.CopyFrom(constant)
            copy.name = renamed(constant.name)
            self.constants.append(copy)
        for node in part.graph.node:
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.name = f"{prefix}{node.name}"
            copy.input[:] = [renamed(n) for n in node.input]
            copy.output[:] = [renamed(n) for n in node.output]
            self.nodes.append(copy)
        return results

    def concat(self, inputs: Sequence[str], output: str) -> None:
        """Join `inputs` along the last axis."""
        self.nodes.append(helper.make_node("Concat", inputs, [output], name=output, axis=-1))

    def save(
        self, path: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> list[Path]:
        """Write the model with exactly these inputs and outputs; returns the files written.

        Weights above `MAX_INLINE_BYTES` go to one file beside it, `path` + ".data".
        """
        size = sum(w.nbytes for w in self.weights.values())
        data_path = path.with_name(path.name + ".data") if size > MAX_INLINE_BYTES else None
        graph = helper.make_graph(
            self.nodes,
            path.stem,
            [_value_info(spec) for spec in inputs],
            [_value_info(spec) for spec in outputs],
            self.constants,
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="dspark",
        )
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(data_path.open("wb")) if data_path else None
            for name, weight in self.weights.items():
                tensor = model.graph.initializer.add(
                    name=name, data_type=ONNX_BY_TORCH[weight.dtype], dims=weight.shape
                )
                raw = weight.contiguous().flatten().view(torch.uint8).numpy()
                if file is None:
                    tensor.raw_data = raw.tobytes()
                    continue
                file.seek(-file.tell() % ALIGNMENT, io.SEEK_CUR)
                tensor.data_location = TensorProto.EXTERNAL
                place = {
                    "location": Path(file.name).name,
                    "offset": file.tell(),
                    "length": raw.nbytes,
                }
                for key, value in place.items():
                    tensor.external_data.add(key=key, value=str(value))
                file.write(raw.data)
        path.write_bytes(model.SerializeToString())
        onnx.checker.check_model(path)
        return [path, data_path] if data_path else [path]


def _value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(spec.name, ONNX_DTYPES[spec.dtype], spec.dims)


def verifier_to_onnx(verifier: Verifier, dims: VerifierDims, path: Path) -> list[Path]:
    """Write the verifier's graph to `path`; returns the files written."""
    inputs, outputs = verifier_inputs(dims), verifier_outputs(dims)
    example = example_inputs(inputs)
    names = list(example)
    step, (logits_index, *pools) = names[:7], names[7:]
    plan_args = tuple(example[n] for n in step)
    x, plan = verifier.plan(*plan_args)
    fixed = {
        dims.hidden_size,
        dims.kv.num_kv_heads,
        dims.kv.head_dim,
        dims.kv.block_tokens,
        verifier.num_heads,
        1,
    }
    fields = plan._fields
    plan_part = trace(verifier.plan, plan_args, step, ["x", *fields], fixed)
    layer_part = trace(
        verifier.layers[0],
        (x, plan, example[pools[0]], example[pools[1]]),
        ["x", *fields, "k_pool", "v_pool"],
        ["x_out", "k", "v"],
        fixed,
    )
    head_part = trace(
        verifier.head, (x, example[logits_index]), ["x", "logits_index"], ["logits"], fixed
    )

    builder = GraphBuilder()
    values = builder.add(plan_part, "plan.", verifier.plan, {n: n for n in step})
    taps = []
    for i, layer in enumerate(verifier.layers):
        feeds = values | {"k_pool": f"k_pool.{i}", "v_pool": f"v_pool.{i}"}
        results = {"k": f"k_new.{i}", "v": f"v_new.{i}"}
        values["x"] = builder.add(layer_part, f"layers.{i}.", layer, feeds, results)["x_out"]
        if i in dims.tapped_layers:
            taps.append(values["x"])
    if taps:
        builder.concat(taps, "features")
    feeds = {"x": values["x"], "logits_index": "logits_index"}
    builder.add(head_part, "head.", verifier.head, feeds, {"logits": "logits"})
    return builder.save(path, inputs, outputs)
