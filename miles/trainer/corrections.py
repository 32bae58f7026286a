"""Weights for tokens that another distribution drew: the engine's numbers, or older weights. Pure functions.

With q the engine's probability of a token and old that of the policy it is judged against, w = old / q. A weight
multiplies the policy-gradient loss and carries no gradient; a weight of 0 drops the token, whose place in every mean
stays. R: trained tokens; S: samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.config.sections import AlgorithmConfig
from miles.trainer.ratios import LOG_RATIO_LIMIT, answer_means, answer_sums, log_ratio, on_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """What a weight may be."""

    low: float
    high: float

    def clamp(self, weights: Tensor) -> Tensor:
        return weights.clamp(self.low, self.high)

    def drop_outside(self, weights: Tensor) -> Tensor:
        return torch.where((weights >= self.low) & (weights <= self.high), weights, 0.0)


def token_tis(log_w_R: Tensor, lengths_S: Tensor, limits: Limits) -> Tensor:
    """w kept within the limits. Truncated importance sampling, Yao et al. 2025; V-trace, arXiv 1802.01561."""
    return limits.clamp(log_w_R.exp())


def sequence_tis(log_w_R: Tensor, lengths_S: Tensor, limits: Limits) -> Tensor:
    """One weight per answer, the product of its w, kept within the limits."""
    return limits.clamp(_answer_weight(answer_sums(log_w_R, lengths_S), log_w_R, lengths_S))


def icepop(log_w_R: Tensor, lengths_S: Tensor, limits: Limits) -> Tensor:
    """w, and 0 for a token whose w is outside of the limits. IcePop (Ring-1T), arXiv 2510.18855."""
    return limits.drop_outside(log_w_R.exp())


def sequence_masked(log_w_R: Tensor, lengths_S: Tensor, limits: Limits) -> Tensor:
    """One weight per answer, the product of its w, and 0 for an answer outside of the limits. Sequence-level masked
    importance sampling, "When Speed Kills Stability", 2025."""
    return limits.drop_outside(_answer_weight(answer_sums(log_w_R, lengths_S), log_w_R, lengths_S))


def geometric(log_w_R: Tensor, lengths_S: Tensor, limits: Limits) -> Tensor:
    """One weight per answer, the geometric mean of its w, and 0 for an answer outside of the limits."""
    return limits.drop_outside(_answer_weight(answer_means(log_w_R, lengths_S), log_w_R, lengths_S))


@dataclass(frozen=True, slots=True)
class Correction:
    weigh: Callable[[Tensor, Tensor, Limits], Tensor]
    default: Limits  # where --tis-clip-low and --tis-clip are not given


NO_LIMIT = float("inf")
CORRECTIONS: dict[str, Correction] = {
    "tis": Correction(token_tis, Limits(0.0, 2.0)),
    "sequence_tis": Correction(sequence_tis, Limits(0.0, 2.0)),
    "icepop": Correction(icepop, Limits(0.5, 5.0)),
    "masked_is": Correction(icepop, Limits(0.0, 2.0)),
    "sequence_masked_is": Correction(sequence_masked, Limits(0.0, 2.0)),
    "geometric": Correction(geometric, Limits(0.99, 1.01)),
    # w as it is: the ratio is to the trainer's own old policy, the weight leads from it to the engine. Decoupled PPO,
    # arXiv 2110.00641 and 2505.24298.
    "decoupled": Correction(token_tis, Limits(0.0, NO_LIMIT)),
}


def correction_in_use(config: AlgorithmConfig, *, oldest_age: int) -> str | None:
    """The name in `CORRECTIONS`, or None. `auto` is tis as soon as a sample is older than the weights."""
    wanted = config.off_policy_correction
    if config.use_tis:
        return "tis"
    if wanted == "auto":
        wanted = "tis" if oldest_age > 0 and not config.use_rollout_logprobs else "none"
    return None if wanted == "none" else wanted


def correction_weights(
    old_R: Tensor, rollout_R: Tensor, lengths_S: Tensor, *, name: str, config: AlgorithmConfig
) -> dict[str, Tensor]:
    """`tis`: the weight of each token; `tis_abs`: how far its w is from 1; `tis_clipfrac`: 1 where a limit decided."""
    correction = CORRECTIONS[name]
    limits = Limits(
        correction.default.low if config.tis_clip_low is None else config.tis_clip_low,
        correction.default.high if config.tis_clip is None else config.tis_clip,
    )
    log_w_R = log_ratio(old_R.detach(), rollout_R)
    weights_R = correction.weigh(log_w_R, lengths_S, limits)
    free_R = correction.weigh(log_w_R, lengths_S, Limits(0.0, NO_LIMIT))
    return {
        "tis": weights_R,
        "tis_abs": (log_w_R.exp() - 1.0).abs(),
        "tis_clipfrac": (weights_R != free_R).to(weights_R.dtype),
    }


def vetoed(old_R: Tensor, rollout_R: Tensor, lengths_S: Tensor, *, threshold: float) -> Tensor:
    """1 on every token of an answer that has a token with w below the threshold: text of another policy."""
    below_R = (log_ratio(old_R.detach(), rollout_R).exp() < threshold).to(old_R.dtype)
    return on_tokens((answer_sums(below_R, lengths_S) > 0).to(old_R.dtype), lengths_S, len(old_R))


def off_policy_masked(log_ratio_R: Tensor, advantages_R: Tensor, lengths_S: Tensor, *, delta: float) -> Tensor:
    """1 on the tokens with A < 0 of an answer whose mean log(old / new) is above delta. OPSM, arXiv 2512.02556."""
    far_S = answer_means(-log_ratio_R, lengths_S) > delta
    return (on_tokens(far_S, lengths_S, len(log_ratio_R)) & (advantages_R < 0)).to(log_ratio_R.dtype)


def _answer_weight(log_weights_S: Tensor, log_w_R: Tensor, lengths_S: Tensor) -> Tensor:
    return on_tokens(log_weights_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), lengths_S, len(log_w_R))
