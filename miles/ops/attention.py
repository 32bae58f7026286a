"""Causal attention over packed sequences: the training forward, where keys and values are the batch itself.

Shapes: T packed tokens, R rows of the padded layout, N query heads, K key/value heads, H head size, B sequences,
L length of a stack, C keys, P keys of a part, X pairs of sequence and key/value head, M queries of a pair.

A sequence may continue another, as an answer does its prompt. A group is a head and, right after it, all sequences that
continue it; their queries see the keys of the head, then their own up to themselves. Row b of `groups_B2` (int32) names
the head of sequence b, which is b itself when it continues none, and the last sequence that sees the keys of b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miles.ops.kernels import HEAD_SIZES, has_kernels, kernels
from miles.ops.matmul import pad_rows
from miles.ops.numerics import cpu_tiles, is_invariant

# A bucket closes when padding it further would waste more than this share of its tokens, plus a constant that stands
# for the fixed cost of one more attention call.
_MAX_WASTE = 0.15
_CALL_COST_TOKENS = 128

KEYS_AT_A_TIME = 128  # of the invariant attention on a CPU: part of the meaning of a result
KEYS_MULTIPLE = 16  # it never has fewer keys, nor other numbers of them: few would take another way through the library


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Where each packed token goes when sequences of similar length are padded and stacked.

    `shapes` are (sequences, length) of the stacks; their rows follow each other in the padded layout. A padding row
    repeats the last token of its sequence: no real query sees it, and no other sequence can spoil it.
    Both index tensors are None when the packed layout is already one stack without padding.

    A sequence that continues a head is stacked after a copy of it. The first copy stands for the head; `copies` are the
    others, as (first packed token, tokens, first row).
    """

    shapes: tuple[tuple[int, int], ...]
    packed_of_row_R: Tensor | None
    row_of_packed_T: Tensor | None
    copies: tuple[tuple[int, int, int], ...] = ()


def length_buckets(
    lengths: Sequence[int], *, device: torch.device, heads: Sequence[int] | None = None
) -> LengthBuckets:
    """Stack sequences by length so that little is padded. Compute once per batch: every layer can use it."""
    multiple = KEYS_MULTIPLE if is_invariant() else 1
    if heads is None and len(set(lengths)) == 1 and lengths[0] % multiple == 0:
        return LengthBuckets(((len(lengths), lengths[0]),), None, None)
    length_B = torch.tensor(lengths)
    start_B = length_B.cumsum(0) - length_B
    head_B = torch.arange(len(lengths)) if heads is None else torch.tensor(heads)
    continues_B = head_B != torch.arange(len(lengths))
    shared_B = length_B[head_B] * continues_B
    whole_B = length_B + shared_B
    whole_B[head_B[continues_B]] = 0  # stacked with what continues it
    whole = whole_B.tolist()
    order = sorted((i for i in range(len(whole)) if whole[i]), key=whole.__getitem__, reverse=True)
    shapes: list[tuple[int, int]] = []
    count = longest = tokens = 0
    for i in order:
        if count and (count + 1) * longest - tokens - whole[i] > _MAX_WASTE * tokens + _CALL_COST_TOKENS:
            shapes.append((count, longest))
            count = tokens = 0
        longest = longest if count else -(-whole[i] // multiple) * multiple
        count += 1
        tokens += whole[i]
    shapes.append((count, longest))

    order_B = torch.tensor(order)
    packed_of_row = []
    row_of_packed_T = torch.empty(int(length_B.sum()), dtype=torch.int64)
    copies: dict[int, list[tuple[int, int, int]]] = {}
    first_row = first = 0
    for count, longest in shapes:
        members = order_B[first : first + count]
        column = torch.arange(longest)
        shared_B1, last_B1 = shared_B[members, None], whole_B[members, None] - 1
        place = torch.minimum(column, last_B1)
        origin = torch.where(place < shared_B1, start_B[head_B[members], None], start_B[members, None] - shared_B1)
        packed = origin + place
        real = (column <= last_B1) & (column >= shared_B1)
        row = first_row + torch.arange(count * longest).view(count, longest)
        row_of_packed_T[packed[real]] = row[real]
        packed_of_row.append(packed.flatten())
        for start, shared, its_row in torch.stack((packed[:, 0], shared_B1[:, 0], row[:, 0]), 1).tolist():
            if shared:
                copies.setdefault(start, []).append((start, shared, its_row))
        first, first_row = first + count, first_row + count * longest
    for (start, shared, its_row), *_ in copies.values():
        row_of_packed_T[start : start + shared] = torch.arange(its_row, its_row + shared)
    others = tuple(copy for _, *rest in copies.values() for copy in rest)
    return LengthBuckets(tuple(shapes), torch.cat(packed_of_row).to(device), row_of_packed_T.to(device), others)


def uses_buckets(q_TNH: Tensor) -> bool:
    """Whether `packed_attention` pads: where there is no kernel for the device and the head size."""
    return not has_kernels(q_TNH) or q_TNH.shape[2] not in HEAD_SIZES


def packed_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    buckets: LengthBuckets | None = None,
    groups_B2: Tensor | None = None,
) -> Tensor:
    """Causal attention within each sequence, and over its head, with grouped queries; T x N x H, differentiable.

    `cu_seqlens` (int32, sequences + 1) are the borders of the sequences in T. `buckets` saves working out the padded
    layout again, where there is one (`uses_buckets`).
    """
    if not uses_buckets(q_TNH):
        attention = kernels("attention")
        forward = attention.decode_forward if is_invariant() else attention.attention_forward
        sizes = cu_seqlens, max_seqlen, scale, groups_B2
        return attention.packed_flash_attention(q_TNH, k_TKH, v_TKH, *sizes, forward=forward)
    if buckets is None:
        heads = None if groups_B2 is None else groups_B2[:, 0].tolist()
        buckets = length_buckets(cu_seqlens.diff().tolist(), device=q_TNH.device, heads=heads)
    return _bucketed_attention(q_TNH, k_TKH, v_TKH, buckets, scale)


