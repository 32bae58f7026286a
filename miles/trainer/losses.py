"""Losses per trained token, composed from pure functions. R: trained tokens; S: samples; K: known ids of a token.

A loss function takes the current log-probs and entropies, which carry the gradient, and the `TokenInputs` of the same
tokens. It returns named values per token; `loss` is the one that is minimised, the others are metrics. How tokens are
averaged is not its business: see `reduce.py`. The tokens are those of whole answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from miles.config.sections import AlgorithmConfig
from miles.trainer.corrections import correction_weights, off_policy_masked, vetoed
from miles.trainer.kl import kl_estimate
from miles.trainer.objectives import (
    answer_log_ratio,
    clipped_surrogate,
    clipped_weight_surrogate,
    dual_clipped,
    soft_gated_surrogate,
)
from miles.trainer.partition import TopLogProbs, coarse_kl, expected_score
from miles.trainer.ratios import log_ratio

# pg_loss, old log-probs, the engine's log-probs, lengths -> corrected `pg_loss` and metrics per token
CustomCorrection = Callable[[Tensor, Tensor, Tensor, Tensor], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What a loss knows of its tokens; None where nothing asked for it.

    `old_log_probs_R` is None when the current policy is the old one. `lengths_S` are the trained tokens of each answer.
    The `policy_at_...` are the current policy's log-probs, with gradient, of the ids that teacher or engine list.
    """

    advantages_R: Tensor
    old_log_probs_R: Tensor | None = None
    ref_log_probs_R: Tensor | None = None
    lengths_S: Tensor | None = None
    rollout_log_probs_R: Tensor | None = None
    returns_R: Tensor | None = None
    values_R: Tensor | None = None
    teacher_top: TopLogProbs | None = None
    engine_top: TopLogProbs | None = None
    policy_at_teacher_top_RK: Tensor | None = None
    policy_at_engine_top_RK: Tensor | None = None
    correction: str | None = None  # name in `CORRECTIONS`
    custom_correction: CustomCorrection | None = None

    def take(self, places_R: Tensor | slice, lengths_S: Tensor | None = None) -> TokenInputs:
        """The inputs of some of the tokens, which are those of answers of these lengths."""
        taken: dict[str, Any] = {"lengths_S": lengths_S}
        for name in (item.name for item in fields(self) if item.name != "lengths_S"):
            if isinstance(value := getattr(self, name), (Tensor, TopLogProbs)):
                taken[name] = value[places_R]
        return replace(self, **taken)

    def also_ids(self) -> Tensor | None:
        """Ids at which the loss needs the policy's log-probs, besides the drawn ones."""
        tops = [top.ids_RK for top in (self.teacher_top, self.engine_top) if top is not None]
        return torch.cat(tops, 1) if tops else None

    def with_policy_at(self, log_probs_RK: Tensor | None) -> TokenInputs:
        """With the policy's log-probs of these ids."""
        if log_probs_RK is None:
            return self
        num_teacher = 0 if self.teacher_top is None else self.teacher_top.ids_RK.shape[1]
        return replace(
            self,
            policy_at_teacher_top_RK=log_probs_RK[:, :num_teacher],
            policy_at_engine_top_RK=log_probs_RK[:, num_teacher:],
        )


LossFunction = Callable[[Tensor, Tensor, TokenInputs, AlgorithmConfig], dict[str, Tensor]]


def policy_loss(
    log_probs_R: Tensor, entropy_R: Tensor, inputs: TokenInputs, config: AlgorithmConfig
) -> dict[str, Tensor]:
    """The objective of `--policy-objective`, masked by `--use-opsm`, weighted by the off-policy correction, with
    centred scores, minus the entropy bonus, plus the KL to the reference and to the teacher's most likely tokens."""
    values = corrected_objective(log_probs_R, inputs, config)
    loss_R = values["pg_loss"]
    if inputs.engine_top is not None:
        loss_R = loss_R + centring(log_probs_R, inputs, config)
    if config.entropy_coef != 0.0:
        loss_R = loss_R - config.entropy_coef * entropy_R
    if inputs.ref_log_probs_R is not None and config.use_kl_loss:
        kl_R = kl_estimate(log_probs_R, inputs.ref_log_probs_R, config.kl_loss_type)
        if config.use_unbiased_kl:
            kl_R = log_ratio(log_probs_R, _old(log_probs_R, inputs)).exp() * kl_R
        values["kl_loss"] = kl_R
        loss_R = loss_R + config.kl_loss_coef * kl_R
    if inputs.teacher_top is not None:
        assert inputs.policy_at_teacher_top_RK is not None, "the policy was not scored at the teacher's ids"
        values["opd_reverse_kl"] = coarse_kl(inputs.policy_at_teacher_top_RK, inputs.teacher_top.log_probs_RK)
        loss_R = loss_R + config.opd_kl_coef * values["opd_reverse_kl"]
    return {"loss": loss_R, "entropy_loss": entropy_R, **values}


