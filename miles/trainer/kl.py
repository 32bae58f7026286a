"""Estimates of a KL divergence from tokens that the policy drew. Pure functions. R: trained tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from miles.trainer.ratios import LOG_RATIO_LIMIT

LOW_VAR_KL_LIMIT = 10.0


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
