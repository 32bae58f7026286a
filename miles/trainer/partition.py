"""Distributions of which only the n most likely tokens are known: n ids and one rest that holds all others.

The coarse distribution over these n + 1 outcomes has exact expectations and divergences of its own, so nothing is
renormalised and nothing is dropped. R: trained tokens; K: known ids of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MIN_REST = 1e-6  # a rest below this is not told from rounding
MAX_REST_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class TopLogProbs:
    """Ids and log-probs of some tokens at each place, as the engine or a teacher sees them."""

    ids_RK: Tensor
    log_probs_RK: Tensor

    def __getitem__(self, places_R: Tensor | slice) -> TopLogProbs:
        return TopLogProbs(self.ids_RK[places_R], self.log_probs_RK[places_R])


def rest_of(log_probs_RK: Tensor) -> Tensor:
    """Probability of everything that is not listed."""
    return (1.0 - log_probs_RK.exp().sum(-1)).clamp(min=0.0)


def coarse_kl(log_probs_RK: Tensor, base_RK: Tensor) -> Tensor:
    """KL(policy || base) over the listed ids and the rest: at least 0, at most the KL over the whole vocabulary."""
    listed_R = (log_probs_RK.exp() * (log_probs_RK - base_RK)).sum(-1)
    rest_R, base_rest_R = rest_of(log_probs_RK), rest_of(base_RK)
    return listed_R + rest_R * (rest_R.clamp(min=MIN_REST).log() - base_rest_R.clamp(min=MIN_REST).log())


def expected_score(log_probs_RK: Tensor, sampler_RK: Tensor) -> Tensor:
    """A number of value 0 whose gradient is the sampler's mean of the policy's score, grad log pi, over the listed ids
    and the rest. Where the sampler is the policy that mean is 0, and so is this gradient."""
    rest_R = rest_of(log_probs_RK)
    rest_ratio_R = (rest_of(sampler_RK) / rest_R.clamp(min=MIN_REST)).clamp(max=MAX_REST_RATIO).detach()
    mean_R = (sampler_RK.exp() * log_probs_RK).sum(-1) + rest_ratio_R * rest_R
    return mean_R - mean_R.detach()
