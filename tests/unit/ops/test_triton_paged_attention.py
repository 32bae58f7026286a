"""Paged attention, interpreted, against the plain formula over gathered pages.

Tolerance 1e-5 relative: float32 sums in another order. Slots that nobody owns are NaN and table entries beyond the
context point out of the cache, so a read too many shows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu.ops.references import (
    PagedCase,
    bounds_of,
    hide_shared_blocks,
    nan_in_place_of_empty,
    paged_case,
    product_in_order,
    relative_error,
    require_interpreter,
    share_beginnings,
)

require_interpreter()

from miles.ops import triton_paged_attention  # noqa: E402
from miles.ops.triton_paged_attention import paged_flash_attention  # noqa: E402


def run(case: PagedCase, *, max_query_len: int = 1, query_rows: int = 64, shared_3S: Tensor | None = None) -> Tensor:
    return paged_flash_attention(
        case.q_TNH,
        case.k_cache,
        case.v_cache,
        case.tables,
        torch.tensor(case.contexts, dtype=torch.int32),
        bounds_of(case.queries, "cpu"),
        max_query_len=max_query_len,
        page_size=case.page_size,
        scale=0.2,
        query_rows=query_rows,
        shared_3S=shared_3S,
    )


@pytest.mark.parametrize(("heads", "page_size"), [((2, 1, 32), 16), ((3, 1, 64), 32), ((4, 2, 32), 128)])
def test_decode(heads: tuple[int, int, int], page_size: int) -> None:
    torch.manual_seed(0)
    contexts = [1, 70, 256, 531]  # one token, part of a chunk, exactly one chunk, three chunks
    case = paged_case(contexts, [1] * 4, heads, page_size=page_size, dtype=torch.float32, device="cpu")
    assert relative_error(run(case, max_query_len=1), case.expected(0.2)) < 1e-5


def test_prompt_chunks_mixed_with_decode() -> None:
    torch.manual_seed(1)
    contexts, queries = [300, 5, 90, 270], [45, 5, 1, 0]  # a later chunk of a prompt, a whole prompt, decode, nothing
    case = paged_case(contexts, queries, (3, 1, 32), page_size=16, dtype=torch.float32, device="cpu")
    assert relative_error(run(case, max_query_len=45), case.expected(0.2)) < 1e-5


def test_split_and_batch_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    case = paged_case([531, 290], [1, 1], (2, 1, 32), page_size=16, dtype=torch.float32, device="cpu")
    split = run(case, max_query_len=1)
    as_prompt_chunk = run(case, max_query_len=2, query_rows=16)
    monkeypatch.setattr(triton_paged_attention, "TARGET_PROGRAMS", 1)
    assert torch.equal(run(case, max_query_len=1), split)
    assert torch.equal(as_prompt_chunk, split)
    alone = PagedCase(case.q_TNH[1:], case.k_cache, case.v_cache, case.tables[1:], [290], [1], 16)
    assert torch.equal(run(alone, max_query_len=1), split[1:])


# Rows of a group lie apart; with a chunk and a half in common, and with one block of keys. Three heads of a group leave
# a row of the tile unused; nine rows need two tiles.
@pytest.mark.parametrize(("heads", "groups", "programs"), [
    ((6, 2, 32), [([0, 3], 96), ([4, 2], 32)], 1024),
    ((2, 1, 32), [([1, 2, 4, 5, 6, 7, 8, 9, 10], 32), ([3, 0], 64)], 1),
])  # fmt: skip
def test_shared_reads_change_no_bit(
    heads: tuple[int, int, int], groups: list[tuple[list[int], int]], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_paged_attention, "CHUNK", 64)
    monkeypatch.setattr(triton_paged_attention, "TARGET_PROGRAMS", programs)
    monkeypatch.setattr(np, "matmul", product_in_order)
    torch.manual_seed(3)
    contexts = [130, 33, 48, 97, 40] + [36] * (6 if programs == 1 else 0)
    case = paged_case(contexts, [1] * len(contexts), heads, page_size=16, dtype=torch.float32, device="cpu")
    plan_3S = share_beginnings(case, groups, triton_paged_attention.tile_rows(heads[0] // heads[1]))
    alone = run(case)
    assert relative_error(alone, case.expected(0.2)) < 1e-5
    hide_shared_blocks(case, plan_3S)
    monkeypatch.setattr(torch, "empty", nan_in_place_of_empty)
    assert torch.equal(run(case, shared_3S=plan_3S), alone)
    plan_3S[0, -1] = 0  # no tiles: what is shared is not computed, and must show
    assert not torch.equal(run(case, shared_3S=plan_3S), alone)


def test_padding_row_gets_zeros() -> None:
    case = paged_case([20], [1], (2, 1, 32), page_size=16, dtype=torch.float32, device="cpu")
    case.contexts = [0]
    assert torch.equal(run(case, max_query_len=1), torch.zeros(1, 2, 32))
