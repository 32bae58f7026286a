"""Plain formulas that the Triton kernels are compared with, and inputs for them. Float64 inside: the error of a
comparison is then the kernel's alone.

Shape letters: T packed tokens, N query heads, K key/value heads, H head size, S cache slots, B sequences.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


def require_interpreter() -> None:
    """Skips a module unless Triton is installed and interprets its kernels, so that they run without a GPU."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("test_triton_interpreter.py runs this file in a process of its own", allow_module_level=True)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; NaN when anything is NaN, so that `<` fails."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def product_in_order(a: np.ndarray, b: np.ndarray, dtype: object = None) -> np.ndarray:
    """A product whose bits, as those of a tensor core, do not depend on where a row lies. NumPy's do."""
    return (a[:, :, None] * b[None]).sum(1)


def nan_in_place_of_empty(*size: Any, **made: Any) -> Tensor:
    """For `torch.empty`: memory that is read before it is written shows."""
    return torch.full(size[0] if isinstance(size[0], tuple) else size, torch.nan, **made)


def bounds_of(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def attend(q_QNH: Tensor, k_CKH: Tensor, v_CKH: Tensor, scale: float) -> Tensor:
    """Q queries, the last of a context of C tokens, over that context."""
    group = q_QNH.shape[1] // k_CKH.shape[1]
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k_CKH, v_CKH))
    scores_NQC = q_QNH.double().transpose(0, 1) @ k.transpose(1, 2) * scale
    num_queries, num_context = scores_NQC.shape[1:]
    visible = torch.ones(num_queries, num_context, dtype=torch.bool, device=k.device).tril(num_context - num_queries)
    return (scores_NQC.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def packed_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, lengths: list[int], scale: float) -> Tensor:
    parts = zip(q_TNH.split(lengths), k_TKH.split(lengths), v_TKH.split(lengths), strict=True)
    return torch.cat([attend(q, k, v, scale) for q, k, v in parts])


def grouped_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, lengths: list[int], heads: list[int], scale: float
) -> Tensor:
    """Sequence b sees itself causally, and the whole of sequence `heads[b]` when that is another one."""
    parts = list(zip(q_TNH.split(lengths), k_TKH.split(lengths), v_TKH.split(lengths), strict=True))
    out = []
    for b, (q, k, v) in enumerate(parts):
        _, head_k, head_v = parts[heads[b]]
        alone = heads[b] == b
        out.append(attend(q, k if alone else torch.cat((head_k, k)), v if alone else torch.cat((head_v, v)), scale))
    return torch.cat(out)


@dataclass
class PagedCase:
    """B sequences with `contexts` tokens in a cache of shuffled pages, the last `queries` of each being new."""

    q_TNH: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    contexts: list[int]
    queries: list[int]
    page_size: int

    def expected(self, scale: float) -> Tensor:
        out = []
        for index, (q, context) in enumerate(zip(self.q_TNH.split(self.queries), self.contexts, strict=True)):
            positions = torch.arange(context, device=q.device)
            slots = self.tables[index, positions // self.page_size].long() * self.page_size + positions % self.page_size
            out.append(attend(q, *(x[:, slots].transpose(0, 1) for x in (self.k_cache, self.v_cache)), scale))
        return torch.cat(out)


def paged_case(
    contexts: list[int],
    queries: list[int],
    heads: tuple[int, int, int],
    *,
    page_size: int,
    dtype: torch.dtype,
    device: str,
) -> PagedCase:
    """`heads` are N, K and H. Slots that no sequence owns hold NaN: reading them would show."""
    num_heads, num_kv_heads, size = heads
    pages = [-(-context // page_size) for context in contexts]
    num_pages = sum(pages) + 3
    order = torch.randperm(num_pages, dtype=torch.int32)
    tables = torch.full((len(contexts), max(pages) + 1), num_pages, dtype=torch.int32)  # entries out of the cache
    caches = [torch.full((num_kv_heads, num_pages * page_size, size), torch.nan) for _ in range(2)]
    taken = 0
    for index, (context, count) in enumerate(zip(contexts, pages, strict=True)):
        tables[index, :count] = order[taken : taken + count]
        taken += count
        positions = torch.arange(context)
        slots = tables[index, positions // page_size].long() * page_size + positions % page_size
        for cache in caches:
            cache[:, slots] = torch.randn(num_kv_heads, context, size)
    q_TNH = torch.randn(sum(queries), num_heads, size)
    k_cache, v_cache, q_TNH = (x.to(device, dtype) for x in (*caches, q_TNH))
    return PagedCase(q_TNH, k_cache, v_cache, tables.to(device), contexts, queries, page_size)


def share_beginnings(case: PagedCase, groups: list[tuple[list[int], int]], tile_rows: int) -> Tensor:
    """Gives the rows of each group the blocks of its first row for their first tokens (a whole number of pages), and
    returns the plan that says so."""
    plan_3S = torch.zeros(3, len(case.contexts) + 1, dtype=torch.int32)
    members: list[int] = []
    borders = [0]
    for rows, num_tokens in groups:
        case.tables[rows] = torch.where(
            torch.arange(case.tables.shape[1], device=case.tables.device) < num_tokens // case.page_size,
            case.tables[rows[:1]],
            case.tables[rows],
        )
        plan_3S[0, rows] = num_tokens
        for first in range(0, len(rows), tile_rows):
            members += rows[first : first + tile_rows]
            borders.append(len(members))
    plan_3S[0, -1] = len(borders) - 1
    plan_3S[1, : len(members)] = torch.tensor(members)
    plan_3S[2, : len(borders)] = torch.tensor(borders)
    return plan_3S.to(case.tables.device)


def hide_shared_blocks(case: PagedCase, plan_3S: Tensor) -> None:
    """Points the shared table entries of every row that is not the first of a tile out of the cache."""
    num_tiles = int(plan_3S[0, -1])
    firsts = set(plan_3S[1][plan_3S[2, :num_tiles].long()].tolist())
    for row, num_tokens in enumerate(plan_3S[0, :-1].tolist()):
        if row not in firsts:
            case.tables[row, : num_tokens // case.page_size] = case.tables.max()


def log_probs_and_entropy(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits_CV.double() / temperature).log_softmax(-1)
    return log_p.gather(1, targets_C[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
