"""Packed flash attention, interpreted, against the plain formula: output and gradients.

Tolerance 1e-5 relative: float32 sums over at most 70 keys in another order, and exp2 instead of exp.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from miles.model.context import packed_context
from miles.trainer.packing import SHARED_MULTIPLE
from tests.gpu.ops.references import (
    bounds_of,
    grouped_attention,
    packed_attention,
    relative_error,
    require_interpreter,
)

require_interpreter()

from miles.ops import triton_attention  # noqa: E402
from miles.ops.triton_attention import attention_forward, decode_forward, packed_flash_attention  # noqa: E402


@pytest.mark.parametrize(
    ("heads", "lengths", "forward"),
    [
        ((2, 1, 32), [1, 33, 0, 70], attention_forward),  # several blocks of keys, one of one row, an empty sequence
        ((2, 1, 32), [1, 33, 0, 70], decode_forward),
        ((3, 1, 64), [32, 5], attention_forward),  # a group that is no power of two, a length of exactly one block
        ((2, 2, 128), [40], attention_forward),
        ((1, 1, 32), [258], decode_forward),  # several chunks
    ],
)
def test_output_and_gradients(heads: tuple[int, int, int], lengths: list[int], forward: Any) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, size = heads
    num_tokens, scale = sum(lengths), size**-0.5
    # One fused tensor: the kernel must follow strides.
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, size)
    inputs = [x.requires_grad_() for x in qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)]
    grad = torch.randn(num_heads, num_tokens, size).transpose(0, 1)

    out = packed_flash_attention(*inputs, bounds_of(lengths, "cpu"), max(lengths), scale, forward=forward)
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


@pytest.mark.parametrize(
    ("lengths", "heads", "tiles", "forward"),
    [
        # Sequences of their own before, between and after groups; an empty member; heads below, at and above a block.
        ([5, 37, 3, 0, 41, 9, 32, 6, 2], [0, 1, 1, 1, 1, 5, 6, 6, 8], (32, 32), attention_forward),
        ([5, 37, 3, 0, 41, 9, 32, 6, 2], [0, 1, 1, 1, 1, 5, 6, 6, 8], (32, 32), decode_forward),
        ([40, 30, 41], [0, 0, 0], (64, 32), attention_forward),
        ([40, 30, 41], [0, 0, 0], (32, 64), attention_forward),
    ],
)
def test_sequences_that_continue_another(lengths, heads, tiles, forward, monkeypatch) -> None:
    monkeypatch.setattr(triton_attention, "TILES", {key: (*tiles, 4, 1) for key in triton_attention.TILES})
    torch.manual_seed(2)
    inputs = [torch.randn(sum(lengths), num_heads, 32, requires_grad=True) for num_heads in (2, 1, 1)]
    grad = torch.randn(sum(lengths), 2, 32)
    context = packed_context(lengths, device="cpu", heads=heads)

    # Memory that is not written may hold anything.
    def full_of_nan(*shape: Any, **options: Any) -> torch.Tensor:
        return torch.full(shape[0] if len(shape) == 1 else shape, float("nan"), **options)

    monkeypatch.setattr(torch, "empty", full_of_nan)
    sizes = context.cu_seqlens, context.max_seqlen, 0.2, context.groups_B2
    out = packed_flash_attention(*inputs, *sizes, forward=forward)
    expected = grouped_attention(*inputs, lengths, heads, 0.2)
    assert relative_error(out, expected) < 1e-5
    expected_grads = torch.autograd.grad(expected, inputs, grad.double())
    for actual, wanted in zip(torch.autograd.grad(out, inputs, grad), expected_grads, strict=True):
        assert relative_error(actual, wanted) < 1e-5


def test_a_head_of_whole_blocks_changes_no_bit_of_the_forward_pass() -> None:
    assert all(SHARED_MULTIPLE % block == 0 for tiles in triton_attention.TILES.values() for block in tiles[:2])
    torch.manual_seed(3)
    shared, own = ([torch.randn(size, num_heads, 32) for num_heads in (2, 1, 1)] for size in (64, 45))
    context = packed_context([64, 10, 45], device="cpu", heads=[0, 0, 0])
    inputs = [torch.cat((x, y[:10], y)) for x, y in zip(shared, own, strict=True)]
    together = packed_flash_attention(*inputs, context.cu_seqlens, 64, 0.2, context.groups_B2)
    whole = [torch.cat(parts) for parts in zip(shared, own, strict=True)]
    alone = packed_flash_attention(*whole, bounds_of([109], "cpu"), 109, 0.2)
    assert torch.equal(together[:64], alone[:64]) and torch.equal(together[74:], alone[64:])
