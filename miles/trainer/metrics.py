"""What the trainer reports: `train/...` of an optimizer step and `rollout/...` of all its samples.

Values per token are reduced by the weights of `reduce.py`. R: trained tokens; S: samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from miles.trainer.batch import TokenBatch
from miles.trainer.kl import kl_estimate
from miles.trainer.ratios import answer_sums, effective_sample_share
from miles.trainer.reduce import sample_mean_weights, weighted_sum

LOSS_NAMES = ("loss", "pg_loss", "value_loss")  # reported as they are minimised


def loss_metrics(values: Mapping[str, Tensor], weights_R: Tensor, batch: TokenBatch) -> dict[str, float]:
    """Means of what the loss function returned, and of the ratio to the old policy where it has one."""
    # What multiplies a loss is averaged as a share of tokens, not by the weights that make a sum out of a mean.
    share_R = weights_R / weights_R.sum()
    metrics = {
        f"train/{name}": weighted_sum(value_R, weights_R if name in LOSS_NAMES else share_R)
        for name, value_R in values.items()
    }
    if "ppo_kl" in values:
        ratio_R = (-values["ppo_kl"]).exp()
        metrics |= {
            "train/ois": weighted_sum(ratio_R, share_R),
            "train/ratio_min": float(ratio_R.min()),
            "train/ratio_max": float(ratio_R.max()),
            "train/ess_ratio": float(effective_sample_share(ratio_R, batch.lengths_S)),
        }
    if "tis" in values:
        metrics["train/tis_ess"] = float(effective_sample_share(values["tis"], batch.lengths_S))
    return metrics


def gap_metrics(log_probs_R: Tensor, rollout_log_probs_R: Tensor, weights_R: Tensor) -> dict[str, float]:
    """Distance between what the trainer and what the engine say of the same tokens."""
    gap_R = (log_probs_R - rollout_log_probs_R).abs()
    weights_R = weights_R / weights_R.sum()
    rank = math.ceil(0.99 * len(gap_R))
    return {
        "train/train_rollout_logprob_abs_diff": weighted_sum(gap_R, weights_R),
        "train/train_rollout_logprob_abs_diff_p99": float(gap_R.kthvalue(rank).values),
        "train/train_rollout_logprob_abs_diff_max": float(gap_R.max()),
        "train/train_rollout_kl": weighted_sum(kl_estimate(rollout_log_probs_R, log_probs_R, "low_var_kl"), weights_R),
    }


def sample_metrics(batch: TokenBatch) -> dict[str, float]:
    """Means over the samples: lengths, rewards as graded, share that met a length limit."""
    samples = batch.samples
    return {
        "rollout/response_lengths": _mean(sample.response_length for sample in samples),
        "rollout/total_lengths": _mean(len(sample.tokens) for sample in samples),
        "rollout/raw_reward": _mean(s.raw_reward for s in samples if math.isfinite(s.raw_reward)),
        "rollout/num_unscored": float(sum(not math.isfinite(sample.reward) for sample in samples)),
        "rollout/truncated": _mean(float(sample.truncated) for sample in samples),
    }


def group_metrics(batch: TokenBatch, advantages_R: Tensor) -> dict[str, float]:
    """Share of the groups, and of the answers, that have no token with an advantage: they teach nothing."""
    signal_S = (answer_sums(advantages_R.abs(), batch.lengths_S) > 0).tolist()
    groups: dict[int, bool] = {}
    for sample, has_signal in zip(batch.samples, signal_S, strict=True):
        groups[sample.group_index] = groups.get(sample.group_index, False) or has_signal
    return {
        "rollout/no_signal_group_ratio": _mean(float(not has_signal) for has_signal in groups.values()),
        "rollout/no_signal_ratio": _mean(float(not has_signal) for has_signal in signal_S),
    }


def token_metrics(batch: TokenBatch, values: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Means over the trained tokens of an answer, then over the answers; those without a trained token do not count."""
    weights_R = sample_mean_weights(batch.lengths_S)
    return {f"rollout/{name}": weighted_sum(v, weights_R) for name, v in values.items() if v is not None}


def _mean(numbers: Iterable[float]) -> float:
    listed = list(numbers)
    return math.fsum(listed) / len(listed) if listed else 0.0
