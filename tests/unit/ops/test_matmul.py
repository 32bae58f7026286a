from __future__ import annotations

import torch

from miles.ops.matmul import linear, project_float32


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
