"""One step's work: which rows compute how many tokens, and the tensors that say so to the model.

Shapes: B rows of the step, P blocks of a row, T packed new tokens, R rows that get a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from miles.engine.request import RequestTable


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of one step: first the decoding ones, by length, then prompt chunks.

    `copies` are (source, target) blocks to copy before anything is written. `drawn_rows_R` get a token each, from the
    logits of packed token `drawn_from_R`; a row that waited for the same prompt draws from its leader's logits.
    """

    rows_B: np.ndarray
    num_new_B: np.ndarray
    copies: Sequence[tuple[int, int]]
    drawn_rows_R: np.ndarray
    drawn_from_R: np.ndarray

    @property
    def only_decodes(self) -> bool:
        """Whether every row computes one token and gets one."""
        return len(self.drawn_rows_R) == len(self.rows_B) == int(self.num_new_B.sum())


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model computes in one step; see `PagedView` for the last four. `rows_T` are rows of the table."""

    ids_T: Tensor
    rows_T: Tensor
    positions_T: Tensor
    max_seqlen: int
    slots_T: Tensor
    block_table_BP: Tensor
    context_lens_B: Tensor
    query_bounds: Tensor


def build_inputs(plan: Plan, table: RequestTable, *, upload: Callable[[np.ndarray], Tensor]) -> Inputs:
    rows_B, num_new_B, page_size = plan.rows_B, plan.num_new_B, table.page_size
    bounds = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(num_new_B)))
    computed_B = table.computed[rows_B]
    context_B = computed_B + num_new_B
    rows_T = np.repeat(rows_B, num_new_B)
    positions_T = np.arange(bounds[-1]) + np.repeat(computed_B - bounds[:-1], num_new_B)
    slots_T = table.blocks[rows_T, positions_T // page_size] * page_size + positions_T % page_size
    longest, num_blocks = int(num_new_B.max()), -(-int(context_B.max()) // page_size)
    return Inputs(
        ids_T=upload(table.tokens[rows_T, positions_T]),
        rows_T=upload(rows_T),
        positions_T=upload(positions_T),
        max_seqlen=longest,
        slots_T=upload(slots_T),
        block_table_BP=upload(table.blocks[rows_B, :num_blocks].astype(np.int32)),
        context_lens_B=upload(context_B.astype(np.int32)),
        query_bounds=upload(bounds.astype(np.int32)),
    )
