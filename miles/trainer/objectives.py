"""What is minimised for each token: the policy-gradient objectives. Pure functions.

All take the log of the ratio r = new / old, whose exponential is finite, and the advantages A, and return the loss per
token with where a clip decided it. R: trained tokens; S: samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.trainer.ratios import answer_means, on_tokens


def clipped_surrogate(
    log_ratio_R: Tensor, advantages_R: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A) and where the clip decided it. arXiv 1707.06347, 2503.14476."""
    ratio_R = log_ratio_R.exp()
    free_R = -ratio_R * advantages_R
    clipped_R = -ratio_R.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages_R
    return torch.maximum(free_R, clipped_R), clipped_R > free_R


def dual_clipped(loss_R: Tensor, clipped_R: Tensor, advantages_R: Tensor, *, bound: float) -> tuple[Tensor, Tensor]:
    """min(loss, -bound A) where A < 0: a bad token that became likely pulls no harder than that. arXiv 1912.09729."""
    limit_R = -bound * advantages_R
    beyond_R = (advantages_R < 0) & (loss_R > limit_R)
    return torch.where(beyond_R, limit_R, loss_R), clipped_R | beyond_R


def answer_log_ratio(log_ratio_R: Tensor, lengths_S: Tensor) -> Tensor:
    """The mean log-ratio of the answer on each of its tokens, with the gradient of the token's own. GSPO,
    arXiv 2507.18071: log s_i + log pi - sg(log pi), whose sum over an answer has the gradient of L_i log s_i.
    """
    means_R = on_tokens(answer_means(log_ratio_R, lengths_S), lengths_S, len(log_ratio_R))
    return means_R + (log_ratio_R - log_ratio_R.detach())


def clipped_weight_surrogate(
    log_ratio_R: Tensor, log_probs_R: Tensor, advantages_R: Tensor, *, eps_high: float
) -> tuple[Tensor, Tensor]:
    """-sg(min(r, 1 + eps_high)) A log pi: a clipped token still learns. CISPO, arXiv 2506.13585 (no lower bound)."""
    ratio_R = log_ratio_R.detach().exp()
    return -ratio_R.clamp(max=1.0 + eps_high) * advantages_R * log_probs_R, ratio_R > 1.0 + eps_high


def soft_gated_surrogate(
    log_ratio_R: Tensor, advantages_R: Tensor, *, tau_positive: float, tau_negative: float
) -> tuple[Tensor, Tensor]:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with tau by the sign of A: slope 1 at r = 1, fading smoothly. SAPO,
    arXiv 2511.20347. Nothing is ever clipped.
    """
    tau_R = torch.where(advantages_R > 0, tau_positive, tau_negative).to(log_ratio_R.dtype)
    gate_R = 4.0 / tau_R * torch.sigmoid(tau_R * (log_ratio_R.exp() - 1.0))
    return -gate_R * advantages_R, torch.zeros_like(advantages_R, dtype=torch.bool)
