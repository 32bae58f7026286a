"""The `rollout/...` numbers that come from the samples alone."""

from __future__ import annotations

import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

from miles.rollout.reward_value import reward_value
from miles.types import Sample, SampleStatus

REPETITION_CHARS = 10_000
REPETITION_RATIO = 10


def rollout_metrics(groups: Sequence[Sequence[Sample]], *, reward_key: str | None = None) -> dict[str, float]:
    """Lengths, groups without a signal, truncation, repetition, weight versions and prefix hits of a rollout.

    A length is the number of trainable tokens. A weight version is the oldest of an answer.
    """
    samples = [sample for group in groups for sample in group]
    assert samples, "a rollout without a sample has no metrics"
    return {
        **summary("rollout/response_len", [trainable_tokens(sample) for sample in samples]),
        **_zero_std(groups, reward_key),
        "rollout/repetition_frac": mean(has_repetition(sample.response) for sample in samples),
        "rollout/truncated_ratio": mean(sample.status is SampleStatus.TRUNCATED for sample in samples),
        **_weight_versions(samples),
        **_prefix_hits(samples),
        "rollout/duplicate_ratio": _duplicate_ratio(groups),
    }


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}/mean": mean(values),
        f"{name}/median": float(statistics.median(values)),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def mean(values: Iterable[float]) -> float:
    """Mean as a float, also of booleans."""
    return float(statistics.fmean(values))


def has_repetition(text: str) -> bool:
    """A long answer whose end compresses more than tenfold says the same over and over."""
    if len(text) <= REPETITION_CHARS:
        return False
    tail = text[-REPETITION_CHARS:].encode()
    return len(tail) / len(zlib.compress(tail)) > REPETITION_RATIO


def trainable_tokens(sample: Sample) -> int:
    return sum(sample.loss_mask) if sample.loss_mask is not None else sample.response_length


def _zero_std(groups: Sequence[Sequence[Sample]], reward_key: str | None) -> dict[str, float]:
    """Groups whose rewards are all exactly equal teach nothing; they are counted by that reward, to one digit."""
    rewards = [[reward_value(sample, reward_key) for sample in group] for group in groups]
    equal = [group[0] for group in rewards if all(reward == group[0] for reward in group)]
    counts = Counter(f"rollout/zero_std/count_{round(reward, 1)}" for reward in equal)
    return {
        **{name: float(count) for name, count in sorted(counts.items())},
        "rollout/zero_std/all_zero_percentage": sum(reward == 0 for reward in equal) / len(rewards),
        "rollout/zero_std/all_one_percentage": sum(reward == 1 for reward in equal) / len(rewards),
    }


def _weight_versions(samples: Sequence[Sample]) -> dict[str, float]:
    versions = [sample.weight_versions for sample in samples if sample.weight_versions]
    if not versions:
        return {}
    return {
        **summary("rollout/weight_version", [min(of_sample) for of_sample in versions]),
        "rollout/weight_version/mixed_version_ratio": mean(len(set(of_sample)) > 1 for of_sample in versions),
    }


def _prefix_hits(samples: Sequence[Sample]) -> dict[str, float]:
    num_cached = sum(sample.cached_tokens for sample in samples)
    return {
        "rollout/prefix_cache_hit_rate": num_cached / max(1, sum(sample.prompt_length for sample in samples)),
        "rollout/avg_cached_tokens_per_sample": num_cached / len(samples),
    }


def _duplicate_ratio(groups: Sequence[Sequence[Sample]]) -> float:
    num_samples = sum(len(group) for group in groups)
    num_distinct = sum(len({tuple(s.tokens[s.prompt_length :]) for s in group}) for group in groups)
    return (num_samples - num_distinct) / num_samples
