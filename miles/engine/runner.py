"""Runs one planned step through the model.

On a GPU a step is only enqueued: its tokens stay on the device, where the next step finds them, and reach the host one
step late. The table marks a token that the host does not know yet as `UNKNOWN`.

Shapes: T packed new tokens, R rows that get a token, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from miles.engine.batch import Plan, build_inputs
from miles.engine.graphs import DecodeGraphs, size_class
from miles.engine.memory import KvCache
from miles.engine.request import UNKNOWN, RequestTable
from miles.engine.sampler import Done, Drawing, OnTheWay, draw, draw_on_device
from miles.engine.sharing import SharedBeginnings
from miles.model.context import ForwardContext, on_device
from miles.model.decoder import Decoder
from miles.ops import numerics
from miles.ops.kernels import HEAD_SIZES, has_kernels, kernels
from miles.ops.matmul import project_float32
from miles.ops.paged_attention import PagedView


class Runner:
    """The model, its cache and the device they are on. Reads the parameters it is given; they may change between
    steps, in place. With `overlaps` tokens come one step late; `graphs` replays decode steps; `invariant` operations
    give a request the same bits in any batch."""

    def __init__(
        self,
        model: Decoder,
        *,
        table: RequestTable,
        cache: KvCache,
        device: torch.device,
        overlaps: bool = False,
        graphs: bool = False,
        invariant: bool = False,
    ) -> None:
        self.cache = cache
        self._invariant = invariant
        self._model, self._table, self._overlaps = model, table, overlaps
        self._upload = partial(on_device, device=device)
        # the last token of each row, and a place for rows that are padding
        self._last_tokens = torch.zeros(table.num_rows + 1, dtype=torch.int64, device=device)
        self._sharing: SharedBeginnings | None = None
        if has_kernels(self._last_tokens) and model.spec.head_dim in HEAD_SIZES:
            self._sharing = shared_beginnings(model, table)
        self._make_graphs = partial(DecodeGraphs, model, table, cache, self._last_tokens, self._upload, self._sharing)
        self._graphs = self._make_graphs() if graphs else None

    def drop_graphs(self) -> int:
        """Forget the captured graphs, which are made again when needed; bytes that are free now."""
        if self._graphs is None:
            return 0
        before, self._graphs = torch.cuda.memory_reserved(), None
        torch.cuda.empty_cache()
        self._graphs = self._make_graphs()
        return max(before - torch.cuda.memory_reserved(), 0)

    def launch(self, plan: Plan) -> Drawing:
        """Copy blocks, compute the new tokens, draw. The table is only read."""
        with numerics.invariant(self._invariant):
            return self._launch(plan)

    # not inference_mode: the parameters belong to the trainer too, and what it derives from them must allow gradients
    @torch.no_grad()
    def _launch(self, plan: Plan) -> Drawing:
        if plan.copies:
            self.cache.copy_blocks(self._upload(np.array(plan.copies)))
        rows_R = plan.drawn_rows_R
        draws_at_once = not self._overlaps or bool(self._table.needs_logits[rows_R].any())
        if self._graphs is not None and plan.only_decodes:
            if not draws_at_once:
                return OnTheWay(self._graphs.draw(plan))
            logits_RV = self._graphs.logits(plan)
        else:
            logits_RV = self._logits(plan)
        if not draws_at_once:
            return OnTheWay(draw_on_device(logits_RV, self._table, rows_R, self._last_tokens, self._upload))
        drawn = draw(logits_RV, self._table, rows_R, self._upload)
        if self._overlaps:
            self._last_tokens.index_copy_(0, self._upload(rows_R), self._upload(drawn.tokens_R))
        return Done(drawn)

    def _logits(self, plan: Plan) -> Tensor:
        inputs = build_inputs(plan, self._table, upload=self._upload)
        ids_T = inputs.ids_T
        if self._overlaps:
            ids_T = torch.where(ids_T == UNKNOWN, self._last_tokens[inputs.rows_T], ids_T)
        shared_3S = self._sharing.plan(plan.rows_B) if self._sharing is not None and plan.only_decodes else None
        view = PagedView(
            self.cache.k_caches,
            self.cache.v_caches,
            inputs.slots_T,
            self._table.page_size,
            inputs.block_table_BP,
            inputs.context_lens_B,
            inputs.query_bounds,
            None if shared_3S is None else self._upload(shared_3S),
        )
        context = ForwardContext(inputs.positions_T, inputs.query_bounds, inputs.max_seqlen, view)
        hidden_TD = self._model(ids_T, context)
        return project_float32(hidden_TD.index_select(0, self._upload(plan.drawn_from_R)), self._model.head_weight)


def shared_beginnings(model: Decoder, table: RequestTable) -> SharedBeginnings:
    """The planner of shared reads for a model's decode kernel."""
    attention, spec = kernels("paged_attention"), model.spec
    return SharedBeginnings(
        table,
        num_places=size_class(table.num_rows) + 1,
        tile_rows=attention.tile_rows(spec.num_heads // spec.num_kv_heads),
        key_block=attention.TILES[16][0],
        most_tokens=attention.CHUNK * attention.SHARED_CHUNKS,
    )
