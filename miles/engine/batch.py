"""One step's work: which rows compute how many tokens, and the tensors that say so to the model.

Shapes: B rows of the step, T packed new tokens, R rows that get a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles.engine.request import RequestTable
from miles.ops.paged_attention import QueryRun, query_run

# Decoding rows are computed in groups of similar context. A further group costs about as much time as this many blocks.
_BLOCKS_PER_RUN = 128


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of one step: first the `num_decodes` decoding ones (by growing number of blocks), then prompt chunks.

    `copies` are (source, target) blocks to copy before anything is written. `drawn_rows_R` get a token each, from the
    logits of packed token `drawn_from_R`; a row that waited for the same prompt draws from its leader's logits.
    """

    rows_B: np.ndarray
    num_new_B: np.ndarray
    num_decodes: int
    copies: Sequence[tuple[int, int]]
    drawn_rows_R: np.ndarray
    drawn_from_R: np.ndarray


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model computes in one step."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    runs: list[QueryRun]


def build_inputs(plan: Plan, table: RequestTable, *, device: torch.device) -> Inputs:
    rows_B, num_new_B, page_size = plan.rows_B, plan.num_new_B, table.page_size
    bounds = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(num_new_B)))
    rows_T = np.repeat(rows_B, num_new_B)
    positions_T = np.arange(bounds[-1]) + np.repeat(table.computed[rows_B] - bounds[:-1], num_new_B)
    blocks_T = table.blocks[rows_T, positions_T // page_size]

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    context_B = table.computed[rows_B] + num_new_B
    blocks_B = -(-context_B // page_size)
    borders = [*_decode_borders(blocks_B[: plan.num_decodes]), *range(plan.num_decodes + 1, len(rows_B) + 1)]
    runs, begin = [], 0
    for end in borders:
        block_table = table.blocks[rows_B[begin:end], : blocks_B[begin:end].max()]
        start, num_queries = int(bounds[begin]), int(num_new_B[begin])
        runs.append(query_run(start, num_queries, upload(block_table), upload(context_B[begin:end]), page_size))
        begin = end
    return Inputs(
        ids_T=upload(table.tokens[rows_T, positions_T]),
        positions_T=upload(positions_T),
        slots_T=upload(blocks_T * page_size + positions_T % page_size),
        cu_seqlens=upload(bounds.astype(np.int32)),
        max_seqlen=int(num_new_B.max()),
        runs=runs,
    )


def _decode_borders(blocks_B: np.ndarray) -> list[int]:
    """Where to end each group of decoding rows, given their growing numbers of blocks: a group is padded to its
    longest, so a border pays once it saves more than `_BLOCKS_PER_RUN` blocks of padding."""
    borders, begin, num_rows = [], 0, len(blocks_B)
    while begin < num_rows:
        # rows begin..end-1 apart from the rest: each then has blocks_B[end-1] blocks and not blocks_B[-1]
        sizes = np.arange(1, num_rows - begin + 1)
        saved = sizes * (blocks_B[-1] - blocks_B[begin:])
        best = int(saved.argmax())
        begin = begin + best + 1 if saved[best] > _BLOCKS_PER_RUN else num_rows
        borders.append(begin)
    return borders
