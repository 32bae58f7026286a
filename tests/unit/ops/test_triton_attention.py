"""Packed flash attention, interpreted, against the plain formula: output and gradients.

Tolerance 1e-5 relative: float32 sums over at most 70 keys in another order, and exp2 instead of exp.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.ops.references import bounds_of, packed_attention, relative_error, require_interpreter

require_interpreter()

from miles.ops.triton_attention import packed_flash_attention  # noqa: E402


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        ((2, 1, 32), [1, 33, 0, 70]),  # several blocks of keys, a block of one row, an empty sequence
        ((3, 1, 64), [32, 5]),  # a group that is no power of two, a length of exactly one block
        ((2, 2, 128), [40]),
    ],
)
def test_output_and_gradients(heads: tuple[int, int, int], lengths: list[int]) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, size = heads
    num_tokens, scale = sum(lengths), size**-0.5
    # One fused tensor: the kernel must follow strides.
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, size)
    inputs = [x.requires_grad_() for x in qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)]
    grad = torch.randn(num_heads, num_tokens, size).transpose(0, 1)

    out = packed_flash_attention(*inputs, bounds_of(lengths, "cpu"), max(lengths), scale)
    expected = packed_attention(*inputs, lengths, scale)
    assert relative_error(out, expected) < 1e-5
    expected_grads = torch.autograd.grad(expected, inputs, grad.double())
    for actual, wanted in zip(torch.autograd.grad(out, inputs, grad), expected_grads, strict=True):
        assert relative_error(actual, wanted) < 1e-5


def test_a_sequence_gets_the_same_bits_beside_any_other() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(90, num_heads, 32) for num_heads in (2, 1, 1))
    both = packed_flash_attention(q, k, v, bounds_of([37, 53], "cpu"), 53, 0.2)
    alone = packed_flash_attention(q[37:], k[37:], v[37:], bounds_of([53], "cpu"), 64, 0.2)
    assert torch.equal(both[37:], alone)
