"""Does the ONNX graph compute what the checkpoint computes? Measured, reported, enforced.

The verifier is compared with transformers on requests of unequal context and unequal segment
length, their context in randomly chosen blocks of a pool that is otherwise full of large garbage.
The drafter is compared with its torch module, which the tests hold to reference data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from export.errors import ParityError
from export.to_onnx import TORCH_DTYPES
from runtime.spec import (
    DrafterDims,
    KvDims,
    TensorSpec,
    VerifierDims,
    drafter_inputs,
    verifier_inputs,
    verifier_outputs,
)

Run = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

CONTEXT_LENS = (0, 5, 37, 16, 61)
SEGMENT_LENS = (9, 1, 4, 8, 2)
GARBAGE = 1e4  # magnitude of what unused pool blocks hold, within fp16's range


@dataclass(frozen=True)
class Difference:
    """Absolute differences of one kind of output, and the reference's largest magnitude."""

    max: float
    mean: float
    scale: float


def difference(actual: Tensor, expected: Tensor) -> Difference:
    """Compare two tensors of one shape."""
    delta = (actual.double() - expected.double()).abs()
    return Difference(float(delta.max()), float(delta.mean()), float(expected.double().abs().max()))


@dataclass(frozen=True)
class ParityReport:
    """Differences per kind of output, and the share of rows whose argmax agrees."""

    compared_with: str
    differences: dict[str, Difference]
    argmax_agreement: float
    atol: float

    def check(self) -> None:
        """Raise ParityError when logits differ by more than `atol`, or another output by more than
        `atol` times its largest magnitude (at least 1)."""
        for name, d in self.differences.items():
            limit = self.atol * (1.0 if "logits" in name else max(1.0, d.scale))
            if not d.max <= limit:  # NaN fails too
                raise ParityError(
                    f"{name} differ from {self.compared_with} by up to {d.max:.3g} "
                    f"(mean {d.mean:.3g}), allowed are {limit:.3g}: the export is not used"
                )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ParityReport:
        """The report that `to_json` gave."""
        differences = {name: Difference(**d) for name, d in data["differences"].items()}
        return cls(**{**data, "differences": differences})

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report as a table for people."""
        rows = [
            f"  {name:<18} max {d.max:.2e}  mean {d.mean:.2e}"
            for name, d in self.differences.items()
        ]
        return [*rows, f"  argmax agreement   {self.argmax_agreement:.1%}"]


def onnx_runner(path: Path) -> Run:
    """Run an ONNX file in ONNX Runtime on the CPU."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        results = session.run(names, {name: t.numpy() for name, t in inputs.items()})
        return {name: torch.from_numpy(r) for name, r in zip(names, results, strict=True)}

    return run


def module_runner(module: nn.Module, outputs: list[TensorSpec]) -> Run:
    """Run a torch module whose forward takes and gives tensors in the order of the contract."""

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.inference_mode():
            results = module(*inputs.values())
        return {spec.name: r for spec, r in zip(outputs, results, strict=True)}

    return run


def grid_indices(segment_lens: Tensor) -> tuple[Tensor, Tensor]:
    """`pad_index` [R, S] and `unpad_index` [N] of packed segments of these lengths [R]."""
    length = int(segment_lens.max())
    starts = segment_lens.cumsum(0) - segment_lens
    columns = torch.arange(length)
    real = columns < segment_lens[:, None]
    pad_index = torch.where(real, starts[:, None] + columns, 0)
    return pad_index, real.flatten().nonzero().flatten()


