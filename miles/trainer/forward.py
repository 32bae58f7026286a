"""Score trained tokens: log-prob and entropy of a micro-batch, or of a whole batch without gradient.

Where answers were drawn from kept sets, every model is scored over these sets: policy, reference and teacher are then
distributions over the same outcomes, and what compares them stays a divergence.

T: tokens fed to the decoder; R: trained tokens; K: ids scored of a token; D: hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.model.decoder import Decoder
from miles.ops import numerics
from miles.ops.logprob import token_log_probs, top_log_probs
from miles.trainer.batch import MicroBatch, in_flat_order
from miles.trainer.partition import TopLogProbs


@dataclass(frozen=True, slots=True)
class Scorer:
    """How log-probs are computed: logits are divided by the temperature that the tokens were drawn with, and
    `invariant` operations give the engine's bits."""

    temperature: float
    chunk_size: int
    invariant: bool = False

    def score(
        self,
        model: Decoder,
        micro_batch: MicroBatch,
        also_ids_RK: Tensor | None = None,
        *,
        adapter: bool = True,
        dropout_seed: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-prob and entropy of each trained token, in the order of `micro_batch.places_R`, and the log-probs of
        other ids at the same places. `adapter` and `dropout_seed` are those of `ForwardContext`."""
        targets_R1 = micro_batch.targets_R[:, None]
        with numerics.invariant(self.invariant):
            log_probs_RK, entropy_R = token_log_probs(
                self._hidden(model, micro_batch, adapter=adapter, dropout_seed=dropout_seed),
                model.head_weight,
                targets_R1 if also_ids_RK is None else torch.cat((targets_R1, also_ids_RK), 1),
                temperature=self.temperature,
                chunk_size=self.chunk_size,
                kept=micro_batch.kept,
            )
        return log_probs_RK[:, 0], entropy_R, None if also_ids_RK is None else log_probs_RK[:, 1:]

    @torch.no_grad()
    def score_all(
        self, model: Decoder, micro_batches: Sequence[MicroBatch], *, adapter: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of all tokens of a batch, in its flat order."""
        scored = [self.score(model, micro_batch, adapter=adapter) for micro_batch in micro_batches]
        log_probs, entropies, _ = zip(*scored, strict=True)
        return in_flat_order(micro_batches, log_probs), in_flat_order(micro_batches, entropies)

    @torch.no_grad()
    def top_all(self, model: Decoder, micro_batches: Sequence[MicroBatch], num_top: int) -> TopLogProbs:
        """The most likely tokens at every place of a batch, in its flat order."""
        scored = [
            top_log_probs(
                *(self._hidden(model, micro_batch), model.head_weight, num_top),
                temperature=self.temperature,
                chunk_size=self.chunk_size,
                kept=micro_batch.kept,
            )
            for micro_batch in micro_batches
        ]
        ids, log_probs = zip(*scored, strict=True)
        return TopLogProbs(in_flat_order(micro_batches, ids), in_flat_order(micro_batches, log_probs))

    def _hidden(self, model: Decoder, micro_batch: MicroBatch, **lora: Any) -> Tensor:
        hidden_TD = model(micro_batch.input_ids_T, dataclasses.replace(micro_batch.context, **lora))
        # The backward pass of index_select is one scatter; that of indexing is a sort.
        return hidden_TD.index_select(0, micro_batch.rows_R)
