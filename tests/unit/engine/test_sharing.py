"""Which rows read the beginnings of their contexts together: against the best choice, found by trying all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.engine import sharing
from miles.engine.sharing import SharedBeginnings
from tests.unit.engine.tiny import make_core, make_model, request, run_all

PAGE = 4


class Table:
    """The columns that the planner reads. Row r begins with `common` blocks of row `like`, then has its own."""

    page_size = PAGE

    def __init__(self, rows: list[tuple[int, int, int]]) -> None:
        self.blocks = np.zeros((len(rows), 13), dtype=np.int64)
        for row, (like, common, length) in enumerate(rows):
            self.blocks[row, :length] = 1 + 20 * row + np.arange(length)
            if row:
                same = min(common, length - 1, int((self.blocks[like % row] > 0).sum()) - 1)
                self.blocks[row, :same] = self.blocks[like % row, :same]
        self.order = np.arange(len(rows))
        self.computed = np.array([length * PAGE - 1 for _, _, length in rows])  # the last block is being written


def planner(table: Any, *, key_block: int = PAGE, most_tokens: int = 1000, tile_rows: int = 3) -> SharedBeginnings:
    places = len(table.order) + 2
    return SharedBeginnings(table, num_places=places, tile_rows=tile_rows, key_block=key_block, most_tokens=most_tokens)


def most_saved(blocks_RP: np.ndarray, rows: list[int], depth: int, step: int) -> int:
    """Reads of blocks that the best disjoint groups of these rows save, which have `depth` blocks in common."""
    if len(rows) < 2:
        return 0
    children: dict[bytes, list[int]] = {}
    for row in rows:
        part = blocks_RP[row, depth : depth + step]
        key = part.tobytes() if len(part) == step and part.all() else b"%d" % row
        children.setdefault(key, []).append(row)
    apart = sum(most_saved(blocks_RP, child, depth + step, step) for child in children.values())
    return max((len(rows) - 1) * depth, apart)


@pytest.fixture(autouse=True)
def any_saving_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "WORTHWHILE_TOKENS", 1)


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(1, 13)), min_size=1, max_size=9),
    step=st.sampled_from([1, 2, 3]),
    tile_rows=st.integers(1, 4),
)
def test_the_plan_is_right_and_saves_most(rows: list[tuple[int, int, int]], step: int, tile_rows: int) -> None:
    table = Table(rows)
    expected = most_saved(table.blocks, list(range(len(rows))), 0, step)
    plan = planner(table, key_block=step * PAGE, tile_rows=10).plan(np.arange(len(rows)))
    if plan is None:
        assert expected == 0
        return
    lengths, tiles = (
        plan[0, :-1],
        [plan[1, a:b].tolist() for a, b in zip(plan[2], plan[2, 1 : plan[0, -1] + 1], strict=False)],
    )
    assert len(tiles) == plan[0, -1]
    members = sum(tiles, [])
    assert sorted(members) == np.flatnonzero(lengths).tolist()  # each row once
    for tile in tiles:
        (num_tokens,) = set(lengths[tile].tolist())
        assert num_tokens % (step * PAGE) == 0
        assert (table.blocks[tile, : num_tokens // PAGE] == table.blocks[tile[0], : num_tokens // PAGE]).all()
        assert (num_tokens <= table.computed[tile]).all()
    assert sum((len(tile) - 1) * int(lengths[tile[0]]) for tile in tiles) == expected * PAGE
    smaller = planner(table, key_block=step * PAGE, tile_rows=tile_rows).plan(np.arange(len(rows)))
    if smaller is not None:
        sizes = np.diff(smaller[2, : smaller[0, -1] + 1])
        assert sizes.min() > 0 and sizes.max() <= tile_rows
        assert (smaller[0, :-1] == lengths).all() and (smaller[1] == plan[1]).all()


def test_no_more_than_there_is_room_for() -> None:
    plan = planner(Table([(0, 0, 13), (0, 11, 12)]), most_tokens=19).plan(np.arange(2))
    assert plan is not None
    assert plan[0].tolist() == [16, 16, 0, 1]


def test_little_to_share_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table([(0, 0, 5), (0, 3, 5)])
    monkeypatch.setattr(sharing, "WORTHWHILE_TOKENS", 3 * PAGE)
    assert planner(table).plan(np.arange(2)) is not None
    assert planner(table, tile_rows=1).plan(np.arange(2)) is None  # every row would still read for itself
    monkeypatch.setattr(sharing, "WORTHWHILE_TOKENS", 3 * PAGE + 1)
    assert planner(table).plan(np.arange(2)) is None


def test_the_plan_is_kept_while_rows_and_blocks_stay() -> None:
    table = Table([(0, 0, 5), (0, 3, 5), (0, 0, 5)])
    made = planner(table)
    first = made.plan(np.arange(3))
    table.computed += 1
    assert made.plan(np.arange(3)) is first
    assert made.plan(np.arange(2)) is not first
    first = made.plan(np.arange(3))
    table.order[2] = 7  # another request
    assert made.plan(np.arange(3)) is not first
    assert made.plan(np.arange(3)) is not None
    table.blocks[1, :3] = [90, 91, 92]  # retracted and back again: the same request in blocks of its own
    assert made.plan(np.arange(3)) is None


def test_sixteen_answers_of_a_prompt_cost_one_prefill() -> None:
    """Also when its chunks take several steps, and when there are rows for half of them only."""
    for flags, again in (({"engine_chunked_prefill_size": 5}, 0), ({"engine_max_running_requests": 8}, 1)):
        core = make_core(make_model(), **flags)
        core.add([request(i, list(range(2, 16)), 4, ignore_eos=True) for i in range(16)])
        run_all(core)
        # an answer's last token is drawn but never computed; of the later eight, one computes the prompt's last
        assert core.stats()["computed_tokens"] == 14 + 16 * 3 + again
