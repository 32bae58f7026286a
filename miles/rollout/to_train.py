"""From scored samples to what the trainer sees: the only converter."""

from __future__ import annotations

from collections.abc import Iterable

from miles.rollout.reward_value import reward_value, reward_values
from miles.types import PER_TOKEN, Sample, SampleStatus, TrainSample


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
        tokens=sample.tokens,
        response_length=sample.response_length,
        loss_mask=[0] * sample.response_length if sample.remove_sample else mask,
        reward=reward,
        raw_reward=reward,
        group_index=sample.group_index,
        index=sample.index,
        rollout_log_probs=sample.rollout_log_probs,
        weight_versions=sample.weight_versions,
        truncated=sample.status is SampleStatus.TRUNCATED,
        kept_token_ids=sample.kept_token_ids,
        top_token_ids=sample.top_token_ids,
        top_log_probs=sample.top_log_probs,
        rewards=reward_values(sample),
    )
