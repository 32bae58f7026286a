from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.config.sections import AlgorithmConfig
from miles.errors import TrainError
from miles.trainer.advantages import GROUP_RULES, advantages, overlong_penalty, summed_advantages


def estimate(rewards: list[float], groups: list[int] | None = None, estimator: str = "grpo", **flags) -> list[float]:
    config = AlgorithmConfig(advantage_estimator=estimator, **flags)
    return advantages(rewards, groups or [7] * len(rewards), config).tolist()


# Each estimator by its definition, for one group of finite rewards that are not all equal.
DEFINITIONS = {
    "grpo": lambda r, i: (r[i] - statistics.fmean(r)) / (statistics.stdev(r) + 1e-6),
    "gspo": lambda r, i: (r[i] - statistics.fmean(r)) / (statistics.stdev(r) + 1e-6),
    "dr_grpo": lambda r, i: r[i] - statistics.fmean(r),
    "reinforce_plus_plus_baseline": lambda r, i: r[i] - statistics.fmean(r),
    "rloo": lambda r, i: r[i] - statistics.fmean(r[:i] + r[i + 1 :]),
    "max_rl": lambda r, i: (r[i] - statistics.fmean(r)) / (statistics.fmean(r) + 1e-6),
}
GROUP_RELATIVE = sorted(GROUP_RULES)


def test_every_group_rule_has_a_definition() -> None:
    assert set(DEFINITIONS) == set(GROUP_RULES)


