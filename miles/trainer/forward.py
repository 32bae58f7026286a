"""Score trained tokens: log-prob and entropy of a micro-batch, or of a whole batch without gradient.

T: tokens fed to the decoder; R: trained tokens; D: hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.model.decoder import Decoder
from miles.ops.logprob import token_log_probs
from miles.trainer.batch import MicroBatch, in_flat_order


@dataclass(frozen=True, slots=True)
class Scorer:
    """How log-probs are computed: logits are divided by the temperature that the tokens were drawn with."""

    temperature: float
    chunk_size: int

    def score(self, model: Decoder, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each trained token, in the order of `micro_batch.places_R`."""
        hidden_TD = model(micro_batch.input_ids_T, micro_batch.context)
        log_probs_R, entropy_R = token_log_probs(
            hidden_TD.index_select(0, micro_batch.rows_R),  # its backward is one scatter; that of indexing is a sort
            model.head_weight,
            micro_batch.targets_R,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
        )
        assert entropy_R is not None, "the entropy was asked for"
        return log_probs_R, entropy_R

    @torch.no_grad()
    def score_all(self, model: Decoder, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        """The same for all tokens of a batch, in its flat order."""
        log_probs, entropies = zip(*(self.score(model, micro_batch) for micro_batch in micro_batches), strict=True)
        return in_flat_order(micro_batches, log_probs), in_flat_order(micro_batches, entropies)
