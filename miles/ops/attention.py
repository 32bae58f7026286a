"""Causal attention over packed sequences: the training forward, where keys and values are the batch itself.

Shapes: T packed tokens, R rows of the padded layout, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miles.ops.kernels import HEAD_SIZES, has_kernels, kernels

# A bucket closes when padding it further would waste more than this share of its tokens, plus a constant that stands
# for the fixed cost of one more attention call.
_MAX_WASTE = 0.15
_CALL_COST_TOKENS = 128


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Where each packed token goes when sequences of similar length are padded and stacked.

    `shapes` are (sequences, length) of the stacks; their rows follow each other in the padded layout. A padding row
    repeats the last token of its sequence: no real query sees it, and no other sequence can spoil it.
    Both index tensors are None when the packed layout is already one stack without padding.
    """

    shapes: tuple[tuple[int, int], ...]
    packed_of_row_R: Tensor | None
    row_of_packed_T: Tensor | None


def length_buckets(lengths: Sequence[int], *, device: torch.device) -> LengthBuckets:
    """Stack sequences by length so that little is padded. Compute once per batch: every layer can use it."""
    if len(set(lengths)) == 1:
        return LengthBuckets(((len(lengths), lengths[0]),), None, None)
    order = sorted((i for i in range(len(lengths)) if lengths[i]), key=lengths.__getitem__, reverse=True)
    shapes: list[tuple[int, int]] = []
    count = longest = tokens = 0
    for i in order:
        if count and (count + 1) * longest - tokens - lengths[i] > _MAX_WASTE * tokens + _CALL_COST_TOKENS:
            shapes.append((count, longest))
            count = tokens = 0
        longest = longest if count else lengths[i]
        count += 1
        tokens += lengths[i]
    shapes.append((count, longest))

    length_B = torch.tensor(lengths)
    start_B = length_B.cumsum(0) - length_B
    order_B = torch.tensor(order)
    packed_of_row = []
    row_of_packed_T = torch.empty(int(length_B.sum()), dtype=torch.int64)
    first_row = first = 0
    for count, longest in shapes:
        members = order_B[first : first + count]
        column = torch.arange(longest)
        last_B1 = length_B[members, None] - 1
        packed = start_B[members, None] + torch.minimum(column, last_B1)
        real = column <= last_B1
        row = first_row + torch.arange(count * longest).view(count, longest)
        row_of_packed_T[packed[real]] = row[real]
        packed_of_row.append(packed.flatten())
        first, first_row = first + count, first_row + count * longest
    return LengthBuckets(tuple(shapes), torch.cat(packed_of_row).to(device), row_of_packed_T.to(device))


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
) -> Tensor:
    """Causal attention within each sequence, with grouped queries; T x N x H, differentiable.

    `cu_seqlens` (int32, sequences + 1) are the borders of the sequences in T. `buckets` saves working out the padded
    layout again, where there is one (`uses_buckets`).
    """
    if not uses_buckets(q_TNH):
        return kernels("attention").packed_flash_attention(q_TNH, k_TKH, v_TKH, cu_seqlens, max_seqlen, scale)
    if buckets is None:
        buckets = length_buckets(cu_seqlens.diff().tolist(), device=q_TNH.device)
    return _bucketed_attention(q_TNH, k_TKH, v_TKH, buckets, scale)


def _bucketed_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, buckets: LengthBuckets, scale: float) -> Tensor:
    padded = [_to_rows(x, buckets) for x in (q_TNH, k_TKH, v_TKH)]
    sizes = [num * length for num, length in buckets.shapes]
    outputs = []
    # split, not slices: the gradient of a split is one concatenation, that of a slice a tensor of full size.
    for (num, length), *stacks in zip(buckets.shapes, *(x.split(sizes) for x in padded), strict=True):
        q, k, v = (x.view(num, length, *x.shape[1:]).transpose(1, 2) for x in stacks)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(1, 2).reshape(num * length, *q_TNH.shape[1:]))
    return _from_rows(outputs[0] if len(outputs) == 1 else torch.cat(outputs), buckets)


def _to_rows(x: Tensor, buckets: LengthBuckets) -> Tensor:
    if buckets.packed_of_row_R is None:
        return x
    return _ToRows.apply(x, buckets.packed_of_row_R, buckets.row_of_packed_T)


def _from_rows(x: Tensor, buckets: LengthBuckets) -> Tensor:
    if buckets.row_of_packed_T is None:
        return x
    return _FromRows.apply(x, buckets.row_of_packed_T)


class _ToRows(torch.autograd.Function):
    # Padding rows receive no gradient (no real output depends on them), so the gradient is a plain gather;
    # the built-in one would be a scatter with addition.

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed_of_row: Tensor, row_of_packed: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_packed)
        return x.index_select(0, packed_of_row)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_of_packed,) = ctx.saved_tensors
        return grad.index_select(0, row_of_packed), None, None


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
