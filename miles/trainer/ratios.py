"""How far the policy has moved from the one that a token is judged against. Pure functions.

R: trained tokens; S: samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8: far beyond any clip range, far inside float32


def log_ratio(log_probs_R: Tensor, old_log_probs_R: Tensor) -> Tensor:
    """log(new / old) of each token, kept within +-20 so that its exponential is finite."""
    return (log_probs_R - old_log_probs_R).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def answer_sums(values_R: Tensor, lengths_S: Tensor) -> Tensor:
    """Sum over the tokens of each answer, without a gradient; the same bits on every repeat, on a GPU too."""
    if len(lengths_S) == 0:
        return values_R.new_zeros(0)
    # On a GPU the check of the lengths would wait for it.
    return torch.segment_reduce(values_R.detach(), "sum", lengths=lengths_S, initial=0.0, unsafe=values_R.is_cuda)


def on_tokens(values_S: Tensor, lengths_S: Tensor, num_tokens: int) -> Tensor:
    """The number of each answer on all of its tokens. Told how many there are, nothing waits for a GPU."""
    return values_S.repeat_interleave(lengths_S, output_size=num_tokens)


def answer_means(values_R: Tensor, lengths_S: Tensor) -> Tensor:
    """Mean over the tokens of each answer, without a gradient; 0 for an answer without trained tokens."""
    return answer_sums(values_R, lengths_S) / lengths_S.clamp(min=1)


def effective_sample_share(ratio_R: Tensor, lengths_S: Tensor) -> Tensor:
    """Mean over the samples of (sum w)^2 / (n sum w^2) of their n token ratios: 1 when all ratios are equal.

    Samples without trained tokens are left out; so is one whose ratios are all 0.
    """
    sums_S, squares_S = answer_sums(ratio_R, lengths_S), answer_sums(ratio_R.square(), lengths_S)
    kept = squares_S > 0
    shares = sums_S[kept].square() / (lengths_S[kept] * squares_S[kept])
    return shares.sum() / kept.sum().clamp(min=1)
