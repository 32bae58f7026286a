from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.model.context import packed_context
from miles.ops.attention import length_buckets, packed_attention
from tests.gpu.ops.references import grouped_attention


def one_sequence(q, k, v, scale):
    """Plain softmax attention of one sequence in the dtype of its inputs."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qnh,knh->nqk", q, k) * scale
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("nqk,knh->qnh", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def by_hand(q, k, v, lengths, scale):
    parts = [one_sequence(*sequence, scale) for sequence in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    return torch.cat(parts)


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def inputs(lengths, num_heads, num_kv_heads, head_dim):
    """Strided views of one fused tensor, as the decoder passes them."""
    torch.manual_seed(0)
    fused = torch.randn(sum(lengths), num_heads + 2 * num_kv_heads, head_dim)
    return fused.split((num_heads, num_kv_heads, num_kv_heads), 1)


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        ([6, 6, 6], (4, 2)),
        ([1, 1], (2, 1)),
        ([40], (3, 3)),
        ([5, 90, 1, 33, 31, 90, 2, 2, 60], (6, 2)),
        ([1, 300, 1, 2, 150], (8, 1)),
    ],
)
def test_value_and_gradient_equal_plain_attention_of_each_sequence(lengths, heads):
    q, k, v = inputs(lengths, *heads, 16)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = [x.double().detach().requires_grad_() for x in (q, k, v)]
    grad = torch.randn(q.shape)
    expected = by_hand(*exact, lengths, 0.3)
    expected.backward(grad.double())
    actual = packed_attention(*leaves, bounds(lengths), max(lengths), 0.3)
    actual.backward(grad)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    for leaf, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        assert torch.equal(packed_attention(q, k, v, bounds(lengths), max(lengths), 0.3), actual)


@pytest.mark.parametrize("spoilt", range(5))
def test_a_sequence_that_is_not_finite_spoils_no_other(spoilt):
    lengths = [30, 5, 70, 12, 6]
    q, k, v = inputs(lengths, 2, 2, 8)
    expected = by_hand(q, k, v, lengths, 1.0)
    inside = torch.zeros(sum(lengths), dtype=torch.bool)
    inside[sum(lengths[:spoilt]) : sum(lengths[: spoilt + 1])] = True
    q, k, v = (x.masked_fill(inside[:, None, None], torch.nan) for x in (q, k, v))
    actual = packed_attention(q, k, v, bounds(lengths), 70, 1.0)
    assert actual[inside].isnan().all()
    torch.testing.assert_close(actual[~inside], expected[~inside])


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40).filter(any))
def test_buckets_hold_every_token_once_and_pad_little(lengths):
    buckets = length_buckets(lengths, device=torch.device("cpu"))
    num_rows = sum(count * longest for count, longest in buckets.shapes)
    num_tokens = sum(lengths)
    if buckets.row_of_packed_T is None or buckets.packed_of_row_R is None:
        assert num_rows == num_tokens
        return
    assert len(buckets.packed_of_row_R) == num_rows
    assert torch.equal(buckets.packed_of_row_R[buckets.row_of_packed_T], torch.arange(num_tokens))
    assert num_rows - num_tokens <= 0.15 * num_tokens + 128 * len(buckets.shapes)


def test_a_batch_of_equal_lengths_is_not_copied():
    buckets = length_buckets([7, 7], device=torch.device("cpu"))
    assert buckets.shapes == ((2, 7),)
    assert buckets.packed_of_row_R is None


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        ([5, 37, 3, 41, 1, 32, 9, 70, 0, 2, 33], [0, 1, 1, 1, 4, 5, 5, 7, 7, 7, 10]),
        ([4, 6, 6, 6], [0, 0, 0, 0]),
        ([90, 3, 150, 60, 200, 1, 1], [0, 0, 0, 3, 3, 3, 3]),
    ],
)
def test_sequences_that_continue_another(lengths, heads):
    q, k, v = inputs(lengths, 4, 2, 16)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = [x.double().detach().requires_grad_() for x in (q, k, v)]
    grad = torch.randn(q.shape)
    expected = grouped_attention(*exact, lengths, heads, 0.3)
    expected.backward(grad.double())
    context = packed_context(lengths, device="cpu", heads=heads)
    actual = packed_attention(*leaves, context.cu_seqlens, context.max_seqlen, 0.3, None, context.groups_B2)
    actual.backward(grad)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    for leaf, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, atol=1e-5, rtol=1e-4)
