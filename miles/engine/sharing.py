"""Which rows of a decode step begin with the same cache blocks, so that attention reads these once for all of them.

Reading once changes no bit of a result (`ops/triton_paged_attention.py`), so how rows are put together is free: it may
follow the batch, and a step in which too little is shared does without.

Shapes: R rows of the step, P blocks of a row, S places of a row of the plan.
"""

from __future__ import annotations

import numpy as np

from miles.engine.request import RequestTable

# Reading together costs another kernel for each layer, and rows that run side by side find each other's reads in the
# GPU's second-level cache anyway: on an H200 it pays from about so many tokens that are not read again.
WORTHWHILE_TOKENS = 40_000


class SharedBeginnings:
    """Makes the plan of a step (`shared_3S` of `paged_flash_attention`, S = `num_places`) and keeps it while the rows
    stay the same. A tile holds `tile_rows` rows; they share whole blocks of `key_block` keys, `most_tokens` at most."""

    def __init__(
        self, table: RequestTable, *, num_places: int, tile_rows: int, key_block: int, most_tokens: int
    ) -> None:
        self.num_places = num_places
        self._table, self._tile_rows = table, tile_rows
        self._step = max(key_block, table.page_size)
        self._most_tokens = most_tokens // self._step * self._step
        self._made_for = (np.zeros(0), np.zeros(0), np.zeros(0))
        self._plan: np.ndarray | None = None

    def plan(self, rows_R: np.ndarray) -> np.ndarray | None:
        """The plan for decoding these rows, the same object as before if nothing has changed; None when it does not
        pay."""
        table, known = self._table, self._made_for
        orders_R = table.order[rows_R]
        # A request that was retracted is the same one in other blocks.
        if not (
            np.array_equal(rows_R, known[0])
            and np.array_equal(orders_R, known[1])
            and np.array_equal(table.blocks[rows_R, : known[2].shape[-1]], known[2])
        ):
            blocks_RP = self._leading_blocks(rows_R)
            groups = _groups(blocks_RP, self._step // table.page_size)
            self._plan = self._lay_out(groups)
            deepest = max((num_blocks for _, num_blocks in groups), default=0)
            self._made_for = (rows_R, orders_R, blocks_RP[:, :deepest])
        return self._plan

    def _leading_blocks(self, rows_R: np.ndarray) -> np.ndarray:
        """The blocks of each row that could be shared. The one that it writes to is its own."""
        table = self._table
        longest = min(int(table.computed[rows_R].max()), self._most_tokens)
        return table.blocks[rows_R, : longest // table.page_size]

    def _lay_out(self, groups: list[tuple[np.ndarray, int]]) -> np.ndarray | None:
        plan_3S = np.zeros((3, self.num_places), dtype=np.int32)
        lengths_S, members_S, borders_S = plan_3S
        num_members, borders, saved = 0, [0], 0
        for rows, num_blocks in groups:
            lengths_S[rows] = num_blocks * self._table.page_size
            members_S[num_members : num_members + len(rows)] = rows
            starts = range(num_members, num_members + len(rows), self._tile_rows)
            num_members += len(rows)
            borders += [*starts[1:], num_members]
            saved += (len(rows) - len(starts)) * num_blocks * self._table.page_size
        if saved < WORTHWHILE_TOKENS:
            return None
        borders_S[: len(borders)] = borders
        lengths_S[-1] = len(borders) - 1
        return plan_3S


def _groups(blocks_RP: np.ndarray, step: int) -> list[tuple[np.ndarray, int]]:
    """Groups of rows and how many leading blocks, a multiple of `step`, each has in common: the disjoint groups that
    save most reads. A group and groups inside it that share more exclude each other."""
    num_rows, num_blocks = blocks_RP.shape
    if num_rows < 2 or num_blocks < step:
        return []
    keys_R = np.ascontiguousarray(blocks_RP).view(np.dtype((np.void, num_blocks * blocks_RP.itemsize)))[:, 0]
    order_R = np.argsort(keys_R, kind="stable")  # rows with a common beginning become neighbours
    differs_RP = blocks_RP[order_R[1:]] != blocks_RP[order_R[:-1]]
    common = np.where(differs_RP.any(1), differs_RP.argmax(1), num_blocks) // step * step
    # Runs of rows with at least `depth` blocks in common, nested; closed from the inside out.
    runs: list[tuple[int, int, int, list[tuple[int, int, int]]]] = [(0, 0, 0, [])]  # depth, first, saved inside, groups
    for row, depth in enumerate([*common.tolist(), 0], start=1):
        first = row - 1
        inside: tuple[int, list[tuple[int, int, int]]] = (0, [])
        while runs[-1][0] > depth:
            run_depth, first, saved, groups = runs.pop()
            saved, groups = saved + inside[0], groups + inside[1]
            together = (row - 1 - first) * run_depth
            inside = (together, [(first, row, run_depth)]) if together >= saved else (saved, groups)
        if runs[-1][0] < depth:
            runs.append((depth, first, *inside))
        else:
            run_depth, start, saved, groups = runs.pop()
            runs.append((run_depth, start, saved + inside[0], groups + inside[1]))
    return [(order_R[first:end], depth) for first, end, depth in runs[0][3]]
