"""From a torch module to one ONNX file: trace each kind of part once, repeat layers, add weights.

Tracing costs seconds per layer and a model has dozens of equal ones, so `trace` turns one module
into a graph without weights, and `GraphBuilder` places it as often as needed, each time with other
tensors for its parameters. The result has exactly the inputs and outputs of `runtime.spec`, in its
order, under its names and dimension symbols.
"""

from __future__ import annotations

import contextlib
import inspect
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
from onnxscript import opset20
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_map

from export.drafter import Drafter, Sampling, StepInputs
from export.verifier import Verifier
from runtime.spec import (
    OPSET,
    DrafterDims,
    Dtype,
    TensorSpec,
    VerifierDims,
    drafter_inputs,
    drafter_outputs,
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


# Two example sizes of every dimension symbol: what differs between the examples is dynamic. The
# first are primes, so that no two dimensions are equal by accident, which the tracer would take for
# a rule.
EXAMPLE_SIZES = (
    {"R": 37, "N": 41, "S": 43, "C": 47, "M": 53, "P": 59, "L": 61, "W": 67},
    {"R": 2, "N": 3, "S": 5, "C": 7, "M": 11, "P": 13, "L": 17, "W": 19},
)


@dataclass(frozen=True)
class Part:
    """A traced module: its graph, in which parameters are inputs, and its outputs' names.

    Inputs, parameters among them, are called `in:` + name, outputs `out:` + name.
    """

    graph: GraphProto
    outputs: tuple[str, ...]


def example_inputs(specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Zeros of every spec's dtype and shape, symbols at the given sizes."""
    return {
        spec.name: torch.zeros(
            [sizes[d] if isinstance(d, str) else d for d in spec.dims],
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
    examples: Sequence[tuple[Any, ...]],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> Part:
    """Trace `module` on two examples of its arguments; leaves and results get the names given.

    A dimension is dynamic when its size differs between the examples.
    """
    args, others = examples
    dynamic = tree_map(
        lambda one, two: {i: Dim.DYNAMIC for i in range(one.dim()) if one.shape[i] != two.shape[i]},
        args,
        others,
    )
    weights = dict(module.named_parameters())
    with _quiet():
        program = torch.onnx.export(
            _WithWeights(module).eval(),
            (weights, *args),
            dynamo=True,
            opset_version=OPSET,
            # The exporter does not keep these apart from names it makes up; a prefix does.
            input_names=[f"in:{n}" for n in (*weights, *inputs)],
            output_names=[f"out:{n}" for n in outputs],
            dynamic_shapes=({n: {} for n in weights}, dynamic),
            # ONNX looks at the shapes when it runs: what is 1 then is repeated.
            custom_translation_table={torch.ops.dspark.add_noise.default: opset20.Add},
        )
    assert program is not None
    graph = onnx_ir.serde.serialize_graph(program.model.graph)
    for node in graph.node:
        node.ClearField("metadata_props")  # source lines of this machine
        node.ClearField("doc_string")
    return Part(graph, tuple(outputs))


class _WithWeights(nn.Module):
    """A module whose parameters come with the call: as graph inputs they are never folded into
    constants, merged with equal ones, or renamed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = [module]  # hidden from nn.Module, which would register the parameters

    def forward(self, weights: dict[str, Tensor], *args: Any) -> Any:
        """Run the module on `args` with `weights` for its parameters."""
        return torch.func.functional_call(self.module[0], weights, args)


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
            stored = self._names.setdefault(id(weight), f"{prefix}{name}")
            names[f"in:{name}"] = stored
            self.weights[stored] = weight.data

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

    def concat(self, inputs: Sequence[str], output: str, axis: int) -> None:
        """Join `inputs` along an axis."""
        self.nodes.append(helper.make_node("Concat", inputs, [output], name=output, axis=axis))

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
    builder, x, examples = _trunk(verifier, inputs, dims.tapped_layers)
    args = [(e["x"], e["logits_index"]) for e in examples]
    part = trace(verifier.head, args, ["x", "logits_index"], ["logits"])
    feeds = {"x": x, "logits_index": "logits_index"}
    builder.add(part, "head.", verifier.head, feeds, {"logits": "logits"})
    return builder.save(path, inputs, outputs)


def drafter_to_onnx(drafter: Drafter, dims: DrafterDims, path: Path) -> list[Path]:
    """Write the drafter's graph to `path`; returns the files written."""
    inputs, outputs = drafter_inputs(dims), drafter_outputs(dims)
    builder, x, examples = _trunk(drafter, inputs)
    noise, sampling = ["uniforms", "noise"], list(Sampling._fields)
    args = [(e["x"], *(e[n] for n in noise)) for e in examples]
    ready = [drafter.heads(*own) for own in args]
    state = ["state"] if ready[0][1] else []
    names = [f"{field}.{k}" for k in range(dims.block_size) for field in StepInputs._fields]
    part = trace(drafter.heads, args, ["x", *noise], [*names, *state])
    values = builder.add(part, "heads.", drafter.heads, {"x": x} | {n: n for n in noise})

    step_args = [
        (e["anchor_ids"], steps[0], Sampling(*(e[n] for n in sampling)), first)
        for e, (steps, first) in zip(examples, ready, strict=True)
    ]
    results = [spec.name for spec in outputs[: len(outputs) - 2 * dims.kv.num_layers]]
    step_inputs = ["last", *StepInputs._fields, *sampling, *state]
    part = trace(drafter.step, step_args, step_inputs, ["last", *state, *results])
    feeds = {n: n for n in sampling} | {n: values[n] for n in state} | {"last": "anchor_ids"}
    columns: dict[str, list[str]] = {name: [] for name in results}
    for k in range(dims.block_size):
        feeds |= {field: values[f"{field}.{k}"] for field in StepInputs._fields}
        placed = builder.add(part, f"steps.{k}.", drafter.step, feeds)
        feeds |= {n: placed[n] for n in ("last", *state)}
        for name in results:
            columns[name].append(placed[name])
    for name, parts in columns.items():
        builder.concat(parts, name, axis=1)
    return builder.save(path, inputs, outputs)


def _trunk(
    model: Verifier | Drafter, specs: Sequence[TensorSpec], tapped_layers: Collection[int] = ()
) -> tuple[GraphBuilder, str, list[dict[str, Tensor]]]:
    """The graph of plan and layers: each traced once, the layer repeated.

    The plan takes the contract's inputs up to the pools as far as its signature goes. Returns the
    graph, the name of the residual stream after the last layer, and two examples of the
    contract's inputs and of that stream ("x").
    """
    count = len(inspect.signature(model.plan.forward).parameters)
    plan_inputs = [spec.name for spec in specs[:count]]
    examples = [example_inputs(specs, sizes) for sizes in EXAMPLE_SIZES]
    plan_args = [tuple(example[n] for n in plan_inputs) for example in examples]
    streams = [model.plan(*args) for args in plan_args]
    layer_args = [
        (x, plan, example["k_pool.0"], example["v_pool.0"])
        for (x, plan), example in zip(streams, examples, strict=True)
    ]
    fields = streams[0][1]._fields
    layer_inputs = ["x", *fields, "k_pool", "v_pool"]
    plan_part = trace(model.plan, plan_args, plan_inputs, ["x", *fields])
    layer_part = trace(model.layers[0], layer_args, layer_inputs, ["next_x", "k", "v"])

    builder = GraphBuilder()
    values = builder.add(plan_part, "plan.", model.plan, {n: n for n in plan_inputs})
    taps = []
    for i, layer in enumerate(model.layers):
        feeds = values | {"k_pool": f"k_pool.{i}", "v_pool": f"v_pool.{i}"}
        results = {"k": f"k_new.{i}", "v": f"v_new.{i}"}
        values["x"] = builder.add(layer_part, f"layers.{i}.", layer, feeds, results)["next_x"]
        if i in tapped_layers:
            taps.append(values["x"])
    if taps:
        builder.concat(taps, "features", axis=-1)
    for example, (x, _) in zip(examples, streams, strict=True):
        example["x"] = x
    return builder, values["x"], examples
