"""Attention of new tokens over a paged KV cache on CUDA: decode, prompt chunks and any mix of both.

The context of a sequence is cut into chunks of `CHUNK` tokens that start at multiples of `CHUNK`, whatever else is in
the batch. A chunk is a softmax of its own, read in blocks of keys in order; the chunks of a row are merged in order.
Which program computes a chunk changes nothing, so the split of the work over the device may follow the batch size
(Flash-Decoding, Dao et al. 2023), and a row's result does not depend on its neighbours.

Nor does it matter who computes the first blocks of keys of a chunk: what has been summed up to there is three float32
numbers and a vector per row, which another program can go on from. So rows whose contexts begin with the same blocks of
the cache can have that beginning read once for all of them (`_attend_shared_kernel`): their queries share a tile.

Shape letters: T packed new tokens, B sequences, N query heads, K key/value heads, H head size, S cache slots, C chunks.
Rows are the (query, head of the group) pairs of one key/value head: they read the same keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
CHUNK = 256  # part of the meaning of a result: another value gives other last bits

# Keys of a block, warps, pipeline stages by rows of a tile, measured on an H200. The first is for decode and for prompt
# chunks that must get its bits, so it is part of the meaning of a result too.
TILES = {16: (32, 2, 3), 64: (64, 4, 2)}

# With this many programs an H200 is busy; a finer split only adds merging.
TARGET_PROGRAMS = 1024

# Of the beginning that sequences share: chunks at most, which bounds the memory between the two kernels, and programs
# for each tile and head.
SHARED_CHUNKS = 32
SHARED_SPLITS = 4


def tile_rows(group: int) -> int:
    """Sequences whose queries, `group` heads for each key/value head, fit into a tile of decode."""
    return max(16, triton.next_power_of_2(group)) // group


@triton.jit
def _merge(acc, row_max, row_sum, chunk_acc, chunk_max, chunk_sum):
    """Running (acc, max, sum) with the next chunk; an explicit fused multiply-add: every caller rounds alike."""
    new_max = tl.maximum(row_max, chunk_max)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    old = tl.exp2(row_max - safe_max)
    new = tl.exp2(chunk_max - safe_max)
    acc = tl.fma(chunk_acc, tl.broadcast_to(new[:, None], chunk_acc.shape), acc * old[:, None])
    return acc, new_max, tl.fma(chunk_sum, new, row_sum * old)


@triton.jit
def _sequence_of_tile(starts_ptr, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence b with starts[b] // BLOCK_Q + b <= tile < starts[b + 1] // BLOCK_Q + b + 1, by bisection.

    Every sequence owns enough tiles for its queries this way and the host needs no lengths to size the grid."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _slots(table_ptr, first, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots of the keys from `first`, the border of a block, on; those from `end` on are any of the context's."""
    offs_n = tl.arange(0, BLOCK_N)
    last_page = tl.maximum(end - 1, 0) // PAGE
    page = tl.zeros([BLOCK_N], tl.int32)
    for i in tl.static_range((BLOCK_N + PAGE - 1) // PAGE):  # one number for all threads: a vector of them is slower
        number = tl.load(table_ptr + tl.minimum(first // PAGE + i, last_page))
        page = tl.where(offs_n // PAGE == i, number, page)
    return page.to(tl.int64) * PAGE + (first + offs_n) % PAGE


@triton.jit
def _attend_block(
    q, acc, row_max, row_sum, first, end, last_visible, slot, k_ptr, v_ptr, k_stride_s, v_stride_s, scale_log2,
    H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A chunk's (acc, max, sum) with one block of keys more."""
    offs_h = tl.arange(0, H)
    position = first + tl.arange(0, BLOCK_N)
    present = position < end
    k_ptrs = k_ptr + slot[None, :] * k_stride_s + offs_h[:, None]
    v_ptrs = v_ptr + slot[:, None] * v_stride_s + offs_h[None, :]
    k = tl.load(k_ptrs, mask=present[None, :], other=0.0)  # [H, keys]
    v = tl.load(v_ptrs, mask=present[:, None], other=0.0)  # [keys, H]
    scores = tl.dot(q, k, input_precision="ieee") * scale_log2
    scores = tl.where(position[None, :] <= last_visible[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row of a prompt chunk may see no key of this block.
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - safe_max[:, None])
    correction = tl.exp2(row_max - safe_max)
    row_sum = tl.fma(row_sum, correction, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def _load_chunk(acc_ptr, stats_ptr, cell, rows, H: tl.constexpr):
    acc = tl.load(acc_ptr + cell[:, None] * H + tl.arange(0, H)[None, :], mask=rows[:, None], other=0.0)
    row_max = tl.load(stats_ptr + cell * 2, mask=rows, other=float("-inf"))
    return acc, row_max, tl.load(stats_ptr + cell * 2 + 1, mask=rows, other=0.0)


@triton.jit
def _store_chunk(acc_ptr, stats_ptr, cell, rows, acc, row_max, row_sum, H: tl.constexpr):
    tl.store(acc_ptr + cell[:, None] * H + tl.arange(0, H)[None, :], acc, mask=rows[:, None])
    tl.store(stats_ptr + cell * 2, row_max, mask=rows)
    tl.store(stats_ptr + cell * 2 + 1, row_sum, mask=rows)


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, H: tl.constexpr):
    """(acc, max, sum) of no keys."""
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return tl.zeros([BLOCK_M, H], tl.float32), row_max, tl.zeros([BLOCK_M], tl.float32)


# Numbers that follow the batch are not specialised on: a new batch size would compile the kernel again.
@triton.jit(do_not_specialize=["num_kv_heads", "max_chunks", "plan_stride", "table_stride"])
def _attend_shared_kernel(
    q_ptr, k_ptr, v_ptr, chunk_acc_ptr, chunk_stats_ptr, tables_ptr, contexts_ptr, plan_ptr,
    scale_log2, num_kv_heads, max_chunks, plan_stride,
    q_stride_t, q_stride_n, k_stride_k, k_stride_s, v_stride_k, v_stride_s, table_stride,
    GROUP: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Beginnings of contexts, once for each tile of rows of the plan (see `paged_flash_attention`), into chunk_acc and
    chunk_stats, which `_attend_kernel` goes on from. Any number of programs; each takes its share of the tiles."""
    num_tiles = tl.load(plan_ptr + plan_stride - 1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_h = tl.arange(0, H)
    for unit in range(tl.program_id(0), num_tiles * num_kv_heads * SPLITS, tl.num_programs(0)):
        kv_head = unit % num_kv_heads
        tile = unit // num_kv_heads % num_tiles
        start = tl.load(plan_ptr + 2 * plan_stride + tile)
        count = tl.load(plan_ptr + 2 * plan_stride + tile + 1) - start
        rows = offs_m < count * GROUP
        token = tl.load(plan_ptr + plan_stride + start + offs_m // GROUP, mask=rows, other=0).to(tl.int64)
        head = kv_head * GROUP + offs_m % GROUP
        last_visible = tl.load(contexts_ptr + token, mask=rows, other=0) - 1
        q_ptrs = q_ptr + token[:, None] * q_stride_t + head[:, None] * q_stride_n + offs_h[None, :]
        q = tl.load(q_ptrs, mask=rows[:, None], other=0.0)
        first_row = tl.load(plan_ptr + plan_stride + start).to(tl.int64)
        length = tl.load(plan_ptr + first_row)
        table_ptr = tables_ptr + first_row * table_stride
        for chunk in range(unit // num_kv_heads // num_tiles, tl.cdiv(length, CHUNK), SPLITS):
            acc, row_max, row_sum = _nothing(BLOCK_M, H)
            slot = _slots(table_ptr, chunk * CHUNK, length, PAGE, BLOCK_N)
            for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length), BLOCK_N):
                next_slot = _slots(table_ptr, first + BLOCK_N, length, PAGE, BLOCK_N)
                acc, row_max, row_sum = _attend_block(
                    q, acc, row_max, row_sum, first, length, last_visible, slot,
                    k_ptr + kv_head.to(tl.int64) * k_stride_k, v_ptr + kv_head.to(tl.int64) * v_stride_k,
                    k_stride_s, v_stride_s, scale_log2, H, BLOCK_N,
                )  # fmt: skip
                slot = next_slot
            cell = (token * num_kv_heads * GROUP + head) * max_chunks + chunk
            _store_chunk(chunk_acc_ptr, chunk_stats_ptr, cell, rows, acc, row_max, row_sum, H)


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "max_chunks", "table_stride", "sums_stride"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, chunk_acc_ptr, chunk_stats_ptr, tables_ptr, contexts_ptr, starts_ptr, plan_ptr,
    sums_ptr, columns_ptr, scale_log2, num_seqs, num_splits, num_heads, max_chunks, sums_stride,
    q_stride_t, q_stride_n, k_stride_k, k_stride_s, v_stride_k, v_stride_s, table_stride,
    GROUP: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    SHARED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, K, splits). With SPLIT chunk results go to chunk_acc [T, N, C, H] and chunk_stats
    [T, N, C, 2] (max in base 2, sum), to be merged by `_merge_kernel`; else merged here into out [T, N, H]. With SHARED
    the first plan[b] tokens of sequence b are there already. With SUMS the base-2 log of each row's softmax sum goes to
    sums [N, columns]."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    if BLOCK_Q == 1:
        seq = tile
        first_query = 0
        start = seq
        num_queries = 1
    else:
        seq = _sequence_of_tile(starts_ptr, tile, num_seqs, BLOCK_Q)
        start = tl.load(starts_ptr + seq)
        first_query = (tile - start // BLOCK_Q - seq) * BLOCK_Q
        num_queries = tl.load(starts_ptr + seq + 1) - start
        if first_query >= num_queries:
            return
    context = tl.load(contexts_ptr + seq)

    offs_m = tl.arange(0, BLOCK_M)
    offs_h = tl.arange(0, H)
    query = first_query + offs_m // GROUP
    rows = (offs_m < BLOCK_Q * GROUP) & (query < num_queries)
    token = (start + query).to(tl.int64)
    head = kv_head * GROUP + offs_m % GROUP
    last_visible = context - num_queries + query  # position of the row's own token
    num_visible = tl.minimum(context - num_queries + first_query + BLOCK_Q, context)
    q_ptrs = q_ptr + token[:, None] * q_stride_t + head[:, None] * q_stride_n + offs_h[None, :]
    q = tl.load(q_ptrs, mask=rows[:, None], other=0.0)

    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    k_ptr += kv_head.to(tl.int64) * k_stride_k
    v_ptr += kv_head.to(tl.int64) * v_stride_k

    # This program's chunks are split, split + num_splits, ...: all their blocks are steps of one loop, which keeps the
    # loads of the next blocks under way from one chunk to the next.
    PER_CHUNK: tl.constexpr = CHUNK // BLOCK_N
    split = tl.program_id(2)
    num_chunks = tl.cdiv(tl.maximum(tl.cdiv(num_visible, CHUNK) - split, 0), num_splits)
    last_first = (split + (num_chunks - 1) * num_splits) * CHUNK  # of the last chunk
    num_steps = (num_chunks - 1) * PER_CHUNK + tl.cdiv(tl.minimum(num_visible - last_first, CHUNK), BLOCK_N)
    cells = (token * num_heads + head) * max_chunks
    acc, row_max, row_sum = _nothing(BLOCK_M, H)
    chunk_acc, chunk_max, chunk_sum = _nothing(BLOCK_M, H)
    first_step = 0
    if SHARED:
        shared = tl.load(plan_ptr + seq)
        num_whole = shared // CHUNK
        if not SPLIT:
            for chunk in range(0, num_whole):
                known_acc, known_max, known_sum = _load_chunk(chunk_acc_ptr, chunk_stats_ptr, cells + chunk, rows, H)
                acc, row_max, row_sum = _merge(acc, row_max, row_sum, known_acc, known_max, known_sum)
        first_step = tl.cdiv(tl.maximum(num_whole - split, 0), num_splits) * PER_CHUNK
        if (shared % CHUNK > 0) & (num_whole >= split) & ((num_whole - split) % num_splits == 0):
            first_step += shared % CHUNK // BLOCK_N
            chunk_acc, chunk_max, chunk_sum = _load_chunk(chunk_acc_ptr, chunk_stats_ptr, cells + num_whole, rows, H)
    first = (split + first_step // PER_CHUNK * num_splits) * CHUNK + first_step % PER_CHUNK * BLOCK_N
    slot = _slots(table_ptr, first, num_visible, PAGE, BLOCK_N)
    for step in range(first_step, num_steps):
        chunk = split + step // PER_CHUNK * num_splits
        first = chunk * CHUNK + step % PER_CHUNK * BLOCK_N
        next_step = step + 1
        next_first = (split + next_step // PER_CHUNK * num_splits) * CHUNK + next_step % PER_CHUNK * BLOCK_N
        next_slot = _slots(table_ptr, next_first, num_visible, PAGE, BLOCK_N)
        chunk_acc, chunk_max, chunk_sum = _attend_block(
            q, chunk_acc, chunk_max, chunk_sum, first, num_visible, last_visible, slot,
            k_ptr, v_ptr, k_stride_s, v_stride_s, scale_log2, H, BLOCK_N,
        )  # fmt: skip
        slot = next_slot
        if (next_step % PER_CHUNK == 0) | (next_step == num_steps):
            if SPLIT:
                _store_chunk(chunk_acc_ptr, chunk_stats_ptr, cells + chunk, rows, chunk_acc, chunk_max, chunk_sum, H)
            else:
                acc, row_max, row_sum = _merge(acc, row_max, row_sum, chunk_acc, chunk_max, chunk_sum)
            chunk_acc, chunk_max, chunk_sum = _nothing(BLOCK_M, H)
    if not SPLIT:
        out = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
        out_ptrs = out_ptr + (token[:, None] * num_heads + head[:, None]) * H + offs_h[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=rows[:, None])
        if SUMS:
            column = tl.load(columns_ptr + seq) + query
            tl.store(sums_ptr + head.to(tl.int64) * sums_stride + column, row_max + tl.log2(row_sum), mask=rows)


@triton.jit(do_not_specialize=["max_chunks"])
def _merge_kernel(
    chunk_acc_ptr, chunk_stats_ptr, out_ptr, contexts_ptr, num_heads, max_chunks,
    H: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of HEADS heads); one query per sequence. out [T, N, H]; a row without context becomes 0."""
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    heads = head < num_heads
    offs_h = tl.arange(0, H)
    row = token.to(tl.int64) * num_heads + head
    acc = tl.zeros([HEADS, H], tl.float32)
    row_max = tl.full([HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    for chunk in range(0, tl.cdiv(tl.load(contexts_ptr + token), CHUNK)):
        cell = row * max_chunks + chunk
        chunk_acc = tl.load(chunk_acc_ptr + cell[:, None] * H + offs_h[None, :], mask=heads[:, None], other=0.0)
        chunk_max = tl.load(chunk_stats_ptr + cell * 2, mask=heads, other=0.0)
        chunk_sum = tl.load(chunk_stats_ptr + cell * 2 + 1, mask=heads, other=0.0)
        acc, row_max, row_sum = _merge(acc, row_max, row_sum, chunk_acc, chunk_max, chunk_sum)
    out = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    tl.store(out_ptr + row[:, None] * H + offs_h[None, :], out.to(out_ptr.dtype.element_ty), mask=heads[:, None])


def _merge_chunks(chunk_acc: Tensor, chunk_stats: Tensor, context_lens_B: Tensor, out_TNH: Tensor) -> None:
    num_tokens, num_heads, max_chunks, size = chunk_acc.shape
    heads = min(4, triton.next_power_of_2(num_heads))
    _merge_kernel[num_tokens, triton.cdiv(num_heads, heads)](
        chunk_acc, chunk_stats, out_TNH, context_lens_B, num_heads, max_chunks,
        H=size, HEADS=heads, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


def paged_flash_attention(
    q_TNH: Tensor,
    k_cache_KSH: Tensor,
    v_cache_KSH: Tensor,
    block_tables: Tensor,
    context_lens_B: Tensor,
    query_starts: Tensor,
    *,
    max_query_len: int,
    page_size: int,
    scale: float,
    query_rows: int = 64,
    shared_3S: Tensor | None = None,
    log_sums: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention [T, N, H] of new tokens whose own keys and values are already in the cache.

    `block_tables` [B, blocks] int32: block n of the cache holds slots n * page_size and up; entries beyond the context
    are not read. `context_lens_B` [B] int32 counts the new tokens too. `query_starts` [B + 1] int32: the borders of the
    sequences in T. Caches may have any strides with a contiguous last dimension; head size 32, 64 or 128; `page_size` a
    power of two. With `max_query_len` 1 every sequence has exactly one new token (T = B); one with a context of 0 is
    padding and gets zeros. Otherwise sequences may have any number of new tokens, 0 included.

    `query_rows` is the tile of the general case: 64 is fast; 16 uses the matrix instruction of decode, so a token gets
    the same bits from a prompt chunk as from a decode step.

    `shared_3S` (int32, S > B) says which sequences of a decode step begin with the same blocks, to be read once for a
    tile of them; it changes no bit of the result. Row 0 holds how many tokens sequence b shares: none, or whole blocks
    of keys (`TILES[16][0]`), `CHUNK * SHARED_CHUNKS` at most; and in its last place the number of tiles. Row 1 lists
    sequences, tile after tile, at most `tile_rows(N / K)` in each, all with the same shared tokens. Row 2 holds the
    borders of the tiles in row 1.

    `log_sums`, not for a decode step: [N, columns] float32, filled with the base-2 log of each row's softmax sum, and
    [B] integers, the column of the first new token of each sequence; the others follow it.

    The grid depends on shapes only and nothing waits for the device, so a call can be captured in a CUDA graph.
    """
    num_tokens, num_heads, size = q_TNH.shape
    num_kv_heads = k_cache_KSH.shape[0]
    num_seqs, num_blocks = block_tables.shape
    assert size in (32, 64, 128), f"head size {size} has no kernel"
    assert q_TNH.stride(2) == k_cache_KSH.stride(2) == v_cache_KSH.stride(2) == block_tables.stride(1) == 1
    group = num_heads // num_kv_heads
    max_chunks = triton.cdiv(num_blocks * page_size, CHUNK)
    decode = max_query_len == 1
    block_rows = max(16 if decode else query_rows, triton.next_power_of_2(group))
    block_keys, num_warps, num_stages = TILES[16 if block_rows <= 16 else 64]
    block_queries = 1 if decode else block_rows // group
    tiles = num_seqs if decode else num_tokens // block_queries + num_seqs
    splits = min(max_chunks, triton.cdiv(TARGET_PROGRAMS, tiles * num_kv_heads)) if decode else 1
    shares = decode and shared_3S is not None
    plan = context_lens_B if shared_3S is None else shared_3S  # not read without
    assert log_sums is None or not decode, "a decode step has no gradient"

    if shares and splits == 1:
        max_chunks = min(max_chunks, SHARED_CHUNKS)
    sizes = {"GROUP": group, "H": size, "PAGE": page_size, "CHUNK": CHUNK, "BLOCK_M": block_rows, "BLOCK_N": block_keys}
    launch = {"num_warps": num_warps, "num_stages": num_stages if q_TNH.element_size() == 2 else 1}
    strides = (*q_TNH.stride()[:2], *k_cache_KSH.stride()[:2], *v_cache_KSH.stride()[:2], block_tables.stride(0))

    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    chunk_acc = chunk_stats = out_TNH  # not touched without a split
    sums, columns_B = log_sums or (out_TNH, context_lens_B)
    if shares or splits > 1:
        chunk_acc = torch.empty(num_tokens, num_heads, max_chunks, size, dtype=torch.float32, device=q_TNH.device)
        chunk_stats = torch.empty(num_tokens, num_heads, max_chunks, 2, dtype=torch.float32, device=q_TNH.device)
    if shares:
        _attend_shared_kernel[(min(TARGET_PROGRAMS, num_seqs * num_kv_heads),)](
            q_TNH, k_cache_KSH, v_cache_KSH, chunk_acc, chunk_stats, block_tables, context_lens_B, plan,
            scale * LOG2_E, num_kv_heads, max_chunks, plan.stride(0), *strides, SPLITS=SHARED_SPLITS, **sizes, **launch,
        )  # fmt: skip
    _attend_kernel[tiles, num_kv_heads, splits](
        q_TNH, k_cache_KSH, v_cache_KSH, out_TNH, chunk_acc, chunk_stats, block_tables, context_lens_B, query_starts,
        plan, sums, columns_B, scale * LOG2_E, num_seqs, splits, num_heads, max_chunks, sums.stride(0), *strides,
        BLOCK_Q=block_queries, SPLIT=splits > 1, SHARED=shares, SUMS=log_sums is not None, **sizes, **launch,
    )  # fmt: skip
    if splits > 1:
        _merge_chunks(chunk_acc, chunk_stats, context_lens_B, out_TNH)
    return out_TNH
