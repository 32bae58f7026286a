"""Causal attention of new tokens over a paged KV cache, with grouped queries.

The plain version computes the sequences in runs: neighbours with equally many new tokens and a similar context. A run
needs no padding of its queries: gather its blocks, one batched product for the scores, softmax, one for the values.

Shapes: T packed tokens, B sequences, P blocks of a context, Q new tokens of each sequence of a run, C context tokens
(whole blocks), N query heads, K key/value heads, G query heads per key/value head, H head size, S cache slots,
X pairs of sequence and key/value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from miles.ops.attention import attend_in_order
from miles.ops.kernels import HEAD_SIZES, has_kernels, kernels
from miles.ops.numerics import is_invariant

# Keys (or values) that a run gathers. They should stay in a core's cache until they are multiplied, and an allocation
# of this size is served from memory that is already mapped.
_RUN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Sequences with Q new tokens each that lie together in the packed batch, from token `start` on. `mask_BQ1C` is 0
    where a new token may look and -inf elsewhere."""

    start: int
    num_queries: int
    block_table_BP: Tensor
    mask_BQ1C: Tensor


@dataclass(frozen=True)
class PagedView:
    """What attention sees of the cache in one step.

    `k_caches[layer]` and `v_caches[layer]` are K x S x H; block n holds slots n * page_size and up. `slots_T` (int64)
    says where each new token's key and value go. `block_table_BP` (int32) lists the blocks of each context in order;
    places beyond it name any block with finite contents. `context_lens_B` (int32) counts all tokens of a sequence, the
    new ones included and last; `query_bounds` (int32, B + 1) are the borders of the sequences in T, each of which has a
    new token. `shared_3S` may say, when each has just one, which contexts begin with the same blocks (see
    `paged_flash_attention`; the plain version does not read it). All on one device. The kernel wants a page size that
    is a power of two; the plain version is at its best when sequences with one new token lie together, by growing
    context.
    """

    k_caches: Sequence[Tensor]
    v_caches: Sequence[Tensor]
    slots_T: Tensor
    page_size: int
    block_table_BP: Tensor
    context_lens_B: Tensor
    query_bounds: Tensor
    shared_3S: Tensor | None = None

    @cached_property
    def runs(self) -> list[QueryRun]:
        """The runs of the plain version, worked out once for all layers."""
        num_kv_heads, _, head_dim = self.k_caches[0].shape
        most_blocks = _RUN_BYTES // (num_kv_heads * head_dim * self.page_size * self.k_caches[0].element_size())
        num_blocks = ((self.context_lens_B + (self.page_size - 1)) // self.page_size).tolist()
        bounds = self.query_bounds.tolist()
        runs, first, widest = [], 0, 0
        for row in range(len(num_blocks) + 1):
            num_queries = bounds[first + 1] - bounds[first]
            at_end = row == len(num_blocks)
            if at_end or (row > first and (
                bounds[row + 1] - bounds[row] != num_queries
                or (row + 1 - first) * max(widest, num_blocks[row]) > most_blocks
            )):  # fmt: skip
                rows = slice(first, row)
                mask_BQ1C = _causal_mask(self.context_lens_B[rows], num_queries, widest * self.page_size)
                runs.append(QueryRun(bounds[first], num_queries, self.block_table_BP[rows, :widest], mask_BQ1C))
                first, widest = row, 0
            if not at_end:
                widest = max(widest, num_blocks[row])
        return runs


def _causal_mask(context_lens_B: Tensor, num_queries: int, num_context: int) -> Tensor:
    """0 where query q of sequence b may look, -inf elsewhere: B x Q x 1 x C."""
    device = context_lens_B.device
    last_BQ = (context_lens_B - num_queries).unsqueeze(1) + torch.arange(num_queries, device=device)
    hidden_BQC = torch.arange(num_context, device=device) > last_BQ.unsqueeze(2)
    return torch.zeros(hidden_BQC.shape, device=device).masked_fill_(hidden_BQC, -torch.inf).unsqueeze(2)


def paged_attention(q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, view: PagedView, scale: float) -> Tensor:
    """Attention output (T x N x H) of new tokens whose own keys and values are already stored."""
    if has_kernels(q_TNH) and q_TNH.shape[2] in HEAD_SIZES:
        num_seqs = view.context_lens_B.shape[0]
        return kernels("paged_attention").paged_flash_attention(
            q_TNH,
            k_cache,
            v_cache,
            view.block_table_BP,
            view.context_lens_B,
            view.query_bounds,
            max_query_len=1 if q_TNH.shape[0] == num_seqs else q_TNH.shape[0],
            page_size=view.page_size,
            scale=scale,
            query_rows=16 if is_invariant() else 64,
            shared_3S=view.shared_3S,
        )
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    num_kv_heads, _, head_dim = k_cache.shape
    k_blocks = k_cache.view(num_kv_heads, -1, view.page_size * head_dim)
    v_blocks = v_cache.view(num_kv_heads, -1, view.page_size * head_dim)
    group = q_TNH.shape[1] // num_kv_heads
    for run in view.runs:
        (num_seqs, num_blocks), num_queries = run.block_table_BP.shape, run.num_queries
        num_context = num_blocks * view.page_size
        rows = slice(run.start, run.start + num_seqs * num_queries)
        block_ids = run.block_table_BP.flatten()
        k_XCH = k_blocks.index_select(1, block_ids).view(-1, num_context, head_dim)
        v_XCH = v_blocks.index_select(1, block_ids).view(-1, num_context, head_dim)
        q_BQKGH = (q_TNH[rows] * scale).reshape(num_seqs, num_queries, num_kv_heads, group, head_dim)
        q_XRH = q_BQKGH.permute(2, 0, 1, 3, 4).reshape(num_kv_heads * num_seqs, num_queries * group, head_dim)
        if is_invariant():
            mask_BRC = run.mask_BQ1C.expand(-1, -1, group, -1).flatten(1, 2)
            out_XRH = attend_in_order(q_XRH, k_XCH, v_XCH, mask_BRC)
        else:
            scores_XRC = torch.bmm(q_XRH, k_XCH.transpose(1, 2))
            scores_XRC.view(num_kv_heads, num_seqs, num_queries, group, num_context).add_(run.mask_BQ1C)
            weights_XRC = torch.softmax(scores_XRC, -1, dtype=torch.float32).to(v_XCH.dtype)
            out_XRH = torch.bmm(weights_XRC, v_XCH)
        out_KBQGH = out_XRH.reshape(num_kv_heads, num_seqs, num_queries, group, head_dim)
        out_TNH[rows].view(num_seqs, num_queries, num_kv_heads, group, head_dim).copy_(out_KBQGH.permute(1, 2, 0, 3, 4))
    return out_TNH
