from __future__ import annotations

import pytest
import torch

from miles.ops.matmul import linear, project_float32
from miles.ops.remake import made_again


def test_linear_is_a_product_with_the_transposed_weight():
    x, weight, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([10.0, 20.0])
    assert linear(x, weight).tolist() == [[11.0, 17.0]]
    assert linear(x, weight, bias).tolist() == [[21.0, 37.0]]


def test_logits_of_half_precision_weights_are_not_rounded():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 256).bfloat16(), torch.randn(50, 256).bfloat16()
    exact = x.double() @ weight.double().T
    actual = project_float32(x, weight)
    assert actual.dtype == torch.float32
    assert (actual - exact).abs().max() < 1e-4  # a bfloat16 result would be wrong by up to 0.1
    assert (project_float32(x.float(), weight) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("remade", [False, True])
def test_a_gradient_is_added_to_its_float32_sum_without_being_rounded(remade: bool):
    """Three micro-batches: the sum has float32's error, and what autograd would add up has bfloat16's."""
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 32).bfloat16().requires_grad_(), torch.randn(24).bfloat16().requires_grad_()
    weight.grad_dtype = bias.grad_dtype = torch.float32
    weight.grad, bias.grad = torch.zeros(24, 32), torch.zeros(24)
    kept, expected = weight.grad, torch.zeros(24, 32, dtype=torch.float64)
    for _ in range(3):
        source, grad = torch.randn(7, 32).bfloat16().requires_grad_(), torch.randn(7, 24).bfloat16()
        x = 2 * source
        with made_again((lambda source=source: 2 * source) if remade else None, x):
            out = linear(x, weight, bias)
        assert torch.equal(out, torch.nn.functional.linear(x, weight, bias))
        out.backward(grad)
        expected += grad.double().T @ x.double()
        torch.testing.assert_close(source.grad, 2 * (grad @ weight))
    assert weight.grad is kept
    torch.testing.assert_close(kept.double(), expected, rtol=1e-5, atol=1e-4)
    assert bias.grad.dtype == torch.float32 and bias.grad.any()


def test_a_weight_without_a_sum_gets_the_gradient_of_autograd():
    weight = torch.randn(3, 4).bfloat16().requires_grad_()
    weight.grad_dtype = torch.float32
    x = torch.randn(5, 4).bfloat16()
    linear(x, weight).backward(torch.ones(5, 3).bfloat16())
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, x.float().sum(0).expand(3, 4), rtol=1e-2, atol=1e-2)


def test_a_weight_that_changes_before_the_backward_pass_is_noticed():
    weight = torch.randn(3, 4).bfloat16().requires_grad_()
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(3, 4)
    out = linear(torch.randn(5, 4).bfloat16().requires_grad_(), weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
