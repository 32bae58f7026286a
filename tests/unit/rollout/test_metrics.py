from __future__ import annotations

import pytest

from miles.observe import names
from miles.rollout.metrics import has_repetition, rollout_metrics
from miles.types import Sample, SampleStatus


def sample(reward: float, *, length: int = 2, masked: int = 0, **changes: object) -> Sample:
    made = Sample(
        tokens=[7] * 10 + list(range(length)),
        response_length=length,
        reward=reward,
        loss_mask=[0] * masked + [1] * (length - masked),
        weight_versions=[1] * length,
        status=SampleStatus.COMPLETED,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_lengths_count_trainable_tokens() -> None:
    metrics = rollout_metrics([[sample(0, length=5, masked=2), sample(1, length=8), sample(1, length=1)]])
    assert [metrics[f"rollout/response_len/{kind}"] for kind in ("mean", "median", "max", "min")] == [4, 3, 8, 1]


@pytest.mark.parametrize(("zero", "one"), [(0, 1), (0.0, 1.0)])
def test_groups_without_a_signal_are_counted_for_ints_and_floats(zero: float, one: float) -> None:
    groups = [[sample(zero)] * 2, [sample(zero)] * 2, [sample(one)] * 2, [sample(zero), sample(one)]]
    metrics = rollout_metrics(groups)
    assert metrics[f"rollout/zero_std/count_{zero}"] == 2
    assert metrics[f"rollout/zero_std/count_{one}"] == 1
    assert metrics["rollout/zero_std/all_zero_percentage"] == 0.5
    assert metrics["rollout/zero_std/all_one_percentage"] == 0.25


def test_equal_fractional_rewards_count_under_one_digit() -> None:
    metrics = rollout_metrics([[sample(0.25)] * 3, [sample(0.25), sample(0.250001)]])
    assert {name: value for name, value in metrics.items() if "count_" in name} == {"rollout/zero_std/count_0.2": 1}


def test_truncation_versions_cache_hits_and_duplicates() -> None:
    first = sample(0, status=SampleStatus.TRUNCATED, weight_versions=[1, 2], cached_tokens=8)
    second = sample(1, weight_versions=[3, 3])
    metrics = rollout_metrics([[first, second], [sample(1, length=3)]])
    assert metrics["rollout/truncated_ratio"] == pytest.approx(1 / 3)
    assert metrics["rollout/weight_version/min"] == 1 and metrics["rollout/weight_version/max"] == 3
    assert metrics["rollout/weight_version/mixed_version_ratio"] == pytest.approx(1 / 3)
    assert metrics["rollout/prefix_cache_hit_rate"] == 8 / 30
    assert metrics["rollout/avg_cached_tokens_per_sample"] == 8 / 3
    assert metrics["rollout/duplicate_ratio"] == pytest.approx(1 / 3)


def test_repetition_is_seen_at_the_end_of_long_answers_only() -> None:
    varied = "".join(str(i * i) for i in range(4000))
    assert has_repetition("again and again " * 700)
    assert has_repetition(varied[:5000] + "x" * 10_000)
    assert not has_repetition("again and again " * 600)
    assert not has_repetition(varied)


def test_every_metric_has_a_unit_and_a_meaning() -> None:
    for name in rollout_metrics([[sample(0.3), sample(0.3)], [sample(1), sample(0)]]):
        names.describe(name)
