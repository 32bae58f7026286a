"""What a reward may be, and the number in it."""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

from miles.errors import RewardError
from miles.types import RAW_ACCURACY, Sample


def plain(value: Any) -> Any:
    """An array or one of its entries, of any library, as a list or a number; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def checked_reward(reward: Any, *, reward_key: str | None, source: str, who: str) -> float | dict[str, Any]:
    """A reward as a plain number, or as a dict whose field `reward_key` is one. Raises `RewardError`, which names the
    `source` of the reward and the sample `who` got it."""
    if not isinstance(reward, dict):
        if reward_key is not None:
            raise RewardError(f"{source} returned {reward!r:.60} for {who}; --reward-key {reward_key} asks for a dict")
        return checked_number(reward, source=source, who=who)
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
    fields = {str(field): plain(value) for field, value in reward.items()}
    for field in {reward_key, "acc"}.intersection(fields):
        fields[field] = checked_number(fields[field], source=source, who=f"{who}, field {field!r}")
    return fields


def checked_number(value: Any, *, source: str, who: str) -> float:
    """As int (for int and bool, where a float holds it exactly) or float, so that numpy and torch scalars do not travel
    on, and that it can be stored."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several numbers, for example
        number = math.nan
    if not math.isfinite(number):
        given = str(value) if value is None or isinstance(value, float) else f"the {type(value).__name__} {value!r:.60}"
        raise RewardError(f"{source} returned {given} for {who}; expected a finite number")
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
