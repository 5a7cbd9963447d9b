"""Products with factors rounded to bfloat16: their values, their gradients, their scope."""

import pytest
import torch
from torch.nn import functional as F

from training.products import Linear, bf16_products, has_bf16_units, linear

ROW_COUNTS = (1, 63, 64, 130)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_product_and_gradients_are_those_of_a_linear_layer(rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, slope = torch.randn(rows, 96), torch.randn(160, 96), torch.randn(rows, 160)
    found = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    with bf16_products():
        product = linear(*found)
        product.backward(slope)
    reference = F.linear(*exact)
    reference.backward(slope.double())
    assert product.dtype == torch.float32
    # bfloat16 keeps 8 bits: 2^-9 a factor at most, 0.24 % on average over a sum of products.
    assert relative_error(product, reference) < 0.005
    for own, other in zip(found, exact, strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert own.grad.shape == other.grad.shape
        assert relative_error(own.grad, other.grad) < 0.005


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(3, 8)
    with bf16_products():
        linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


@pytest.mark.skipif(not has_bf16_units(), reason="this CPU has no bfloat16 products (AMX)")
def test_factors_are_rounded_within_the_context_only() -> None:
    torch.manual_seed(0)
    layer, x = Linear(256, 256), torch.randn(128, 256)
    exact = layer(x)
    with bf16_products():
        assert relative_error(layer(x), exact) > 1e-4
        with bf16_products(False):
            assert torch.equal(layer(x), exact)
    assert torch.equal(layer(x), exact)
    assert torch.equal(x @ layer.weight.T, exact)  # torch's own setting is as before