def corrected_objective(log_probs_R: Tensor, inputs: TokenInputs, config: AlgorithmConfig) -> dict[str, Tensor]:
    """`pg_loss` per token after masks and weights, with the ratio and the shares that clips and masks decided."""
    old_R = _old(log_probs_R, inputs)
    log_ratio_R = log_ratio(log_probs_R, old_R)
    loss_R, clipped_R, ppo_kl_R = objective(log_probs_R, log_ratio_R, inputs, config)
    values = {"pg_clipfrac": clipped_R.to(loss_R.dtype), "ppo_kl": ppo_kl_R}
    if config.use_opsm:
        values["opsm_clipfrac"] = off_policy_masked(
            log_ratio_R, inputs.advantages_R, _lengths(inputs), delta=config.opsm_delta
        )
        loss_R = loss_R * (1.0 - values["opsm_clipfrac"])
    rollout_R = inputs.rollout_log_probs_R
    if rollout_R is not None and inputs.custom_correction is not None:
        values |= inputs.custom_correction(loss_R, old_R, rollout_R, _lengths(inputs))
        loss_R = values.pop("pg_loss")
    elif rollout_R is not None and inputs.correction is not None:
        values |= correction_weights(old_R, rollout_R, _lengths(inputs), name=inputs.correction, config=config)
        loss_R = loss_R * values["tis"]
    if rollout_R is not None and config.veto_threshold is not None:
        values["veto_frac"] = vetoed(old_R, rollout_R, _lengths(inputs), threshold=config.veto_threshold)
        loss_R = loss_R * (1.0 - values["veto_frac"])
    return {"pg_loss": loss_R, **values}


def objective(
    log_probs_R: Tensor, log_ratio_R: Tensor, inputs: TokenInputs, config: AlgorithmConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss per token of the chosen objective, where a clip decided it, and old minus new log-prob as it judges it."""
    advantages_R, name = inputs.advantages_R, objective_name(config)
    eps_high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    if name == "cispo":
        loss_R, clipped_R = clipped_weight_surrogate(log_ratio_R, log_probs_R, advantages_R, eps_high=eps_high)
    elif name == "sapo":
        loss_R, clipped_R = soft_gated_surrogate(
            log_ratio_R, advantages_R, tau_positive=config.sapo_tau_pos, tau_negative=config.sapo_tau_neg
        )
    else:
        if name == "gspo":
            log_ratio_R = answer_log_ratio(log_ratio_R, _lengths(inputs))
        loss_R, clipped_R = clipped_surrogate(log_ratio_R, advantages_R, eps_low=config.eps_clip, eps_high=eps_high)
        if config.eps_clip_c is not None:
            loss_R, clipped_R = dual_clipped(loss_R, clipped_R, advantages_R, bound=config.eps_clip_c)
    return loss_R, clipped_R, -log_ratio_R


def objective_name(config: AlgorithmConfig) -> str:
    """`auto` is gspo with `--advantage-estimator gspo`, else clip."""
    if config.policy_objective != "auto":
        return config.policy_objective
    return "gspo" if config.advantage_estimator == "gspo" else "clip"


def centring(log_probs_R: Tensor, inputs: TokenInputs, config: AlgorithmConfig) -> Tensor:
    """A term of value 0 that takes the sampler's mean score from the score of the drawn token, whatever the objective
    makes of it: with c = d pg_loss / d log pi, the gradient becomes c (grad log pi - E_q[grad log pi])."""
    assert inputs.engine_top is not None and inputs.policy_at_engine_top_RK is not None, "nothing to centre with"
    with torch.enable_grad():
        leaf_R = log_probs_R.detach().requires_grad_()
        pg_loss_R = corrected_objective(leaf_R, inputs, config)["pg_loss"]
        (slope_R,) = torch.autograd.grad(pg_loss_R.sum(), leaf_R)
    return -slope_R * expected_score(inputs.policy_at_engine_top_RK, inputs.engine_top.log_probs_RK)


def sft_loss(log_probs_R: Tensor, entropy_R: Tensor, inputs: TokenInputs, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Negative log-likelihood of the given answer."""
    return {"loss": -log_probs_R, "entropy_loss": entropy_R}


LOSSES: dict[str, LossFunction] = {"policy_loss": policy_loss, "sft_loss": sft_loss}


def _old(log_probs_R: Tensor, inputs: TokenInputs) -> Tensor:
    return log_probs_R.detach() if inputs.old_log_probs_R is None else inputs.old_log_probs_R


def _lengths(inputs: TokenInputs) -> Tensor:
    assert inputs.lengths_S is not None, "an objective of whole answers needs their lengths"
    return inputs.lengths_S
