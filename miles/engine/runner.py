"""Runs one planned step through the model."""

from __future__ import annotations

import torch

from miles.engine.batch import Plan, build_inputs
from miles.engine.memory import KvCache
from miles.engine.request import RequestTable
from miles.engine.sampler import Drawn, draw
from miles.model.context import ForwardContext
from miles.model.decoder import Decoder
from miles.ops.matmul import project_float32
from miles.ops.paged_attention import PagedView


class Runner:
    """The model, its cache and the device they are on. Reads the parameters it is given; they may change between
    steps, in place."""

    def __init__(self, model: Decoder, *, table: RequestTable, cache: KvCache, device: torch.device) -> None:
        self.cache = cache
        self._model, self._table, self._device = model, table, device

    # not inference_mode: the parameters belong to the trainer too, and what it derives from them must allow gradients
    @torch.no_grad()
    def run(self, plan: Plan) -> Drawn:
        """Copy blocks, compute the new tokens, draw. The table is only read."""
        if plan.copies:
            self.cache.copy_blocks(plan.copies)
        inputs = build_inputs(plan, self._table, device=self._device)
        view = PagedView(
            self.cache.k_caches,
            self.cache.v_caches,
            inputs.slots_T,
            self._table.page_size,
            inputs.block_table_BP,
            inputs.context_lens_B,
            inputs.query_bounds,
        )
        context = ForwardContext(inputs.positions_T, inputs.query_bounds, inputs.max_seqlen, view)
        hidden_TD = self._model(inputs.ids_T, context)
        drawn_from_R = torch.from_numpy(plan.drawn_from_R).to(self._device, non_blocking=True)
        logits_RV = project_float32(hidden_TD.index_select(0, drawn_from_R), self._model.head_weight)
        return draw(logits_RV, self._table, plan.drawn_rows_R)
