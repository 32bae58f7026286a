"""Rewards to advantages: pure functions in float64, one number per sample, groups by id and of any size."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from miles.config.sections import AlgorithmConfig

GROUP_STD_EPS = 1e-6


def grpo_advantages(rewards: Sequence[float], group_ids: Sequence[int], *, divide_by_std: bool = True) -> Tensor:
    """(reward - group mean) / (group std + 1e-6), with the sample standard deviation (n - 1). arXiv 2402.03300.

    Rewards that are not finite get 0 and are left out of their group. A group of one gets 0. A group of equal rewards
    gets exactly 0: decided by comparing the rewards, since 0.3 minus the rounded mean of sixteen 0.3 is not 0.
    """
    rewards_S = torch.tensor(rewards, dtype=torch.float64)
    advantages_S = torch.zeros_like(rewards_S)
    members_of: dict[int, list[int]] = defaultdict(list)
    for row, (reward, group_id) in enumerate(zip(rewards, group_ids, strict=True)):
        if math.isfinite(reward):
            members_of[group_id].append(row)
    for members in members_of.values():
        rewards_G = rewards_S[members]
        if bool((rewards_G == rewards_G[0]).all()):
            continue
        centred_G = rewards_G - rewards_G.mean()
        advantages_S[members] = centred_G / (rewards_G.std() + GROUP_STD_EPS) if divide_by_std else centred_G
    return advantages_S


def advantages(rewards: Sequence[float], group_ids: Sequence[int], config: AlgorithmConfig) -> Tensor:
    """The advantage of each sample, float64, as the flags ask for it. No reward, no signal: not finite counts as 0."""
    if config.disable_rewards_normalization:
        return torch.tensor([reward if math.isfinite(reward) else 0.0 for reward in rewards], dtype=torch.float64)
    return grpo_advantages(rewards, group_ids, divide_by_std=not config.disable_grpo_std_normalization)
