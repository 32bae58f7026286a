"""Token-level advantages against loops over Python numbers."""

from __future__ import annotations

import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from miles.config.sections import AlgorithmConfig
from miles.trainer.signal import Judgements, gae, scan_back, token_signal, whiten

LENGTHS = [3, 0, 1, 5, 2]


def random_tokens(seed: int) -> Tensor:
    draw = random.Random(seed)
    return torch.tensor([draw.uniform(-2, 0) for _ in range(sum(LENGTHS))], dtype=torch.float64)


def rows_of(values_R: Tensor, lengths: list[int]) -> list[list[float]]:
    return [row.tolist() for row in values_R.split(lengths)]


def plain_gae(rewards: list[float], values: list[float], gamma: float, lambd: float) -> list[float]:
    """The definition: the sum over k of (gamma lambda)^k delta_(t+k)."""
    values = [*values, 0.0]
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(rewards))]
    return [sum((gamma * lambd) ** k * deltas[t + k] for k in range(len(deltas) - t)) for t in range(len(deltas))]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
def test_gae_equals_its_definition(lengths: list[int], gamma: float, lambd: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards_R, values_R = torch.randn(2, sum(lengths), dtype=torch.float64, generator=generator)
    advantages_R, returns_R = gae(rewards_R, values_R, torch.tensor(lengths), gamma=gamma, lambd=lambd)
    expected = [
        x
        for rewards, values in zip(rows_of(rewards_R, lengths), rows_of(values_R, lengths), strict=True)
        for x in plain_gae(rewards, values, gamma, lambd)
    ]
    assert advantages_R.tolist() == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(returns_R, advantages_R + values_R)


def test_a_hand_worked_gae() -> None:
    """Reward 1 at the end, values 0.5, gamma 1, lambda 0.5: deltas 0, 0, 0.5."""
    advantages_R, returns_R = gae(
        torch.tensor([0.0, 0.0, 1.0]), torch.full((3,), 0.5), torch.tensor([3]), gamma=1.0, lambd=0.5
    )
    assert advantages_R.tolist() == [0.125, 0.25, 0.5]
    assert returns_R.tolist() == [0.625, 0.75, 1.0]


def test_scan_back_stays_within_an_answer() -> None:
    assert scan_back(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 2]), 0.5).tolist() == [1.0, 4.0, 4.0]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_discounts_the_reward_and_the_kl_of_later_tokens(gamma: float) -> None:
    policy_R, ref_R = random_tokens(0), random_tokens(1)
    rewards_S = torch.tensor([1.0, 5.0, -1.0, 0.0, 2.0], dtype=torch.float64)
    config = AlgorithmConfig(advantage_estimator="reinforce_plus_plus", gamma=gamma, kl_coef=0.1, kl_loss_type="k1")
    signal = token_signal(rewards_S, torch.tensor(LENGTHS), Judgements(policy_R, ref_R), config)
    expected = []
    for reward, policy, ref in zip(
        rewards_S.tolist(), rows_of(policy_R, LENGTHS), rows_of(ref_R, LENGTHS), strict=True
    ):
        per_token = [-0.1 * (p - r) for p, r in zip(policy, ref, strict=True)]
        if per_token:
            per_token[-1] += reward
        expected += [sum(gamma**k * per_token[t + k] for k in range(len(per_token) - t)) for t in range(len(per_token))]
    assert signal.returns_R.tolist() == pytest.approx(expected, abs=1e-6)
    assert signal.advantages_R.tolist() == signal.returns_R.tolist()


def test_field_note_15_every_token_of_an_answer_carries_the_same_scalar() -> None:
    signal = token_signal(torch.tensor([1.0, -1.0, 0.5]), torch.tensor([5, 2, 9]), Judgements(), AlgorithmConfig())
    assert signal.advantages_R.tolist() == [1.0] * 5 + [-1.0] * 2 + [0.5] * 9