class Pools:
    """Paged pools full of garbage, with the context of some requests in random blocks."""

    def __init__(self, dims: KvDims, context_lens: Tensor, generator: torch.Generator) -> None:
        width = -(-int(context_lens.max()) // dims.block_tokens) + 1  # one unused column
        num_blocks = 2 * width * len(context_lens)
        shape = (num_blocks, dims.block_tokens, dims.num_kv_heads, dims.head_dim)
        self.block_tokens = dims.block_tokens
        self.tensors = {
            spec.name: ((torch.rand(shape, generator=generator) - 0.5) * 2 * GARBAGE).to(
                TORCH_DTYPES[dims.dtype]
            )
            for spec in dims.pool_specs()
        }
        blocks = torch.randperm(num_blocks, generator=generator)
        self.block_table = blocks[: width * len(context_lens)].reshape(-1, width)

    def write(self, name: str, request: int, rows: Tensor) -> None:
        """Put `rows` [n, Hk, D] at the request's first n tokens."""
        tokens = torch.arange(len(rows))
        blocks = self.block_table[request, tokens // self.block_tokens]
        self.tensors[name][blocks, tokens % self.block_tokens] = rows.to(self.tensors[name].dtype)


@torch.inference_mode()
def verifier_parity(
    run: Run, dims: VerifierDims, hf_folder: Path, *, atol: float, seed: int = 0
) -> ParityReport:
    """Compare one step of the verifier with transformers in fp32 on the same checkpoint.

    Contexts beyond the model's positions are shortened. The context's keys and values come from
    transformers, so the differences are those of one step.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        hf_folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    context_lens, segment_lens = torch.tensor(CONTEXT_LENS), torch.tensor(SEGMENT_LENS)
    context_lens = context_lens.clamp(max=dims.max_positions - int(segment_lens.max()))
    pools = Pools(dims.kv, context_lens, generator)
    token_ids, positions = [], []
    expected: dict[str, list[Tensor]] = {spec.name: [] for spec in verifier_outputs(dims)}
    for r, (context, segment) in enumerate(zip(context_lens, segment_lens, strict=True)):
        ids = torch.randint(dims.vocab_size, (int(context + segment),), generator=generator)
        result = model(ids[None], output_hidden_states=True, use_cache=True)
        for i, layer in enumerate(result.cache.layers):
            for kind, cache in (("k", layer.keys), ("v", layer.values)):
                rows = cache[0].transpose(0, 1)
                pools.write(f"{kind}_pool.{i}", r, rows[:context])
                expected[f"{kind}_new.{i}"].append(rows[context:])
        expected["logits"].append(result.logits[0, context:])
        if dims.tapped_layers:
            taps = [result.hidden_states[i + 1][0, context:] for i in dims.tapped_layers]
            expected["features"].append(torch.cat(taps, dim=-1))
        token_ids.append(ids[context:])
        positions.append(torch.arange(int(context), int(context + segment)))
    pad_index, unpad_index = grid_indices(segment_lens)
    values = {
        "token_ids": torch.cat(token_ids),
        "position_ids": torch.cat(positions),
        "pad_index": pad_index,
        "unpad_index": unpad_index,
        "segment_lens": segment_lens,
        "context_lens": context_lens,
        "block_table": pools.block_table,
        "logits_index": torch.arange(int(segment_lens.sum())),
        **pools.tensors,
    }
    actual = run({spec.name: values[spec.name] for spec in verifier_inputs(dims)})
    joined = {name: torch.cat(parts) for name, parts in expected.items()}

    agree = actual["logits"].argmax(-1) == joined["logits"].argmax(-1)
    return ParityReport(
        compared_with="transformers",
        differences=_differences(actual, joined),
        argmax_agreement=float(agree.float().mean()),
        atol=atol,
    )


@torch.inference_mode()
def drafter_parity(
    run: Run, reference: Run, dims: DrafterDims, vocab_size: int, *, atol: float, seed: int = 0
) -> ParityReport:
    """Compare one greedy call of the drafter's graph with its torch module, on random features.

    Draft ids are reported as agreement, not enforced: a tie in the last digit may fall either way,
    and every later token follows from it. Logits are therefore compared up to the first token that
    differs.
    """
    generator = torch.Generator().manual_seed(seed)
    context_lens, segment_lens = torch.tensor(CONTEXT_LENS), torch.tensor(SEGMENT_LENS)
    pools = Pools(dims.kv, context_lens, generator)
    shape = (dims.kv.num_kv_heads, dims.kv.head_dim)
    for spec in dims.kv.pool_specs():
        for r, context in enumerate(CONTEXT_LENS):
            pools.write(spec.name, r, torch.randn(context, *shape, generator=generator))
    requests = len(CONTEXT_LENS)
    starts = torch.repeat_interleave(context_lens, segment_lens)
    values = {
        "context_features": torch.randn(
            int(segment_lens.sum()), dims.feature_size, generator=generator
        ),
        "context_position_ids": starts + torch.cat([torch.arange(n) for n in SEGMENT_LENS]),
        "pad_index": grid_indices(segment_lens)[0],
        "segment_lens": segment_lens,
        "context_lens": context_lens,
        "block_table": pools.block_table,
        "anchor_ids": torch.randint(vocab_size, (requests,), generator=generator),
        "uniforms": torch.rand(requests, dims.block_size, generator=generator),
        "noise": torch.zeros(requests, dims.block_size, 1),
        "temperature": torch.zeros(requests),
        "top_k": torch.zeros(requests, dtype=torch.int64),
        "top_p": torch.ones(requests),
        "min_p": torch.zeros(requests),
        **pools.tensors,
    }
    inputs = {spec.name: values[spec.name] for spec in drafter_inputs(dims)}
    actual, expected = run(inputs), reference(inputs)
    agree = actual.pop("draft_ids") == expected.pop("draft_ids")
    same = agree.roll(1, dims=1)  # token k's logits depend on the tokens before it
    same[:, 0] = True
    comparable = same.long().cumprod(dim=1).bool()
    for outputs in (actual, expected):
        for name in outputs:
            if name.endswith("logits"):
                outputs[name] = outputs[name][comparable]
    return ParityReport(
        compared_with="its PyTorch module",
        differences=_differences(actual, expected),
        argmax_agreement=float(agree.float().mean()),
        atol=atol,
    )


KINDS = {
    "logits": "logits",
    "draft_logits": "draft_logits",
    "confidence_logits": "confidence_logits",
    "certainty_logits": "certainty_logits",
    "features": "features",
    "keys": "k_new.",
    "values": "v_new.",
}


def _differences(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, Difference]:
    """Differences per kind of output, all layers together."""
    result = {}
    for kind, prefix in KINDS.items():
        names = [name for name in expected if name.startswith(prefix)]
        if names:
            sides = ([side[n].float().flatten() for n in names] for side in (actual, expected))
            result[kind] = difference(*(torch.cat(side) for side in sides))
    return result