def _bucketed_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, buckets: LengthBuckets, scale: float) -> Tensor:
    padded = [_to_rows(x, buckets) for x in (q_TNH, k_TKH, v_TKH)]
    sizes = [num * length for num, length in buckets.shapes]
    outputs = []
    # split, not slices: the gradient of a split is one concatenation, that of a slice a tensor of full size.
    for (num, length), *stacks in zip(buckets.shapes, *(x.split(sizes) for x in padded), strict=True):
        q, k, v = (x.view(num, length, *x.shape[1:]).transpose(1, 2) for x in stacks)
        out = _InOrder.apply(q, k, v, scale) if is_invariant() else _library_attention(q, k, v, scale)
        outputs.append(out.transpose(1, 2).reshape(num * length, *q_TNH.shape[1:]))
    return _from_rows(outputs[0] if len(outputs) == 1 else torch.cat(outputs), buckets)


def _library_attention(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q_BNLH, k_BKLH, v_BKLH, is_causal=True, scale=scale, enable_gqa=True)


class _InOrder(torch.autograd.Function):
    # The library computes the gradient: it keeps no weights, and nothing is compared with its bits.

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        (num, num_heads, length, size), num_kv_heads = q.shape, k.shape[1]
        group = num_heads // num_kv_heads
        q_XMH = (q * scale).reshape(num * num_kv_heads, group * length, size)
        hidden_LL = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
        mask_1ML = q.new_zeros(length, length).masked_fill_(hidden_LL, -torch.inf).repeat(group, 1).unsqueeze(0)
        out_XMH = attend_in_order(q_XMH, k.flatten(0, 1), v.flatten(0, 1), mask_1ML)
        return out_XMH.reshape(q.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            out = _library_attention(q, k, v, ctx.scale)
        return *torch.autograd.grad(out, (q, k, v), grad), None


def attend_in_order(q_XMH: Tensor, k_XCH: Tensor, v_XCH: Tensor, mask_BMC: Tensor) -> Tensor:
    """Attention of scaled queries, whose bits depend on the keys they see alone; X x M x H, no gradient.

    `mask_BMC` is 0 or -inf; its B divides X, and pair x has the mask x % B. C must be a multiple of `KEYS_MULTIPLE`.
    """
    num_queries, num_keys = q_XMH.shape[1], k_XCH.shape[1]
    assert num_keys % KEYS_MULTIPLE == 0, f"{num_keys} keys are not a multiple of {KEYS_MULTIPLE}"
    scores_XMC = torch.bmm(pad_rows(q_XMH, cpu_tiles().query_rows), k_XCH.transpose(1, 2))
    scores_XMC[:, :num_queries].unflatten(0, (-1, len(mask_BMC))).add_(mask_BMC)
    weights_XMC = torch.softmax(scores_XMC, -1)
    parts = zip(weights_XMC.split(KEYS_AT_A_TIME, 2), v_XCH.split(KEYS_AT_A_TIME, 1), strict=True)
    out_XMH = None
    for weights_XMP, v_XPH in parts:
        part_XMH = torch.bmm(weights_XMP, v_XPH)
        out_XMH = part_XMH if out_XMH is None else out_XMH.add_(part_XMH)
    assert out_XMH is not None
    return out_XMH[:, :num_queries]


def _to_rows(x: Tensor, buckets: LengthBuckets) -> Tensor:
    if buckets.packed_of_row_R is None:
        return x
    return _ToRows.apply(x, buckets.packed_of_row_R, buckets.row_of_packed_T, buckets.copies)


def _from_rows(x: Tensor, buckets: LengthBuckets) -> Tensor:
    if buckets.row_of_packed_T is None:
        return x
    return _FromRows.apply(x, buckets.row_of_packed_T)


class _ToRows(torch.autograd.Function):
    # Padding rows receive no gradient (no real output depends on them), so the gradient is a plain gather, and a sum
    # in a fixed order over the copies; the built-in one would be a scatter with addition.

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed_of_row: Tensor, row_of_packed: Tensor, copies: tuple) -> Tensor:
        ctx.save_for_backward(row_of_packed)
        ctx.copies = copies
        return x.index_select(0, packed_of_row)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (row_of_packed,) = ctx.saved_tensors
        grad_packed = grad.index_select(0, row_of_packed)
        for start, num_tokens, row in ctx.copies:
            grad_packed[start : start + num_tokens] += grad[row : row + num_tokens]
        return grad_packed, None, None, None


class _FromRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_of_packed: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_packed)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, row_of_packed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (row_of_packed,) = ctx.saved_tensors
        grad_rows = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return grad_rows.index_copy_(0, row_of_packed, grad), None
