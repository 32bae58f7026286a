"""Paged attention against the formula, one query at a time in float64. Tolerance 1e-5: float32 sums of 30 terms."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from miles.ops import paged_attention as module
from miles.ops.paged_attention import PagedView, paged_attention

PAGE = 4


def build(contexts: list[int], queries: list[int], heads: tuple[int, int, int], seed: int) -> tuple[Tensor, PagedView]:
    """Sequences whose blocks lie anywhere in a cache that is NaN-free but full of other numbers."""
    num_heads, num_kv_heads, head_dim = heads
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_blocks = [-(-context // PAGE) for context in contexts]
    blocks = rng.sample(range(1, sum(num_blocks) + 5), sum(num_blocks))
    table = torch.zeros(len(contexts), max(num_blocks), dtype=torch.int64)
    slots = []
    for row, (context, num_queries) in enumerate(zip(contexts, queries, strict=True)):
        own = [blocks.pop() for _ in range(num_blocks[row])]
        table[row, : len(own)] = torch.tensor(own)
        slots += [own[place // PAGE] * PAGE + place % PAGE for place in range(context - num_queries, context)]
    cache_shape = (num_kv_heads, (sum(map(int, num_blocks)) + 5) * PAGE, head_dim)
    bounds = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    caches = [10 * torch.randn(cache_shape), torch.randn(cache_shape)]
    view = PagedView(caches[:1], caches[1:], torch.tensor(slots), PAGE, table, torch.tensor(contexts), bounds)
    return torch.randn(sum(queries), num_heads, head_dim), view


def expected(q_TNH: Tensor, view: PagedView, scale: float) -> Tensor:
    k_cache, v_cache = view.k_caches[0].double(), view.v_caches[0].double()
    group = q_TNH.shape[1] // k_cache.shape[0]
    out = torch.empty(q_TNH.shape, dtype=torch.float64)
    for row, context in enumerate(view.context_lens_B.tolist()):
        begin, end = view.query_bounds[row], view.query_bounds[row + 1]
        for token in range(int(begin), int(end)):
            visible = context - (int(end) - token) + 1
            slots = [int(view.block_table_BP[row, p // PAGE]) * PAGE + p % PAGE for p in range(visible)]
            for head in range(q_TNH.shape[1]):
                k_CH, v_CH = k_cache[head // group, slots], v_cache[head // group, slots]
                out[token, head] = torch.softmax(k_CH @ q_TNH[token, head].double() * scale, 0) @ v_CH
    return out


def check(contexts: list[int], queries: list[int], heads: tuple[int, int, int], seed: int = 0) -> None:
    q_TNH, view = build(contexts, queries, heads, seed)
    out = paged_attention(q_TNH, view.k_caches[0], view.v_caches[0], view, 0.3)
    torch.testing.assert_close(out.double(), expected(q_TNH, view, 0.3), rtol=1e-5, atol=1e-5)


@given(
    sequences=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=7),
    heads=st.sampled_from([(1, 1, 4), (4, 2, 8), (6, 2, 4), (3, 3, 2)]),
    seed=st.integers(0, 99),
)
def test_any_mix_of_decoding_and_prompt_chunks(
    sequences: list[tuple[int, int]], heads: tuple[int, int, int], seed: int
) -> None:
    contexts = [context for context, _ in sequences]
    check(contexts, [min(context, queries) for context, queries in sequences], heads, seed)


@pytest.mark.parametrize("run_bytes", [1, 3 * 2 * 8 * PAGE * 4])  # a run per sequence; runs of at most three blocks
def test_small_runs_give_the_same(run_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RUN_BYTES", run_bytes)
    check([1, 2, 5, 9, 30, 12, 12, 7], [1, 1, 1, 1, 1, 4, 4, 2], (4, 2, 8))


def test_equal_sequences_are_computed_together() -> None:
    _, view = build([3, 9, 20, 8, 8], [1, 1, 1, 5, 5], (4, 2, 8), 0)
    assert [(run.start, run.num_queries, len(run.block_table_BP)) for run in view.runs] == [(0, 1, 3), (3, 5, 2)]


def test_the_cache_is_only_read() -> None:
    q_TNH, view = build([6, 11], [1, 3], (2, 1, 4), 1)
    before = [view.k_caches[0].clone(), view.v_caches[0].clone()]
    paged_attention(q_TNH, view.k_caches[0], view.v_caches[0], view, 1.0)
    assert torch.equal(view.k_caches[0], before[0]) and torch.equal(view.v_caches[0], before[1])
