"""The critic of PPO: a decoder with a value head, its loss and its optimizer.

It predicts, at the place that predicts a token, the return from that token on. R: trained tokens; D: hidden.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from miles.config.sections import RunConfig
from miles.errors import NotFiniteError
from miles.model.decoder import Decoder
from miles.model.names import to_hf
from miles.trainer.batch import MicroBatch, in_flat_order
from miles.trainer.optim import Optimizer
from miles.trainer.reduce import weighted_sum

HEAD = "value_head.weight"


def value_loss(values_R: Tensor, old_values_R: Tensor, returns_R: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """The larger of the squared errors of the value and of the value kept within `clip` of the old one, and where the
    clip decided it. The value side of arXiv 1707.06347, without a factor 1/2."""
    free_R = (values_R - returns_R).square()
    clipped_R = (old_values_R + (values_R - old_values_R).clamp(-clip, clip) - returns_R).square()
    return torch.maximum(free_R, clipped_R), clipped_R > free_R


class ValueModel(nn.Module):
    """A decoder whose last hidden states give one number each. The value head is float32 and starts at 0, so that the
    first advantages are the rewards."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        weight = torch.zeros(1, decoder.spec.hidden_size, device=decoder.head_weight.device)
        self.value_head = nn.ParameterDict({"weight": nn.Parameter(weight)})

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        hidden_TD = self.decoder(micro_batch.input_ids_T, micro_batch.context)
        hidden_RD = hidden_TD.index_select(0, micro_batch.rows_R).float()
        return (hidden_RD @ self.value_head["weight"].T).squeeze(1)


class Critic:
    """Owns the value model and its optimizer. The parameters of `decoder` are updated in place."""

    def __init__(self, decoder: Decoder, config: RunConfig, *, total_steps: int) -> None:
        optim, own = config.optim, config.critic
        lr = optim.lr if own.critic_lr is None else own.critic_lr
        mine = dataclasses.replace(optim, lr=lr, lr_warmup_iters=own.critic_lr_warmup_iters, lr_warmup_fraction=None)
        self.model = ValueModel(decoder)
        self.optimizer = Optimizer(self.model, mine, total_steps=total_steps)
        self._clip = own.value_clip

    @torch.no_grad()
    def values(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The value of each token of a batch, in its flat order."""
        return in_flat_order(micro_batches, [self.model(micro_batch) for micro_batch in micro_batches])

    def step(
        self, micro_batches: Sequence[MicroBatch], *, old_values_R: Tensor, returns_R: Tensor, weights_R: Tensor
    ) -> dict[str, float]:
        """One update towards the returns, and its metrics. `TrainError`, and no update, when numbers are not finite."""
        self.optimizer.zero_grad()
        losses, clips = [], []
        for micro_batch in micro_batches:
            places_R = micro_batch.places_R
            loss_R, clipped_R = value_loss(
                self.model(micro_batch), old_values_R[places_R], returns_R[places_R], clip=self._clip
            )
            (loss_R * weights_R[places_R]).sum().backward()
            losses.append(loss_R.detach())
            clips.append(clipped_R.to(loss_R.dtype))
        grad_norm = self.optimizer.grad_norm()
        if not math.isfinite(grad_norm):
            raise NotFiniteError(
                "the critic's gradient is not finite (nan or inf); nothing was updated. Lower --critic-lr", ()
            )
        learning_rate = self.optimizer.learning_rate
        self.optimizer.clip(grad_norm)
        self.optimizer.step()
        return {
            "train/value_loss": weighted_sum(in_flat_order(micro_batches, losses), weights_R),
            "train/value_clipfrac": weighted_sum(in_flat_order(micro_batches, clips), weights_R / weights_R.sum()),
            "train/critic_grad_norm": grad_norm,
            "train/critic_lr": learning_rate,
        }

    def live_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Masters and moments by file stem, the decoder's under Hugging Face names."""
        masters = {name: master.detach() for name, master in self.optimizer.masters.items()}
        moments = self.optimizer.moments(self._named)
        return {"critic": self._named(masters), "critic_optimizer": moments}

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        prefix = "decoder."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        return {**to_hf(self.model.decoder.spec, own), HEAD: tensors[HEAD]}
