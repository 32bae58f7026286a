from __future__ import annotations

import pytest
import torch

from miles.ops.norm import rms_norm


def formula(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("shape", [(5, 24), (7, 3, 16), (1, 8)])
def test_value_and_gradient_equal_the_formula_in_float64(shape):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3).requires_grad_()
    weight = torch.randn(shape[-1]).requires_grad_()
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    grad = torch.randn(shape)
    expected = formula(exact_x, exact_weight, 1e-5)
    expected.backward(grad.double())
    actual = rms_norm(x, weight, 1e-5)
    actual.backward(grad)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weight.grad.double(), exact_weight.grad, atol=1e-5, rtol=1e-5)


def test_a_view_of_a_fused_product_may_be_normalised():
    fused = torch.randn(4, 6, 8)
    expected = formula(fused[:, 2:5], torch.ones(8), 1e-6)
    torch.testing.assert_close(rms_norm(fused[:, 2:5], torch.ones(8), 1e-6), expected)


def test_bfloat16_is_rounded_once():
    torch.manual_seed(0)
    x, weight = torch.randn(50, 64).bfloat16(), torch.randn(64).bfloat16()
    expected = formula(x.float(), weight.float(), 1e-6)
    actual = rms_norm(x.requires_grad_(), weight, 1e-6)
    assert actual.dtype == torch.bfloat16
    # half a unit in the last of 8 bits
    assert ((actual.float() - expected).abs() <= expected.abs() * 2**-8 * 1.01).all()
    actual.sum().backward()
    assert x.grad.dtype == torch.bfloat16
