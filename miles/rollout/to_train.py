"""From scored samples to what the trainer sees: the only converter."""

from __future__ import annotations

from collections.abc import Iterable

from miles.rollout.reward_value import reward_value, reward_values
from miles.types import PER_TOKEN, Sample, SampleStatus, TrainSample

# What a trainer takes as it is.
_SAME = ("tokens", "response_length", "group_index", "index", *(name for name in PER_TOKEN if name != "loss_mask"))


def to_train_samples(groups: Iterable[Iterable[Sample]], *, reward_key: str | None = None) -> list[TrainSample]:
    """One `TrainSample` per answer, in the order of the groups. A removed sample keeps its place, masked out."""
    return [_to_train(sample, reward_key) for group in groups for sample in group]


def _to_train(sample: Sample, reward_key: str | None) -> TrainSample:
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    for name in PER_TOKEN:
        values = getattr(sample, name)
        fits = values is None or len(values) == sample.response_length
        assert fits, f"sample {sample.index}: {name} has another length"
    reward = float(reward_value(sample, reward_key))
    return TrainSample(
        **{name: getattr(sample, name) for name in _SAME},
        loss_mask=[0] * sample.response_length if sample.remove_sample else mask,
        reward=reward,
        raw_reward=reward,
        truncated=sample.status is SampleStatus.TRUNCATED,
        rewards=reward_values(sample),
    )
