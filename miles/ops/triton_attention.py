"""Causal attention over packed sequences on CUDA, forward and backward (FlashAttention-2, arXiv 2307.08691).

Shape letters: T packed tokens, N query heads, K key/value heads, H head size, B sequences.
A sequence may continue a head (`groups_B2` of `ops/attention.py`). A group lies side by side, so the queries that see
a key of its head are one range.
Nothing here waits for the device. The backward pass uses no atomics: one kernel sums over the queries of a block of
keys and over the query heads of its group, another over the keys of a block of queries. A repeated run gives the same
bits. Tiles come through the tensor copy engine: pointers to them would not leave enough registers at head size 128. A
tile at the end of a sequence reads into the next one; what it finds there must be finite and gets no weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from miles.ops.triton_paged_attention import paged_flash_attention

LOG2_E = 1.4426950408889634

# Tiles per (kernel, bytes of an element): queries, keys, warps, pipeline stages. Measured on an H200; float32 has no
# fast path, its tiles only have to fit into shared memory.
TILES: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("forward", 2): (64, 64, 4, 3),
    ("keys", 2): (64, 64, 4, 2),
    ("queries", 2): (64, 64, 4, 2),
    ("forward", 4): (32, 32, 4, 1),
    ("keys", 4): (32, 32, 4, 1),
    ("queries", 4): (32, 32, 4, 1),
}
BYTES_FOR_THREE_STAGES = 116_000  # shared memory of the largest tile; consumer devices have 101,376


@triton.jit
def _sequence(bounds_ptr, groups_ptr, seq, SHARED: tl.constexpr):
    """First row and number of rows of a sequence, the same of the head it continues (0 rows: none), and its column in
    `_stats`. Columns of a group follow each other; it begins at a multiple of 16 bytes, as the copy engine wants."""
    start = tl.load(bounds_ptr + seq)
    length = tl.load(bounds_ptr + seq + 1) - start
    head, head_start, num_shared = seq, start, 0
    if SHARED:
        head = tl.load(groups_ptr + 2 * seq)
        head_start = tl.load(bounds_ptr + head)
        num_shared = tl.where(head == seq, 0, tl.load(bounds_ptr + head + 1) - head_start)
    column = (head_start + 3) // 4 * 4 + 4 * head + start - head_start
    return start, length, head_start, num_shared, column


@triton.jit
def _forward_block(acc, row_max, row_sum, q, k, v, first, offs_m, offs_n, scale_log2, EDGE: tl.constexpr):
    """Adds a block of keys to acc [M, H], row_max and row_sum [M], base 2. EDGE: the block meets the diagonal."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if EDGE:
        scores = tl.where(offs_m[:, None] >= first + offs_n[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    correction = tl.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit(do_not_specialize=["lse_stride_n"])
def _forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, bounds_ptr, groups_ptr, scale_log2, lse_stride_n, out_stride_t,
    GROUP: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of queries, N, B). out [T, N, H]; lse [N, stats], base 2, of the scaled scores."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the blocks with most keys start first
    head = tl.program_id(1)
    seq = tl.program_id(2)
    start, length, head_start, num_shared, column = _sequence(bounds_ptr, groups_ptr, seq, SHARED)
    first_m = block * BLOCK_M
    if first_m >= length:
        return

    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    kv_column = head // GROUP * H
    q = q_desc.load([start + first_m, head * H])
    acc = tl.zeros([BLOCK_M, H], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SHARED:
        last = tl.full([BLOCK_M], num_shared - 1, tl.int32)  # every query sees all of them
        whole = num_shared // BLOCK_N * BLOCK_N
        for first in range(0, whole, BLOCK_N):
            k = k_desc.load([head_start + first, kv_column])
            v = v_desc.load([head_start + first, kv_column])
            acc, row_max, row_sum = _forward_block(
                acc, row_max, row_sum, q, k, v, first, last, offs_n, scale_log2, EDGE=False
            )
        for first in range(whole, num_shared, BLOCK_N):
            k = k_desc.load([head_start + first, kv_column])
            v = v_desc.load([head_start + first, kv_column])
            acc, row_max, row_sum = _forward_block(
                acc, row_max, row_sum, q, k, v, first, last, offs_n, scale_log2, EDGE=True
            )
    edge = first_m // BLOCK_N * BLOCK_N
    for first in range(0, edge, BLOCK_N):
        k = k_desc.load([start + first, kv_column])
        v = v_desc.load([start + first, kv_column])
        acc, row_max, row_sum = _forward_block(
            acc, row_max, row_sum, q, k, v, first, offs_m, offs_n, scale_log2, EDGE=False
        )
    for first in range(edge, tl.minimum(first_m + BLOCK_M, length), BLOCK_N):
        k = k_desc.load([start + first, kv_column])
        v = v_desc.load([start + first, kv_column])
        acc, row_max, row_sum = _forward_block(
            acc, row_max, row_sum, q, k, v, first, offs_m, offs_n, scale_log2, EDGE=True
        )

    rows = offs_m < length
    token = (start + offs_m).to(tl.int64)
    out_ptrs = out_ptr + token[:, None] * out_stride_t + head * H + tl.arange(0, H)[None, :]
    tl.store(out_ptrs, (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty), mask=rows[:, None])
    stats = head.to(tl.int64) * lse_stride_n + column + offs_m
    tl.store(lse_ptr + stats, row_max + tl.log2(row_sum), mask=rows)


@triton.jit
def _keys_block(dk, dv, k, v, q, grad, lse, delta, visible, scale_log2):
    """Adds a block of queries to dk and dv [keys, H]. visible [keys, queries]; lse and delta [queries]."""
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    weights = tl.where(visible, tl.exp2(scores * scale_log2 - lse[None, :]), 0.0)
    dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
    dweights = tl.dot(v, tl.trans(grad), input_precision="ieee")
    dscores = weights * (dweights - delta[None, :])
    return tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee"), dv


@triton.jit
def _backward_keys_kernel(
    q_desc, k_desc, v_desc, grad_desc, lse_desc, delta_desc, dk_ptr, dv_ptr, bounds_ptr, groups_ptr, scale, scale_log2,
    dk_stride_t, GROUP: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of keys, K, B). dk and dv [T, K, H], summed over the queries at and after each key."""
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    start, length, head_start, _, column = _sequence(bounds_ptr, groups_ptr, seq, SHARED)
    first_n = tl.program_id(0) * BLOCK_N
    if first_n >= length:
        return

    offs_n = first_n + tl.arange(0, BLOCK_N)
    k = k_desc.load([start + first_n, kv_head * H])
    v = v_desc.load([start + first_n, kv_head * H])
    dk = tl.zeros([BLOCK_N, H], tl.float32)
    dv = tl.zeros([BLOCK_N, H], tl.float32)
    # Blocks of queries begin up to three rows early, at a column that the copy engine can read.
    reach, early = length, 0
    if SHARED:
        reach = tl.load(bounds_ptr + tl.load(groups_ptr + 2 * seq + 1) + 1) - start
        early = (start - head_start) % 4
    # One loop over (query head of the group, block of queries) keeps the pipeline filled between heads.
    first_block = first_n // BLOCK_M
    num_blocks = tl.cdiv(reach + early, BLOCK_M) - first_block
    for step in range(0, GROUP * num_blocks):
        head = kv_head * GROUP + step // num_blocks
        first_m = (first_block + step % num_blocks) * BLOCK_M - early
        offs_m = first_m + tl.arange(0, BLOCK_M)
        q = q_desc.load([start + first_m, head * H])
        grad = grad_desc.load([start + first_m, head * H])
        lse = lse_desc.load([head, column + first_m]).reshape(BLOCK_M)
        delta = delta_desc.load([head, column + first_m]).reshape(BLOCK_M)
        # Rows beyond the end belong to the next sequence.
        visible = (offs_m[None, :] >= offs_n[:, None]) & (offs_m[None, :] < reach)
        dk, dv = _keys_block(dk, dv, k, v, q, grad, lse, delta, visible, scale_log2)

    present = offs_n < length
    offs_out = (start + offs_n).to(tl.int64)[:, None] * dk_stride_t + kv_head * H + tl.arange(0, H)[None, :]
    tl.store(dk_ptr + offs_out, (dk * scale).to(dk_ptr.dtype.element_ty), mask=present[:, None])
    tl.store(dv_ptr + offs_out, dv.to(dv_ptr.dtype.element_ty), mask=present[:, None])


@triton.jit
def _queries_block(dq, q, grad, lse, delta, k, v, first, offs_m, offs_n, scale_log2):
    """Adds a block of keys to dq [M, H]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    weights = tl.exp2(scores * scale_log2 - lse[:, None])
    weights = tl.where(offs_m[:, None] >= first + offs_n[None, :], weights, 0.0)
    dweights = tl.dot(grad, tl.trans(v), input_precision="ieee")
    dscores = weights * (dweights - delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["lse_stride_n"])
def _backward_queries_kernel(
    q_desc, k_desc, v_desc, grad_desc, out_desc, lse_ptr, delta_ptr, dq_ptr, bounds_ptr, groups_ptr, scale, scale_log2,
    lse_stride_n, dq_stride_t, GROUP: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of queries, N, B). dq [T, N, H], and delta [N, stats] = sum over H of grad * out for the keys."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    start, length, head_start, num_shared, column = _sequence(bounds_ptr, groups_ptr, seq, SHARED)
    first_m = block * BLOCK_M
    if first_m >= length:
        return

    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    rows = offs_m < length
    kv_column = head // GROUP * H
    token = (start + offs_m).to(tl.int64)
    q = q_desc.load([start + first_m, head * H])
    grad = grad_desc.load([start + first_m, head * H])
    stats = head.to(tl.int64) * lse_stride_n + column + offs_m
    lse = tl.load(lse_ptr + stats, mask=rows, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out_desc.load([start + first_m, head * H]).to(tl.float32), 1)
    tl.store(delta_ptr + stats, delta, mask=rows)
    dq = tl.zeros([BLOCK_M, H], tl.float32)
    if SHARED:
        last = tl.full([BLOCK_M], num_shared - 1, tl.int32)
        for first in range(0, num_shared, BLOCK_N):
            k = k_desc.load([head_start + first, kv_column])
            v = v_desc.load([head_start + first, kv_column])
            dq = _queries_block(dq, q, grad, lse, delta, k, v, first, last, offs_n, scale_log2)
    for first in range(0, tl.minimum(first_m + BLOCK_M, length), BLOCK_N):
        k = k_desc.load([start + first, kv_column])
        v = v_desc.load([start + first, kv_column])
        dq = _queries_block(dq, q, grad, lse, delta, k, v, first, offs_m, offs_n, scale_log2)

    dq_ptrs = dq_ptr + token[:, None] * dq_stride_t + head * H + tl.arange(0, H)[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=rows[:, None])


def _tiles_of(x_TNH: Tensor, block: int) -> TensorDescriptor:
    """Describes [T, N * H] to the copy engine, to be read in tiles of `block` tokens of one head."""
    num_tokens, num_heads, size = x_TNH.shape
    return TensorDescriptor(x_TNH, [num_tokens, num_heads * size], [x_TNH.stride(0), 1], [block, size])


def _copyable(x_TNH: Tensor) -> Tensor:
    """`x` itself where the copy engine can read it: heads side by side, rows at multiples of 16 bytes."""
    row_bytes, address = x_TNH.stride(0) * x_TNH.element_size(), x_TNH.data_ptr()
    if x_TNH.stride()[1:] == (x_TNH.shape[2], 1) and row_bytes % 16 == 0 and address % 16 == 0:
        return x_TNH
    return x_TNH.contiguous()


def _empty_stats(q_TNH: Tensor, cu_seqlens: Tensor) -> Tensor:
    """For one number per head and token, at the columns of `_sequence`. Whatever is in its gaps: where the backward
    pass reads them, their weights are replaced by 0."""
    num_columns = (len(q_TNH) + 3) // 4 * 4 + 4 * cu_seqlens.numel()
    return torch.empty(q_TNH.shape[1], num_columns, device=q_TNH.device)


def _columns(cu_seqlens: Tensor, groups_B2: Tensor | None) -> Tensor:
    """The columns of `_sequence` [B]."""
    start_B = cu_seqlens[:-1]
    head_B = torch.arange(len(start_B), device=start_B.device) if groups_B2 is None else groups_B2[:, 0].long()
    head_start_B = start_B[head_B]
    return (head_start_B + 3) // 4 * 4 + 4 * head_B + start_B - head_start_B


@cache
def _has_three_stages(device: torch.device) -> bool:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= BYTES_FOR_THREE_STAGES


def _launch(
    kernel: Any, name: str, tensors: tuple, args: tuple, cu_seqlens: Tensor, max_seqlen: int, *, shared: bool,
    stats: tuple = (),
) -> None:  # fmt: skip
    """Starts `kernel` with descriptors of q, k, v (and of the output's gradient and the output), then `args`."""
    block_m, block_n, num_warps, num_stages = TILES[name, tensors[0].element_size()]
    if num_stages > 2 and tensors[0].is_cuda and not _has_three_stages(tensors[0].device):
        num_stages = 2
    blocks = (block_m, block_n, block_n, block_m, block_m)
    descriptors = [_tiles_of(x, block) for x, block in zip(tensors, blocks, strict=False)]
    descriptors += [TensorDescriptor(x, list(x.shape), list(x.stride()), [1, block_m]) for x in stats]
    (_, num_heads, size), num_kv_heads = tensors[0].shape, tensors[1].shape[1]
    by_keys = name == "keys"
    grid = (-(-max_seqlen // (block_n if by_keys else block_m)), num_kv_heads if by_keys else num_heads)
    kernel[*grid, cu_seqlens.numel() - 1](
        *descriptors, *args, GROUP=num_heads // num_kv_heads, H=size, BLOCK_M=block_m, BLOCK_N=block_n,
        SHARED=shared, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def attention_forward(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float,
    groups_B2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [T, N, H] and the base-2 log of each row's softmax sum, at the columns of `_sequence`."""
    num_tokens, num_heads, size = q_TNH.shape
    assert size in (32, 64, 128), f"head size {size} has no kernel"
    out_TNH = q_TNH.new_empty(num_tokens, num_heads, size)
    lse = _empty_stats(q_TNH, cu_seqlens)
    shared, groups = groups_B2 is not None, cu_seqlens if groups_B2 is None else groups_B2
    args = (out_TNH, lse, cu_seqlens, groups, scale * LOG2_E, lse.stride(0), out_TNH.stride(0))
    _launch(_forward_kernel, "forward", (q_TNH, k_TKH, v_TKH), args, cu_seqlens, max_seqlen, shared=shared)
    return out_TNH, lse


def attention_backward(
    grad_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, out_TNH: Tensor, lse: Tensor,
    cu_seqlens: Tensor, max_seqlen: int, scale: float, groups_B2: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [T, N, H], k and v [T, K, H]."""
    dq_TNH, dk_TKH, dv_TKH = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_TNH, k_TKH, v_TKH))
    # Its gaps must be finite: they are multiplied by these weights.
    delta = torch.zeros(lse.shape, device=lse.device)
    tensors = (q_TNH, k_TKH, v_TKH, _copyable(grad_TNH))
    shared, groups = groups_B2 is not None, cu_seqlens if groups_B2 is None else groups_B2
    scales = (scale, scale * LOG2_E)
    # The kernel over queries also fills `delta`, which the kernel over keys reads.
    query_args = (lse, delta, dq_TNH, cu_seqlens, groups, *scales, lse.stride(0), dq_TNH.stride(0))
    _launch(_backward_queries_kernel, "queries", (*tensors, out_TNH), query_args, cu_seqlens, max_seqlen, shared=shared)
    args = (dk_TKH, dv_TKH, cu_seqlens, groups, *scales, dk_TKH.stride(0))
    _launch(_backward_keys_kernel, "keys", tensors, args, cu_seqlens, max_seqlen, shared=shared, stats=(lse, delta))
    return dq_TNH, dk_TKH, dv_TKH


def decode_forward(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float,
    groups_B2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention_forward` with the bits of `paged_flash_attention` at one new token: packed keys and values are read as
    a cache with one slot a page."""
    tables, contexts_B = _packed_as_cache(cu_seqlens, max_seqlen, groups_B2)
    lse = _empty_stats(q_TNH, cu_seqlens)
    out_TNH = paged_flash_attention(
        *(q_TNH, k_TKH.transpose(0, 1), v_TKH.transpose(0, 1), tables, contexts_B, cu_seqlens),
        max_query_len=max(max_seqlen, 2),
        page_size=1,
        scale=scale,
        query_rows=16,
        log_sums=(lse, _columns(cu_seqlens, groups_B2)),
    )
    return out_TNH, lse


def _packed_as_cache(cu_seqlens: Tensor, max_seqlen: int, groups_B2: Tensor | None) -> tuple[Tensor, Tensor]:
    """Block tables of sequences in a cache whose blocks are the packed tokens, one each, and their context lengths."""
    start_B1, length_B = cu_seqlens[:-1, None], cu_seqlens.diff()
    longest = max_seqlen if groups_B2 is None else 2 * max_seqlen
    place = torch.arange(longest, dtype=torch.int32, device=cu_seqlens.device)
    if groups_B2 is None:
        return start_B1 + place, length_B
    head_B = groups_B2[:, 0].long()
    shared_B = length_B[head_B] * (head_B != torch.arange(len(head_B), device=head_B.device))
    in_head = place < shared_B[:, None]
    tables = torch.where(in_head, start_B1[head_B] + place, start_B1 - shared_B[:, None] + place)
    return tables, length_B + shared_B


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., tuple[Tensor, Tensor]], q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor,
        cu_seqlens: Tensor, max_seqlen: int, scale: float, groups_B2: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out_TNH, lse = forward(q_TNH, k_TKH, v_TKH, cu_seqlens, max_seqlen, scale, groups_B2)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, out_TNH, lse, cu_seqlens, groups_B2)
        ctx.max_seqlen, ctx.scale = max_seqlen, scale
        return out_TNH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TNH: Tensor) -> tuple[Tensor | None, ...]:
        q_TNH, k_TKH, v_TKH, out_TNH, lse, cu_seqlens, groups_B2 = ctx.saved_tensors
        sizes = (cu_seqlens, ctx.max_seqlen, ctx.scale)
        grads = attention_backward(grad_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse, *sizes, groups_B2)
        return None, *grads, None, None, None, None


def packed_flash_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float,
    groups_B2: Tensor | None = None, *, forward: Callable[..., tuple[Tensor, Tensor]] = attention_forward,
) -> Tensor:  # fmt: skip
    """Causal attention within each of B packed sequences, differentiable in q, k and v.

    q [T, N, H]; k, v [T, K, H] with N a multiple of K; head size 32, 64 or 128; bf16, fp16 or fp32 with float32 sums;
    slices of a fused projection are read in place. `cu_seqlens` [B + 1] int32 on the device, from 0 to T; empty
    sequences are allowed. `max_seqlen` is a host number, at least the longest length. `groups_B2`: `ops/attention.py`.
    `forward`: the kernel, and so the last bits; `decode_forward` is the other one. Returns [T, N, H].
    """
    q_TNH, k_TKH, v_TKH = (_copyable(x) for x in (q_TNH, k_TKH, v_TKH))
    return _PackedAttention.apply(forward, q_TNH, k_TKH, v_TKH, cu_seqlens, max_seqlen, scale, groups_B2)
