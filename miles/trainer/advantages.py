"""Rewards to one advantage per sample: pure functions in float64, groups by id and of any size.

What every group-relative estimator promises: a reward that is not finite gets 0 and is left out of its group; a group
of one gets 0; a group of equal rewards gets exactly 0, decided by comparing the rewards, since 0.3 minus the rounded
mean of sixteen 0.3 is not 0.

G: answers of a group; S: samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from miles.config.sections import AlgorithmConfig
from miles.errors import TrainError

GROUP_EPS = 1e-6
GroupRule = Callable[[Tensor], Tensor]  # finite rewards of a group, not all equal -> their advantages


def centred(rewards_G: Tensor) -> Tensor:
    """Reward minus group mean. Dr.GRPO, arXiv 2503.20783; REINFORCE++-baseline, arXiv 2501.03262."""
    return rewards_G - rewards_G.mean()


def standardised(rewards_G: Tensor) -> Tensor:
    """(reward - mean) / (std + 1e-6), with the sample standard deviation (n - 1). GRPO, arXiv 2402.03300."""
    return centred(rewards_G) / (rewards_G.std() + GROUP_EPS)


def leave_one_out(rewards_G: Tensor) -> Tensor:
    """Reward minus the mean of the others. RLOO, arXiv 2402.14740."""
    return centred(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1))


def over_mean(rewards_G: Tensor) -> Tensor:
    """(reward - mean) / (mean + 1e-6), for rewards that are not negative. MaxRL, arXiv 2602.02710."""
    if bool((rewards_G < 0).any()):
        raise TrainError(
            f"--advantage-estimator max_rl divides by the mean reward of a group and needs rewards of at least 0; "
            f"a group has {float(rewards_G.min())}"
        )
    return centred(rewards_G) / (rewards_G.mean() + GROUP_EPS)


GROUP_RULES: dict[str, GroupRule] = {
    "grpo": standardised,
    "gspo": standardised,
    "dr_grpo": centred,
    "rloo": leave_one_out,
    "max_rl": over_mean,
    "reinforce_plus_plus_baseline": centred,
}


def group_relative(rewards: Sequence[float], group_ids: Sequence[int], rule: GroupRule) -> Tensor:
    """Apply a rule to every group; see the head of this file for what holds whatever the rule."""
    rewards_S = torch.tensor(rewards, dtype=torch.float64)
    advantages_S = torch.zeros_like(rewards_S)
    members_of: dict[int, list[int]] = defaultdict(list)
    for row, (reward, group_id) in enumerate(zip(rewards, group_ids, strict=True)):
        if math.isfinite(reward):
            members_of[group_id].append(row)
    for members in members_of.values():
        rewards_G = rewards_S[members]
        if not bool((rewards_G == rewards_G[0]).all()):
            advantages_S[members] = rule(rewards_G)
    return advantages_S


def group_rule(config: AlgorithmConfig) -> GroupRule | None:
    """The rule that the flags ask for; None when rewards are taken as they are."""
    if config.disable_rewards_normalization:
        return None
    rule = GROUP_RULES.get(config.advantage_estimator)
    return centred if rule is standardised and config.disable_grpo_std_normalization else rule


def advantages(rewards: Sequence[float], group_ids: Sequence[int], config: AlgorithmConfig) -> Tensor:
    """The advantage of each sample, float64, as the flags ask for it. No reward, no signal: not finite counts as 0.

    ppo and reinforce_plus_plus take the rewards as they are: what they compare with is made per token, in `signal.py`.
    """
    rule = group_rule(config)
    if rule is None:
        return torch.tensor([reward if math.isfinite(reward) else 0.0 for reward in rewards], dtype=torch.float64)
    return group_relative(rewards, group_ids, rule)


def summed_advantages(
    rewards_by_key: Mapping[str, Sequence[float]], group_ids: Sequence[int], config: AlgorithmConfig
) -> Tensor:
    """Each reward made an advantage on its own, then summed, so that none drowns the others. GDPO, arXiv 2601.05242.

    A sample with one reward that is not finite gets 0 and is left out everywhere.
    """
    columns = list(rewards_by_key.values())
    scored = [all(map(math.isfinite, row)) for row in zip(*columns, strict=True)]
    masked = [[r if ok else math.nan for r, ok in zip(column, scored, strict=True)] for column in columns]
    return torch.stack([advantages(column, group_ids, config) for column in masked]).sum(0)


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """0 up to `max_length - buffer` tokens, then falling linearly to -1 at `max_length`. DAPO, arXiv 2503.14476."""
    free = max_length - buffer
    return max(min((free - length) / buffer, 0.0), -1.0)
