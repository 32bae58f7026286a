"""Causal attention of new tokens over a paged KV cache, with grouped queries.

The new tokens lie packed, and neighbours with the same number of new tokens and a similar context form a `QueryRun`:
decoding requests are one token each, a prompt chunk is a run of its own. A run is computed without padding its queries:
gather its blocks, one batched product for the scores, softmax, one batched product for the values.

Shapes: T packed tokens, B sequences of a run, Q new tokens of each, C context tokens (whole blocks), N query heads,
K key/value heads, G query heads per key/value head, H head size, S cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QueryRun:
    """B sequences with Q new tokens each, which lie together in the packed batch from token `start` on.

    `block_table` (int64, B x blocks) lists the cache blocks of each context in order; places beyond the context name
    any block with finite contents. `mask_BQ1C` is 0 where a new token may look and -inf elsewhere.
    """

    start: int
    num_queries: int
    block_table: Tensor
    mask_BQ1C: Tensor


def query_run(start: int, num_queries: int, block_table: Tensor, context_lens_B: Tensor, page_size: int) -> QueryRun:
    """The run whose sequence b has `context_lens_B[b]` tokens (int64), the Q new ones last and already counted."""
    device = block_table.device
    last_B1 = context_lens_B.unsqueeze(1) - num_queries
    visible_BQ = last_B1 + torch.arange(num_queries, device=device)
    hidden_BQC = torch.arange(block_table.shape[1] * page_size, device=device) > visible_BQ.unsqueeze(2)
    mask_BQC = torch.zeros(hidden_BQC.shape, device=device).masked_fill_(hidden_BQC, -torch.inf)
    return QueryRun(start, num_queries, block_table, mask_BQC.unsqueeze(2))


@dataclass(frozen=True, slots=True)
class PagedView:
    """What attention sees of the cache in one step: `k_caches[layer]` and `v_caches[layer]` (K x S x H), the slot of
    each new token, and the runs that together cover all T tokens. Block n holds slots n * page_size and up."""

    k_caches: Sequence[Tensor]
    v_caches: Sequence[Tensor]
    slots_T: Tensor
    page_size: int
    runs: Sequence[QueryRun]


def paged_attention(q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, view: PagedView, scale: float) -> Tensor:
    """Attention output (T x N x H) of new tokens whose own keys and values are already stored."""
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    num_kv_heads, _, head_dim = k_cache.shape
    k_blocks = k_cache.view(num_kv_heads, -1, view.page_size * head_dim)
    v_blocks = v_cache.view(num_kv_heads, -1, view.page_size * head_dim)
    group = q_TNH.shape[1] // num_kv_heads
    for run in view.runs:
        (num_seqs, num_blocks), num_queries = run.block_table.shape, run.num_queries
        num_context = num_blocks * view.page_size
        rows = slice(run.start, run.start + num_seqs * num_queries)
        block_ids = run.block_table.flatten()
        k_XCH = k_blocks.index_select(1, block_ids).view(-1, num_context, head_dim)
        v_XCH = v_blocks.index_select(1, block_ids).view(-1, num_context, head_dim)
        q_BQKGH = (q_TNH[rows] * scale).reshape(num_seqs, num_queries, num_kv_heads, group, head_dim)
        q_XRH = q_BQKGH.permute(2, 0, 1, 3, 4).reshape(num_kv_heads * num_seqs, num_queries * group, head_dim)
        scores_XRC = torch.bmm(q_XRH, k_XCH.transpose(1, 2))
        scores_XRC.view(num_kv_heads, num_seqs, num_queries, group, num_context).add_(run.mask_BQ1C)
        weights_XRC = torch.softmax(scores_XRC, -1, dtype=torch.float32).to(v_XCH.dtype)
        out_KBQGH = torch.bmm(weights_XRC, v_XCH).view(num_kv_heads, num_seqs, num_queries, group, head_dim)
        out_TNH[rows].view(num_seqs, num_queries, num_kv_heads, group, head_dim).copy_(out_KBQGH.permute(1, 2, 0, 3, 4))
    return out_TNH
