"""Matrix products in bfloat16 for training on CPUs that multiply it in hardware (AMX).

oneDNN rounds the factors of an fp32 product to bfloat16 as it reads them and sums in fp32, so
nothing around a product changes. It compiles a kernel for every new shape, which takes longer than
most products here; so rows, whose number differs from step to step, are filled up to a multiple.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 64  # a multiple of this many; more wastes products, fewer compiles more kernels

_rounding = False


def has_bf16_units() -> bool:
    """Whether products in bfloat16 are faster than in fp32 on this machine's CPU."""
    return torch.cpu._is_amx_tile_supported()


@contextmanager
def bf16_products(wanted: bool = True) -> Iterator[None]:
    """Within this, `linear` rounds factors to bfloat16, forward and backward."""
    global _rounding
    before, _rounding = _rounding, wanted
    try:
        yield
    finally:
        _rounding = before


@contextmanager
def onednn_bf16(wanted: bool = True) -> Iterator[None]:
    """Within this, oneDNN rounds the factors of every fp32 product of PyTorch."""
    backend: Any = torch.backends.mkldnn  # its members are made at run time
    setting = backend.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "bf16" if wanted else before
    try:
        yield
    finally:
        setting.fp32_precision = before


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for x [N, in] and weight [out, in]: [N, out] fp32."""
    return _RoundedLinear.apply(x, weight) if _rounding else F.linear(x, weight)


class Linear(nn.Linear):
    """A projection without bias through `linear`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [N, in] to [N, out]."""
        return linear(x, self.weight)


class _RoundedLinear(torch.autograd.Function):
    """All three products of a linear layer on filled-up rows; zeros add nothing to any of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        filled = _fill_rows(x)
        ctx.save_for_backward(filled, weight)
        ctx.rows = len(x)
        return _rounded(filled, weight.T)[: len(x)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = _fill_rows(grads[0])
        of_x = _rounded(grad, weight)[: ctx.rows] if ctx.needs_input_grad[0] else None
        of_weight = _rounded(grad.T, x) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def _fill_rows(x: Tensor) -> Tensor:
    rows = len(x)
    filled = x.new_empty(rows + -rows % ROWS, x.shape[1])
    filled[:rows] = x
    filled[rows:] = 0
    return filled


def _rounded(a: Tensor, b: Tensor) -> Tensor:
    with onednn_bf16():
        return a @ b
