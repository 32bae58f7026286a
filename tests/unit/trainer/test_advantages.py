from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.config.sections import AlgorithmConfig
from miles.trainer.advantages import advantages, group_relative, standardised


def grpo(rewards: list[float], group_ids: list[int]) -> torch.Tensor:
    return group_relative(rewards, group_ids, standardised)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], [0.707106, -0.707106]),
        ([1.0, 0.0, 0.0, 1.0], [0.866024, -0.866024, -0.866024, 0.866024]),
        ([1.0, 0.0, 0.0, 0.0], [1.499997, -0.499999, -0.499999, -0.499999]),
    ],
)
def test_worked_vectors(rewards: list[float], expected: list[float]) -> None:
    assert grpo(rewards, [7] * len(rewards)).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rewards", [[0.3] * 16, [0.95] * 7, [1e9] * 3, [-0.1] * 5, [0.0] * 2])
def test_equal_rewards_give_exactly_zero(rewards: list[float]) -> None:
    assert grpo(rewards, [0] * len(rewards)).tolist() == [0.0] * len(rewards)


def test_field_note_13_one_zero_among_seven_equal_rewards_is_bounded() -> None:
    rewards = [0.0] + [0.95] * 7
    result = grpo(rewards, [0] * 8).tolist()
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    assert result == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards], rel=1e-12)
    assert max(map(abs, result)) < math.sqrt(7)
    assert grpo([0.95] * 7, [0] * 7).tolist() == [0.0] * 7


def test_field_note_14_a_reward_of_nan_is_left_out_and_a_group_of_one_gets_zero() -> None:
    result = grpo([1.0, math.nan, 3.0, 5.0], [0, 0, 0, 1]).tolist()
    assert result == pytest.approx([-0.7071063, 0.0, 0.7071063, 0.0], abs=1e-6)
    assert result[1] == result[3] == 0.0
    assert grpo([math.nan, 2.0], [0, 0]).tolist() == [0.0, 0.0]
    assert grpo([math.inf, 2.0, 2.0], [0, 0, 0]).tolist() == [0.0, 0.0, 0.0]


def test_groups_go_by_id_not_by_place() -> None:
    rewards, groups = [1.0, 0.0, 5.0, 0.0, 9.0], [3, 8, 3, 8, 8]
    result = grpo(rewards, groups).tolist()
    assert [result[0], result[2]] == grpo([1.0, 5.0], [0, 0]).tolist()
    assert [result[1], result[3], result[4]] == grpo([0.0, 0.0, 9.0], [0, 0, 0]).tolist()


@given(st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(0, 4)), max_size=30))
def test_against_the_statistics_module(rows: list[tuple[float, int]]) -> None:
    rewards, groups = [reward for reward, _ in rows], [group for _, group in rows]
    result = grpo(rewards, groups).tolist()
    for reward, group, ours in zip(rewards, groups, result, strict=True):
        siblings = [r for r, g in rows if g == group]
        if len(set(siblings)) == 1:
            assert ours == 0.0
        else:
            expected = (reward - statistics.fmean(siblings)) / (statistics.stdev(siblings) + 1e-6)
            assert ours == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_flags_switch_the_parts_off() -> None:
    rewards, groups = [1.0, 0.0, math.nan], [0, 0, 0]
    no_std = AlgorithmConfig(disable_grpo_std_normalization=True)
    raw = AlgorithmConfig(disable_rewards_normalization=True)
    assert advantages(rewards, groups, no_std).tolist() == [0.5, -0.5, 0.0]
    assert advantages(rewards, groups, raw).tolist() == [1.0, 0.0, 0.0]
    torch.testing.assert_close(advantages(rewards, groups, AlgorithmConfig()), grpo(rewards, groups))
