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


def effective_sample_share(ratio_R: Tensor, sample_R: Tensor, lengths_S: Tensor) -> Tensor:
    """Mean over the samples of (sum w)^2 / (n sum w^2) of their n token ratios: 1 when all ratios are equal.

    Samples without trained tokens are left out.
    """
    sums_S = torch.zeros(len(lengths_S), dtype=ratio_R.dtype, device=ratio_R.device).index_add_(0, sample_R, ratio_R)
    squares_S = torch.zeros_like(sums_S).index_add_(0, sample_R, ratio_R.square())
    kept = lengths_S > 0
    return (sums_S[kept].square() / (lengths_S[kept] * squares_S[kept])).mean()
