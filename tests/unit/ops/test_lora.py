"""The shared adapter product against its definition, one adapter after the other, in float64."""

import pytest
import torch

from miles.ops.lora import add_lora, drop

T, INPUTS, RANK, SCALE = 9, 7, 3, 0.5
SIZES, OUTPUTS = {0: 4, 10: 2}, 12  # rows 4 to 9 have no adapter


def make(dtype=torch.float64):
    torch.manual_seed(0)
    x, a = torch.randn(T, INPUTS, dtype=dtype), torch.randn(len(SIZES) * RANK, INPUTS, dtype=dtype)
    blocks = torch.zeros(OUTPUTS, len(SIZES) * RANK, dtype=dtype)
    parts = []
    for i, (start, size) in enumerate(SIZES.items()):
        view = blocks[start : start + size, i * RANK : (i + 1) * RANK]
        view.normal_()
        parts.append(torch.nn.Parameter(view))
    return torch.randn(T, OUTPUTS, dtype=dtype), x.requires_grad_(), a.requires_grad_(), blocks, parts


def test_sum_and_gradients_are_those_of_the_definition():
    base, x, a, blocks, parts = make()
    weight_of_sum = torch.randn(T, OUTPUTS, dtype=torch.float64)
    actual = add_lora(base.clone(), x, a, blocks, parts, list(SIZES), SCALE)
    leaves = [x, a, *parts]
    gradients = torch.autograd.grad((actual * weight_of_sum).sum(), leaves)

    added = torch.zeros(T, OUTPUTS, dtype=torch.float64)
    for i, (start, part) in enumerate(zip(SIZES, parts, strict=True)):
        added[:, start : start + len(part)] = x @ a[i * RANK : (i + 1) * RANK].T @ part.T * SCALE
    expected = base + added
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weight_of_sum).sum(), leaves))


def test_what_comes_before_gets_the_gradient_unchanged_and_the_output_is_the_same_memory():
    base, x, a, blocks, parts = make()
    before = base.requires_grad_()
    out = before * 1.0
    after = add_lora(out, x, a, blocks, parts, list(SIZES), SCALE)
    assert after.data_ptr() == out.data_ptr()
    after.sum().backward()
    assert torch.equal(before.grad, torch.ones_like(before))


def test_a_change_of_a_part_is_a_change_of_the_product():
    base, x, a, blocks, parts = make()
    with torch.no_grad():
        for part in parts:
            part.zero_()
        assert torch.equal(add_lora(base.clone(), x, a, blocks, parts, list(SIZES), SCALE), base)


def test_dropout_keeps_the_mean_and_repeats_by_seed():
    x = torch.full((200, 200), 2.0)
    dropped = drop(x, 0.25, 5)
    assert dropped.unique().tolist() == pytest.approx([0.0, 2.0 / 0.75])
    assert (dropped == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(drop(x, 0.25, 5), dropped)
    assert not torch.equal(drop(x, 0.25, 6), dropped)
