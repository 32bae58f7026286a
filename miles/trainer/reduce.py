"""From numbers per token to one number: the weight of each trained token in a mean over the whole optimizer step.

A loss is `sum(weights_R * loss_R)`, whatever the micro-batches are, since every weight is made from counts of the whole
step. R: trained tokens; S: samples.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample_mean_weights(lengths_S: Tensor) -> Tensor:
    """Mean per answer, then mean over the answers: 1 / (tokens of the answer * answers). Float64.

    Answers without a trained token carry no information and are not counted.
    """
    num_samples = int((lengths_S > 0).sum())
    weights_S = 1.0 / (lengths_S.double().clamp(min=1.0) * max(num_samples, 1))
    return weights_S.repeat_interleave(lengths_S)


def token_mean_weights(lengths_S: Tensor) -> Tensor:
    """Mean over all tokens of the step: 1 / tokens (DAPO, arXiv 2503.14476). Float64."""
    num_tokens = int(lengths_S.sum())
    return torch.full((num_tokens,), 1.0 / max(num_tokens, 1), dtype=torch.float64, device=lengths_S.device)


def weighted_sum(values_R: Tensor, weights_R: Tensor) -> float:
    """A metric: the mean that the weights stand for, summed in float64."""
    return float((values_R.double() * weights_R).sum())
