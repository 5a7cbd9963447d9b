"""Twins: the torch modules that the export traces, as engines on the CPU.

They round where their graphs round, in any dtype, and need neither an export nor kernels for the
dtype, which ONNX Runtime lacks on CPUs for bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from export.checkpoint import load_drafter, load_target
from export.drafter import Drafter
from export.layers import Linear
from export.to_onnx import TORCH_DTYPES
from export.verifier import Verifier
from runtime.config import ConfigError
from runtime.engine import Engines
from runtime.manifest import Manifest
from runtime.spec import (
    Dtype,
    KvDims,
    TensorSpec,
    drafter_inputs,
    drafter_outputs,
    verifier_inputs,
    verifier_outputs,
)


class RoundedLinear(nn.Module):
    """A linear layer of a shorter dtype in fp32 arithmetic: what is rounded is inputs and results.

    That is how GPUs compute it, products and sums in fp32, and much faster here than CPUs do.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.dtype = linear.weight.dtype
        self.weight = linear.weight.float()
        self.bias = None if linear.bias is None else linear.bias.float()

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [N, in] to [N, out]."""
        return F.linear(x.to(self.dtype).float(), self.weight, self.bias).to(self.dtype)


def rounded(module: nn.Module) -> nn.Module:
    """`module` with every `Linear` replaced."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, RoundedLinear(child))
        else:
            rounded(child)
    return module


class TwinEngine:
    """A torch module on the CPU as an engine; see `runtime.engine.Engine`."""

    def __init__(
        self,
        module: nn.Module,
        kv: KvDims,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        num_blocks: int,
    ) -> None:
        num_kv = 2 * kv.num_layers
        shape = (num_kv, num_blocks, kv.block_tokens, kv.num_kv_heads, kv.head_dim)
        self._module = rounded(module).eval()
        self._inputs = [spec.name for spec in inputs[:-num_kv]]
        self._outputs = [spec.name for spec in outputs[:-num_kv]]
        self._pool = torch.zeros(shape, dtype=TORCH_DTYPES[kv.dtype])
        self._new = self._pool[:, :0].flatten(1, 2)

    def run(self, inputs: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Run once; see `Engine.run`."""
        arrays = (np.ascontiguousarray(inputs[name]) for name in self._inputs)
        with torch.inference_mode():
            results = self._module(*map(torch.from_numpy, arrays), *self._pool)
            self._new = torch.stack(results[len(self._outputs) :])
        return {name: r.numpy() for name, r in zip(self._outputs, results, strict=False)}

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write new K/V into the pool; see `Engine.commit`."""
        self._pool.flatten(1, 2)[:, slots] = self._new[:, rows]

    def read_block(self, block: int) -> NDArray[np.uint8]:
        """Copy a block; see `Engine.read_block`."""
        data: NDArray[np.uint8] = self._pool[:, block].contiguous().view(torch.uint8).numpy()
        return data.reshape(-1)

    def write_block(self, block: int, data: NDArray[np.uint8]) -> None:
        """Fill a block; see `Engine.write_block`."""
        layers = self._pool[:, block]
        layers.copy_(torch.from_numpy(data.copy()).view(layers.dtype).view(layers.shape))

    def close(self) -> None:
        """Nothing to free."""


def load_twins(
    drafter: Path | None,
    dtype: Dtype,
    engine_dir: Path,
    manifest: Manifest,
    num_blocks: int,
    threads: int,
) -> Engines:
    """Twins in `dtype` of the engines of `manifest`, made from the checkpoints.

    Raises ConfigError when they have a drafter and `drafter`, its folder, is None.
    """
    torch.set_num_threads(threads)
    options: dict[str, Any] = {
        "dtype": TORCH_DTYPES[dtype],
        "block_tokens": manifest.verifier.kv.block_tokens,
    }
    target, weights = load_target(engine_dir.parent / "hf")
    dims = manifest.verifier
    verifier = TwinEngine(
        Verifier(target, weights, tapped_layers=dims.tapped_layers, **options),
        replace(dims.kv, dtype=dtype),
        verifier_inputs(dims),
        verifier_outputs(dims),
        num_blocks,
    )
    draft = manifest.drafter
    if draft is None:
        return Engines(verifier, None)
    if drafter is None:
        raise ConfigError("a twin of a model with a drafter needs --drafter, the drafter's folder")
    return Engines(
        verifier,
        TwinEngine(
            Drafter(*load_drafter(drafter, target), target, weights, **options),
            replace(draft.kv, dtype=dtype),
            drafter_inputs(draft),
            drafter_outputs(draft),
            num_blocks,
        ),
    )
