"""CUDA graphs of decode steps: one replay instead of some three hundred launches.

There is a graph for each class of batch sizes, with and without shared reads of prompts (`sharing.py`), captured when
it is first needed. A batch is padded up to its class:
rows of padding have no context, store nothing and draw into a place of their own. Inputs lie in one block of memory per
graph, so that a step copies twice: that block, and the block tables. The weights never move, so a graph computes with
what the trainer has made of them.

Shapes: R rows, padded to their class; P blocks of a row; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from miles.engine.batch import Plan
from miles.engine.memory import KvCache
from miles.engine.request import UNKNOWN, RequestTable
from miles.engine.sampler import draw_rows, next_seeds
from miles.engine.sharing import SharedBeginnings
from miles.model.context import ForwardContext
from miles.model.decoder import Decoder
from miles.ops.matmul import project_float32
from miles.ops.paged_attention import PagedView

# Rows of the block of inputs, 64 bits each.
_IDS, _POSITIONS, _SLOTS, _ROWS, _SEEDS, _CONTEXTS, _TEMPERATURES, _GREEDY, _NUM_INPUTS = range(9)


def size_class(num_rows: int) -> int:
    """The batch size that a batch is padded to: powers of two, then multiples of 8 up to 32, then of 16."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = 8 if num_rows <= 32 else 16
    return -(-num_rows // step) * step


class Graph:
    """A captured step: fill `inputs`, replay, read `output` before any other graph of the same pool is replayed."""

    def __init__(self, compute: Callable[[Tensor], Tensor], inputs: Tensor, stream: torch.cuda.Stream, pool: tuple):
        self.inputs = inputs
        compute(inputs)  # compiles kernels and sets up libraries, which a capture must not
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # other threads may use the device meanwhile
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self.output = compute(inputs)
            self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> Tensor:
        self._graph.replay()
        return self.output


class DecodeGraphs:
    """Computes decode steps of rows of the table, with `last_tokens` where the host does not know the tokens."""

    def __init__(
        self,
        model: Decoder,
        table: RequestTable,
        cache: KvCache,
        last_tokens: Tensor,
        upload: Callable[[np.ndarray], Tensor],
        sharing: SharedBeginnings | None,
    ) -> None:
        assert sharing is not None, "a graph replays kernels"
        self._model, self._table, self._cache, self._upload = model, table, cache, upload
        self._last_tokens, self._sharing = last_tokens, sharing
        device, num_blocks = last_tokens.device, -(-model.spec.max_position_embeddings // table.page_size)
        num_blocks = min(num_blocks, cache.num_blocks)
        self._block_tables_RP = torch.zeros(size_class(table.num_rows), num_blocks, dtype=torch.int32, device=device)
        self._shared_3S = torch.zeros(3, sharing.num_places, dtype=torch.int32, device=device)
        self._shared_now: np.ndarray | None = None  # what it holds
        self._graphs: dict[tuple[int, bool, bool], Graph] = {}
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def draw(self, plan: Plan) -> Tensor:
        """Token, bits of its log-prob and whether the logits were finite, int32, for each row of the plan: 3 x R."""
        return self._run(plan, draws=True)[:, : len(plan.rows_B)]

    def logits(self, plan: Plan) -> Tensor:
        """Float32 logits of each row of the plan, R x V."""
        return self._run(plan, draws=False)[: len(plan.rows_B)]

    def _run(self, plan: Plan, *, draws: bool) -> Tensor:
        table, rows_R, num_rows = self._table, plan.rows_B, len(plan.rows_B)
        filled, shared_3S = self._padding(size_class(num_rows)), self._sharing.plan(rows_R)
        if shared_3S is not None and shared_3S is not self._shared_now:
            self._shared_3S.copy_(self._upload(shared_3S))
            self._shared_now = shared_3S
        key = (filled.shape[1], draws, shared_3S is not None)
        if key not in self._graphs:
            compute = partial(self._draw if draws else self._logits, shares=shared_3S is not None)
            self._graphs[key] = Graph(compute, self._upload(filled), self._stream, self._pool)
        graph = self._graphs[key]
        places_R = table.computed[rows_R]
        num_blocks = int(places_R.max()) // table.page_size + 1
        blocks_RP = table.blocks[rows_R, :num_blocks]
        last_block_R = table.blocks[rows_R, places_R // table.page_size]
        filled[_IDS, :num_rows] = table.tokens[rows_R, places_R]
        filled[_POSITIONS, :num_rows] = places_R
        filled[_SLOTS, :num_rows] = last_block_R * table.page_size + places_R % table.page_size
        filled[_ROWS, :num_rows] = rows_R
        filled[_SEEDS, :num_rows] = next_seeds(table, rows_R)
        filled[_CONTEXTS, :num_rows] = places_R + 1
        filled[_TEMPERATURES].view(np.float64)[:num_rows] = table.temperature[rows_R]
        filled[_GREEDY, :num_rows] = table.greedy[rows_R]
        graph.inputs.copy_(self._upload(filled))
        self._block_tables_RP[:num_rows, :num_blocks].copy_(self._upload(blocks_RP.astype(np.int32)))
        return graph.replay()

    def _padding(self, num_rows: int) -> np.ndarray:
        filled = np.zeros((_NUM_INPUTS, num_rows), dtype=np.int64)
        filled[_SLOTS] = -1
        filled[_ROWS] = self._table.num_rows
        filled[_TEMPERATURES].view(np.float64)[:] = 1.0
        return filled

    def _logits(self, inputs: Tensor, *, shares: bool) -> Tensor:
        num_rows = inputs.shape[1]
        ids_R = torch.where(inputs[_IDS] == UNKNOWN, self._last_tokens[inputs[_ROWS]], inputs[_IDS])
        query_bounds = torch.arange(num_rows + 1, dtype=torch.int32, device=inputs.device)
        view = PagedView(
            self._cache.k_caches,
            self._cache.v_caches,
            inputs[_SLOTS],
            self._table.page_size,
            self._block_tables_RP[:num_rows],
            inputs[_CONTEXTS].to(torch.int32),
            query_bounds,
            self._shared_3S if shares else None,
        )
        hidden_RD = self._model(ids_R, ForwardContext(inputs[_POSITIONS], query_bounds, 1, view))
        return project_float32(hidden_RD, self._model.head_weight)

    def _draw(self, inputs: Tensor, *, shares: bool) -> Tensor:
        return draw_rows(
            self._logits(inputs, shares=shares),
            rows_R=inputs[_ROWS],
            seeds_R=inputs[_SEEDS],
            temperature_R=inputs.view(torch.float64)[_TEMPERATURES].to(torch.float32),
            greedy_R=inputs[_GREEDY] != 0,
            last_tokens=self._last_tokens,
        )
