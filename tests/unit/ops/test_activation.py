from __future__ import annotations

import torch

from miles.ops.activation import silu_mul


def test_value_and_gradient_equal_the_formula_in_float64():
    torch.manual_seed(0)
    x = (torch.randn(9, 14) * 4).requires_grad_()
    exact = x.detach().double().requires_grad_()
    gate, up = exact[:, :7], exact[:, 7:]
    expected = gate / (1 + torch.exp(-gate)) * up
    grad = torch.randn(9, 7)
    expected.backward(grad.double())
    actual = silu_mul(x)
    actual.backward(grad)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(silu_mul(x), actual)
