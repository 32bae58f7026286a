"""What a reward may be, and the number in it."""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

from miles.errors import RewardError
from miles.types import Sample

RAW_ACCURACY = "raw_accuracy"  # where the metadata of a sample keeps the first part of a weighted sum


def problem_of(value: Any) -> str | None:
    """What is wrong with one number from a reward; None when it is a finite number."""
    if not isinstance(value, SupportsFloat):
        return "None" if value is None else f"the {type(value).__name__} {value!r:.60}"
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several numbers, for example
        return f"the {type(value).__name__} {value!r:.60}"
    return None if math.isfinite(number) else str(number)


def checked_reward(reward: Any, *, reward_key: str | None, source: str, who: str) -> float | dict[str, Any]:
    """A reward as a plain number, or as a dict whose field `reward_key` is one. Raises `RewardError`, which names the
    `source` of the reward and the sample `who` got it."""
    if not isinstance(reward, dict):
        if reward_key is not None:
            raise RewardError(f"{source} returned {reward!r:.60} for {who}; --reward-key {reward_key} asks for a dict")
        return _plain_number(reward, source=source, who=who)
    if reward_key is None:
        raise RewardError(
            f"{source} returned a dict for {who}; say with --reward-key which of {', '.join(map(str, reward))} is "
            "the reward"
        )
    if reward_key not in reward:
        raise RewardError(
            f"{source} returned a dict without {reward_key!r} (--reward-key) for {who}; it has "
            f"{', '.join(map(str, reward)) or 'nothing'}"
        )
    number = _plain_number(reward[reward_key], source=source, who=f"{who}, field {reward_key!r}")
    return {**reward, reward_key: number}


def _plain_number(value: Any, *, source: str, who: str) -> float:
    """As int (for int and bool, where a float holds it exactly) or float, so that numpy and torch scalars do not travel
    on, and that it can be stored."""
    problem = problem_of(value)
    if problem is not None:
        raise RewardError(f"{source} returned {problem} for {who}; expected a finite number")
    return int(value) if isinstance(value, int) and abs(value) <= 2**53 else float(value)


def reward_value(sample: Sample, reward_key: str | None) -> float:
    """The number of a scored sample: the reward itself, or its field `reward_key` when it is a dict."""
    reward = sample.reward[reward_key] if isinstance(sample.reward, dict) and reward_key else sample.reward
    assert isinstance(reward, (int, float)), f"sample {sample.index} has not been scored"
    return reward


def take_outcome(sample: Sample, last: Sample) -> None:
    """Give a row of an answer the reward of the answer's last row."""
    sample.reward, sample.status = last.reward, last.status if last.reward is None else sample.status
    if RAW_ACCURACY in last.metadata:
        sample.metadata[RAW_ACCURACY] = last.metadata[RAW_ACCURACY]


def reward_values(sample: Sample) -> dict[str, float] | None:
    """The numbers of a dict reward by field; None when the reward is no dict."""
    if not isinstance(sample.reward, dict):
        return None
    return {key: float(value) for key, value in sample.reward.items() if isinstance(value, (int, float))}


def raw_accuracy(sample: Sample, reward_key: str | None) -> float:
    """How right an answer is, before its reward was shaped: the first part of a weighted sum, `acc` of a dict, else
    the reward."""
    if RAW_ACCURACY in sample.metadata:
        return float(sample.metadata[RAW_ACCURACY])
    if isinstance(sample.reward, dict) and "acc" in sample.reward:
        return float(sample.reward["acc"])
    return float(reward_value(sample, reward_key))
