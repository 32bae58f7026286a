"""From graded samples to one advantage each: shaping, several rewards, the estimator of the flags."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from miles.config.sections import RunConfig
from miles.errors import TrainError
from miles.trainer.advantages import advantages, overlong_penalty, summed_advantages
from miles.types import TrainSample


def shaped_rewards(samples: Sequence[TrainSample], config: RunConfig) -> list[float]:
    """The rewards that advantages come from: as graded, minus the penalty for answers near the length limit."""
    buffer = config.algorithm.overlong_buffer_len
    if buffer is None:
        return [sample.reward for sample in samples]
    longest, factor = config.rollout.rollout_max_response_len, config.algorithm.overlong_penalty_factor
    return [s.reward + factor * overlong_penalty(s.response_length, max_length=longest, buffer=buffer) for s in samples]


def sample_advantages(samples: Sequence[TrainSample], config: RunConfig) -> tuple[Tensor, Tensor]:
    """The advantage of each sample, float64, and whether it has a reward at all. Rows of one answer with one reward
    count once in their group. Raises `TrainError` when a field of `--reward-keys` is missing."""
    outcomes = {(s.group_index, s.index, s.reward): row for row, s in enumerate(samples)}
    if len(outcomes) < len(samples):
        advantages_A, scored_A = sample_advantages([samples[row] for row in outcomes.values()], config)
        place = {key: number for number, key in enumerate(outcomes)}
        answers_S = [place[s.group_index, s.index, s.reward] for s in samples]
        return advantages_A[answers_S], scored_A[answers_S]
    group_ids = [sample.group_index for sample in samples]
    by_key = {key: [_field(sample, key) for sample in samples] for key in config.reward.reward_keys}
    if by_key:
        advantages_S = summed_advantages(by_key, group_ids, config.algorithm)
    else:
        by_key = {"reward": shaped_rewards(samples, config)}
        advantages_S = advantages(by_key["reward"], group_ids, config.algorithm)
    scored = [all(map(math.isfinite, rewards)) for rewards in zip(*by_key.values(), strict=True)]
    return advantages_S, torch.tensor(scored, dtype=torch.bool)


def _field(sample: TrainSample, key: str) -> float:
    if sample.rewards is None or key not in sample.rewards:
        has = "is not a dict" if sample.rewards is None else f"has {', '.join(sample.rewards) or 'no number'}"
        raise TrainError(f"--reward-keys: the reward of sample {sample.index} has no number {key!r}; it {has}")
    return sample.rewards[key]