@pytest.mark.parametrize(
    ("estimator", "rewards", "expected"),
    [
        ("grpo", [1.0, 0.0], [0.707106, -0.707106]),
        ("grpo", [1.0, 0.0, 0.0, 1.0], [0.866024, -0.866024, -0.866024, 0.866024]),
        ("grpo", [1.0, 0.0, 0.0, 0.0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ("dr_grpo", [1.0, 0.0], [0.5, -0.5]),
        ("rloo", [1.0, 0.0, 0.0, 1.0], [0.666667, -0.666667, -0.666667, 0.666667]),
        ("rloo", [1.0, 0.0, 0.0, 0.0], [1.0, -0.333333, -0.333333, -0.333333]),
        ("max_rl", [1.0, 0.0, 0.0, 0.0], [2.999988, -0.999996, -0.999996, -0.999996]),
    ],
)
def test_worked_vectors(estimator: str, rewards: list[float], expected: list[float]) -> None:
    assert estimate(rewards, estimator=estimator) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", GROUP_RELATIVE)
@pytest.mark.parametrize("rewards", [[0.3] * 16, [0.95] * 7, [1e9] * 3, [0.1] * 5, [0.0] * 2])
def test_equal_rewards_give_exactly_zero(estimator: str, rewards: list[float]) -> None:
    assert estimate(rewards, estimator=estimator) == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", GROUP_RELATIVE)
def test_field_note_13_one_zero_among_seven_equal_rewards_is_bounded(estimator: str) -> None:
    rewards = [0.0] + [0.95] * 7
    result = estimate(rewards, estimator=estimator)
    assert result == pytest.approx([DEFINITIONS[estimator](rewards, i) for i in range(8)], rel=1e-12)
    assert max(map(abs, result)) < math.sqrt(7)
    assert estimate([0.95] * 7, estimator=estimator) == [0.0] * 7


@pytest.mark.parametrize("estimator", GROUP_RELATIVE)
def test_field_note_14_a_reward_of_nan_is_left_out_and_a_group_of_one_gets_zero(estimator: str) -> None:
    result = estimate([1.0, math.nan, 3.0, 5.0], [0, 0, 0, 1], estimator)
    without = estimate([1.0, 3.0], [0, 0], estimator)
    assert result == [without[0], 0.0, without[1], 0.0]
    assert without[1] > 0.0 > without[0]
    assert estimate([math.nan, 2.0], [0, 0], estimator) == [0.0, 0.0]
    assert estimate([math.inf, 2.0, 2.0], [0, 0, 0], estimator) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", GROUP_RELATIVE)
def test_groups_go_by_id_not_by_place_and_may_have_any_size(estimator: str) -> None:
    rewards, groups = [1.0, 0.0, 5.0, 0.0, 9.0], [3, 8, 3, 8, 8]
    result = estimate(rewards, groups, estimator)
    assert [result[0], result[2]] == estimate([1.0, 5.0], estimator=estimator)
    assert [result[1], result[3], result[4]] == estimate([0.0, 0.0, 9.0], estimator=estimator)


@pytest.mark.parametrize("estimator", GROUP_RELATIVE)
@given(rows=st.lists(st.tuples(st.floats(0, 1e6, width=32), st.integers(0, 4)), max_size=30))
def test_against_the_definition(estimator: str, rows: list[tuple[float, int]]) -> None:
    rewards, groups = [reward for reward, _ in rows], [group for _, group in rows]
    result = estimate(rewards, groups, estimator)
    for i, (_, group) in enumerate(rows):
        members = [j for j, (_, other) in enumerate(rows) if other == group]
        siblings = [rewards[j] for j in members]
        if len(set(siblings)) == 1:
            assert result[i] == 0.0
        else:
            expected = DEFINITIONS[estimator](siblings, members.index(i))
            assert result[i] == pytest.approx(expected, rel=1e-6, abs=1e-6 * max(1.0, *siblings))


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_estimators_without_groups_take_the_rewards_as_they_are(estimator: str) -> None:
    assert estimate([1.0, 0.5, math.nan], [0, 0, 0], estimator) == [1.0, 0.5, 0.0]


def test_max_rl_refuses_negative_rewards() -> None:
    with pytest.raises(TrainError, match="max_rl .* a group has -0.5"):
        estimate([1.0, -0.5], estimator="max_rl")


def test_flags_switch_the_parts_off() -> None:
    rewards = [1.0, 0.0, math.nan]
    assert estimate(rewards, disable_grpo_std_normalization=True) == [0.5, -0.5, 0.0]
    assert estimate(rewards, disable_rewards_normalization=True) == [1.0, 0.0, 0.0]
    rloo = estimate(rewards, estimator="rloo", disable_grpo_std_normalization=True)
    assert rloo == estimate(rewards, estimator="rloo")


def test_several_rewards_are_normalised_alone_and_summed() -> None:
    """GDPO: a reward of a thousand times the size counts no more than the other."""
    small, large, groups = [0.0, 1.0, 1.0, 0.0], [3000.0, 0.0, 1000.0, 1000.0], [0] * 4
    result = summed_advantages({"a": small, "b": large}, groups, AlgorithmConfig()).tolist()
    assert result == pytest.approx([a + b for a, b in zip(estimate(small), estimate(large), strict=True)])
    scaled = summed_advantages({"a": small, "b": [r / 1000 for r in large]}, groups, AlgorithmConfig())
    assert scaled.tolist() == pytest.approx(result, abs=1e-5)


def test_a_sample_with_one_missing_reward_is_left_out_of_all() -> None:
    by_key = {"a": [0.0, 1.0, 5.0], "b": [1.0, 1.0, math.nan]}
    result = summed_advantages(by_key, [0, 0, 0], AlgorithmConfig()).tolist()
    assert result == [*estimate([0.0, 1.0]), 0.0]


def test_overlong_penalty() -> None:
    """The worked values of DAPO's equation 13 for a limit of 20 and a buffer of 8."""
    penalty = [overlong_penalty(n, max_length=20, buffer=8) for n in (1, 12, 13, 16, 20, 25)]
    assert penalty == [0.0, 0.0, -0.125, -0.5, -1.0, -1.0]


def test_advantages_are_float64() -> None:
    assert advantages([1.0, 0.0], [0, 0], AlgorithmConfig()).dtype == torch.float64
