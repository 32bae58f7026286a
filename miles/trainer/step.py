"""One optimizer step: accumulate, clip, optimise. Read this first.

Each micro-batch adds its share of the gradient. Its tokens carry weights made from counts of the whole step, so the sum
over the micro-batches is the gradient of one loss, however the samples were packed.

R: trained tokens of the step, in canonical order.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.config.sections import AlgorithmConfig
from miles.errors import NotFiniteError
from miles.model.decoder import Decoder
from miles.observe.gate import GATE
from miles.trainer.batch import MicroBatch, TokenBatch, in_flat_order, micro_batches, name_samples
from miles.trainer.checks import check_gap
from miles.trainer.forward import Scorer
from miles.trainer.losses import LossFunction, TokenInputs
from miles.trainer.optim import Optimizer


@dataclass(frozen=True, slots=True)
class StepWork:
    """The samples of one optimizer step, packed, with what the loss needs to know of each token."""

    batch: TokenBatch
    micro_batches: list[MicroBatch]
    inputs: TokenInputs
    weights_R: Tensor
    is_first: bool  # no weight has changed since the samples came


@dataclass(frozen=True, slots=True)
class StepResult:
    """Scores of every token, the named values that the loss function returned, and the norm before clipping."""

    log_probs_R: Tensor
    entropy_R: Tensor
    loss_values: dict[str, Tensor]
    grad_norm: float


@dataclass(frozen=True, slots=True)
class Learner:
    """A model with the means to improve it."""

    model: Decoder
    optimizer: Optimizer
    scorer: Scorer
    loss: LossFunction
    config: AlgorithmConfig
    max_gap: float  # mean distance to the engine's log-probs that is tolerated; 0: any

    def step(self, work: StepWork, *, updates: bool = True) -> StepResult:
        """Update the parameters once. `TrainError`, and no update, when the loss or the gradient is not finite or the
        engine is too far away. Without `updates` the tokens are only scored."""
        self.optimizer.zero_grad()
        parts = [self.accumulate(micro_batch, work) for micro_batch in work.micro_batches]
        values = {name: in_flat_order(work.micro_batches, [part[name] for part in parts]) for name in parts[0]}
        result = StepResult(values.pop("log_probs"), values.pop("entropy"), values, self.optimizer.grad_norm())
        self.check_finite(work, result)
        if self.max_gap > 0 and (both := self.comparable_log_probs(work, result)) is not None:
            check_gap(*both, limit=self.max_gap, exact=self.scorer.invariant)
        if not updates:
            return result
        self.optimizer.clip(result.grad_norm)
        self.optimizer.step()
        return result

    def accumulate(self, micro_batch: MicroBatch, work: StepWork) -> dict[str, Tensor]:
        """Score a micro-batch, and add its gradient to the parameters' if it learns."""
        GATE.wait()
        places_R = micro_batch.places_R
        with torch.set_grad_enabled(micro_batch.learns):
            inputs = work.inputs.take(places_R, micro_batch.lengths_S)
            seed = self.new_dropout_seed() if micro_batch.learns else None
            log_probs_R, entropy_R, also_RK = self.scorer.score(
                self.model, micro_batch, inputs.also_ids(), dropout_seed=seed
            )
            values = self.loss(log_probs_R, entropy_R, inputs.with_policy_at(also_RK), self.config)
            if micro_batch.learns:
                (values["loss"] * work.weights_R[places_R]).sum().backward()
        scored = {"log_probs": log_probs_R, "entropy": entropy_R, **values}
        return {name: value_R.detach() for name, value_R in scored.items()}

    def new_dropout_seed(self) -> int | None:
        """For the next training pass of adapters with dropout; its generator is saved and resumed."""
        lora = self.model.lora
        return None if lora is None or lora.lora_dropout == 0 else int(torch.randint(2**62, ()))

    def comparable_log_probs(self, work: StepWork, result: StepResult) -> tuple[Tensor, Tensor] | None:
        """The trainer's before the first update of the rollout, and the engine's; None where one of them is unknown."""
        rollout_R = work.batch.rollout_log_probs_R
        old_R = None if self.config.use_rollout_logprobs else work.inputs.old_log_probs_R
        ours_R = result.log_probs_R if old_R is None and work.is_first else old_R
        return None if ours_R is None or rollout_R is None else (ours_R, rollout_R)

    def check_finite(self, work: StepWork, result: StepResult) -> None:
        """Raise a `NotFiniteError` that names the samples whose loss or gradient is nan or inf."""
        bad_R = ~result.loss_values["loss"].isfinite()
        if bad_R.any():
            what, bad = "loss", work.batch.sample_R[bad_R].unique().tolist()
        elif not math.isfinite(result.grad_norm):
            what, bad = "gradient", self.find_bad_gradients(work)
        else:
            return
        indices = [work.batch.samples[i].index for i in bad]
        raise NotFiniteError(
            f"the {what} of samples {name_samples(indices)} is not finite (nan or inf). The weights are as they were "
            "before this optimizer step. A lower --lr or --clip-grad usually prevents it",
            indices,
        )

    def find_bad_gradients(self, work: StepWork) -> list[int]:
        """The samples of the step whose own gradient is not finite, or all when only their sum is not.

        Slow: one backward pass per sample, for the error message only.
        """
        bad = []
        for i in range(len(work.batch.samples)):
            self.optimizer.zero_grad()
            for micro_batch in micro_batches(work.batch, [i], max_tokens=sys.maxsize, learns=True):
                self.accumulate(micro_batch, work)
            if not math.isfinite(self.optimizer.grad_norm()):
                bad.append(i)
        return bad or list(range(len(work.batch.samples)))