def test_the_kl_penalty_is_taken_from_each_token() -> None:
    policy_R, ref_R = random_tokens(0), random_tokens(1)
    config = AlgorithmConfig(kl_coef=0.5, kl_loss_type="k2")
    signal = token_signal(torch.zeros(5), torch.tensor(LENGTHS), Judgements(policy_R, ref_R), config)
    expected = [-0.5 * (p - r) ** 2 / 2 for p, r in zip(policy_R.tolist(), ref_R.tolist(), strict=True)]
    assert signal.advantages_R.tolist() == pytest.approx(expected, abs=1e-6)


def test_distillation_moves_the_advantages_by_the_distance_to_the_teacher() -> None:
    policy_R, teacher_R = random_tokens(0), random_tokens(2)
    config = AlgorithmConfig(use_opd=True, opd_kl_coef=0.3)
    signal = token_signal(
        torch.full((5,), 0.25), torch.tensor(LENGTHS), Judgements(policy_R, teacher_R=teacher_R), config
    )
    torch.testing.assert_close(signal.advantages_R, (0.25 - 0.3 * (policy_R - teacher_R)).float())
    torch.testing.assert_close(signal.returns_R, torch.full((11,), 0.25))


def test_whitening_is_over_all_tokens_with_n_minus_1() -> None:
    config = AlgorithmConfig(advantage_estimator="reinforce_plus_plus_baseline", normalize_advantages=True)
    signal = token_signal(torch.tensor([1.0, -1.0, 0.5]), torch.tensor([2, 1, 3]), Judgements(), config)
    tokens = [1.0] * 2 + [-1.0] + [0.5] * 3
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    assert signal.advantages_R.tolist() == pytest.approx([(x - mean) / (variance + 1e-8) ** 0.5 for x in tokens])


@pytest.mark.parametrize("values", [[0.3] * 16, [1e9] * 3, [5.0], []])
def test_whitening_equal_values_gives_exactly_zero(values: list[float]) -> None:
    assert whiten(torch.tensor(values, dtype=torch.float64)).tolist() == [0.0] * len(values)


def test_ppo_needs_its_critic_and_gives_returns_for_it() -> None:
    values_R = random_tokens(3)
    config = AlgorithmConfig(advantage_estimator="ppo", gamma=0.95, lambd=0.8)
    rewards_S = torch.tensor([1.0, 9.0, 0.0, 1.0, -1.0])
    signal = token_signal(rewards_S, torch.tensor(LENGTHS), Judgements(values_R=values_R), config)
    expected = []
    for reward, values in zip(rewards_S.tolist(), rows_of(values_R, LENGTHS), strict=True):
        if values:
            expected += plain_gae([0.0] * (len(values) - 1) + [reward], values, 0.95, 0.8)
    assert signal.advantages_R.tolist() == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(signal.returns_R, signal.advantages_R + values_R.float())


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo"])
def test_field_note_14_an_answer_without_a_reward_teaches_nothing_after_whitening_either(estimator: str) -> None:
    config = AlgorithmConfig(advantage_estimator=estimator, normalize_advantages=True)
    scored_S = torch.tensor([True, False, True])
    lengths_S = torch.tensor([2, 4, 3])
    signal = token_signal(torch.tensor([1.0, 0.0, -0.5]), lengths_S, Judgements(), config, scored_S=scored_S)
    alone = token_signal(torch.tensor([1.0, -0.5]), torch.tensor([2, 3]), Judgements(), config)
    assert signal.advantages_R[2:6].tolist() == [0.0] * 4
    assert signal.advantages_R[[0, 1, 6, 7, 8]].tolist() == alone.advantages_R.tolist()


def test_the_critic_learns_nothing_from_an_answer_without_a_reward() -> None:
    values_R = torch.tensor([0.5, 0.25, -0.5])
    config = AlgorithmConfig(advantage_estimator="ppo")
    scored_S = torch.tensor([True, False])
    signal = token_signal(
        torch.tensor([1.0, 0.0]), torch.tensor([1, 2]), Judgements(values_R=values_R), config, scored_S=scored_S
    )
    assert signal.returns_R.tolist() == [1.0, 0.25, -0.5]
    assert signal.advantages_R.tolist() == [0.5, 0.0, 0.0]
