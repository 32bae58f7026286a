"""Losses per trained token, composed from pure functions. R: trained tokens.

A loss function takes the current log-probs and entropies, which carry the gradient, and the `TokenInputs` of the same
tokens. It returns named values per token; `loss` is the one that is minimised, the others are metrics. How tokens are
averaged is not its business: see `reduce.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.config.sections import AlgorithmConfig
from miles.trainer.ratios import LOG_RATIO_LIMIT, log_ratio

LOW_VAR_KL_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What a loss knows of its tokens. `old_log_probs_R` is None when the current policy is the old one."""

    advantages_R: Tensor
    old_log_probs_R: Tensor | None = None
    ref_log_probs_R: Tensor | None = None

    def take(self, places_R: Tensor | slice) -> TokenInputs:
        """The inputs of some of the tokens."""
        old, ref = self.old_log_probs_R, self.ref_log_probs_R
        return TokenInputs(
            self.advantages_R[places_R],
            None if old is None else old[places_R],
            None if ref is None else ref[places_R],
        )


LossFunction = Callable[[Tensor, Tensor, TokenInputs, AlgorithmConfig], dict[str, Tensor]]


def clipped_surrogate(
    log_ratio_R: Tensor, advantages_R: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A) and where the clip decided it. arXiv 1707.06347, 2503.14476."""
    ratio_R = log_ratio_R.exp()
    free_R = -ratio_R * advantages_R
    clipped_R = -ratio_R.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages_R
    return torch.maximum(free_R, clipped_R), clipped_R > free_R


def kl_estimate(log_probs_R: Tensor, base_log_probs_R: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy || base) from tokens of the policy, by the estimators of joschu.net/blog/kl-approx.html.

    With a = log p - log base: k1 = a, k2 = a^2 / 2, k3 = exp(-a) - 1 + a; low_var_kl is k3 with a kept within +-20 and
    the result within +-10.
    """
    a_R = log_probs_R - base_log_probs_R
    if kind == "k1":
        return a_R
    if kind == "k2":
        return a_R.square() / 2
    if kind == "k3":
        return torch.expm1(-a_R) + a_R
    assert kind == "low_var_kl", f"unknown KL estimator {kind!r}"
    a_R = a_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(-a_R) + a_R).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)


def policy_loss(
    log_probs_R: Tensor, entropy_R: Tensor, inputs: TokenInputs, config: AlgorithmConfig
) -> dict[str, Tensor]:
    """Clipped surrogate, minus `--entropy-coef` times the entropy, plus `--kl-loss-coef` times the KL estimate."""
    old_R = log_probs_R.detach() if inputs.old_log_probs_R is None else inputs.old_log_probs_R
    log_ratio_R = log_ratio(log_probs_R, old_R)
    eps_high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    loss_R, clipped_R = clipped_surrogate(log_ratio_R, inputs.advantages_R, eps_low=config.eps_clip, eps_high=eps_high)
    values = {"pg_loss": loss_R, "pg_clipfrac": clipped_R.to(loss_R.dtype), "ppo_kl": -log_ratio_R}
    if config.entropy_coef != 0.0:
        loss_R = loss_R - config.entropy_coef * entropy_R
    if inputs.ref_log_probs_R is not None:
        values["kl_loss"] = kl_estimate(log_probs_R, inputs.ref_log_probs_R, config.kl_loss_type)
        loss_R = loss_R + config.kl_loss_coef * values["kl_loss"]
    return {"loss": loss_R, "entropy_loss": entropy_R, **values}


def sft_loss(log_probs_R: Tensor, entropy_R: Tensor, inputs: TokenInputs, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Negative log-likelihood of the given answer."""
    return {"loss": -log_probs_R, "entropy_loss": entropy_R}


LOSSES: dict[str, LossFunction] = {"policy_loss": policy_loss, "sft_loss": sft_loss}
