"""Objectives against plain formulas in float64, and what each promises of its gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from miles.config.sections import AlgorithmConfig
from miles.trainer.losses import TokenInputs, objective_name, policy_loss
from miles.trainer.objectives import dual_clipped, soft_gated_surrogate

RATIOS = [0.3, 0.79, 0.81, 1.0, 1.19, 1.27, 1.29, 4.0]


def loss_and_slope(ratios: list[float], advantages: list[float], lengths: list[int] | None = None, **flags):
    """pg_loss, its slope with respect to log pi, and the clipped share, for tokens of these ratios."""
    new_R = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    inputs = TokenInputs(
        torch.tensor(advantages, dtype=torch.float64),
        torch.zeros(len(ratios), dtype=torch.float64),
        lengths_S=torch.tensor(lengths or [len(ratios)]),
    )
    values = policy_loss(new_R, torch.zeros(len(ratios)), inputs, AlgorithmConfig(**flags))
    (slope,) = torch.autograd.grad(values["loss"].sum(), new_R)
    return values["pg_loss"].tolist(), slope.tolist(), values["pg_clipfrac"].tolist()


def test_clip_bounds_what_a_good_token_gains_and_what_a_bad_one_saves() -> None:
    losses, slopes, clipped = loss_and_slope(RATIOS, [1.0] * 8, eps_clip=0.2, eps_clip_high=0.28)
    assert losses == pytest.approx([-min(r, 1.28) for r in RATIOS])
    assert slopes == pytest.approx([-r if r < 1.28 else 0.0 for r in RATIOS])
    assert clipped == [float(r > 1.28) for r in RATIOS]
    losses, slopes, clipped = loss_and_slope(RATIOS, [-1.0] * 8, eps_clip=0.2, eps_clip_high=0.28)
    assert losses == pytest.approx([max(r, 0.8) for r in RATIOS])
    assert slopes == pytest.approx([r if r > 0.8 else 0.0 for r in RATIOS])
    assert clipped == [float(r < 0.8) for r in RATIOS]


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    losses, slopes, clipped = loss_and_slope(RATIOS, [-2.0] * 8, eps_clip_c=3.0)
    assert losses == pytest.approx([2 * min(max(r, 0.8), 3.0) for r in RATIOS])
    assert slopes[-1] == 0.0 and clipped[-1] == 1.0
    good, _, _ = loss_and_slope([4.0], [2.0], eps_clip_c=3.0)
    assert good == pytest.approx([-2.4])
    kept, where = dual_clipped(torch.tensor([5.0]), torch.tensor([False]), torch.tensor([-1.0]), bound=6.0)
    assert kept.tolist() == [5.0] and where.tolist() == [False]


def test_cispo_never_stops_learning() -> None:
    """A clipped token keeps a slope of the clipped weight times its advantage."""
    advantages = [1.0, -1.0] * 4
    _, slopes, clipped = loss_and_slope(RATIOS, advantages, policy_objective="cispo", eps_clip_high=0.28)
    assert slopes == pytest.approx([-min(r, 1.28) * a for r, a in zip(RATIOS, advantages, strict=True)])
    assert clipped == [float(r > 1.28) for r in RATIOS]


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_sapo_equals_its_definition_and_fades_on_both_sides(advantage: float) -> None:
    tau = 1.0 if advantage > 0 else 1.05
    losses, slopes, clipped = loss_and_slope(RATIOS, [advantage] * 8, policy_objective="sapo")
    gates = [4 / tau / (1 + math.exp(-tau * (r - 1))) for r in RATIOS]
    assert losses == pytest.approx([-gate * advantage for gate in gates])
    # The paper's weight 4 p (1 - p), p = sigmoid(tau (r - 1)), times the ratio: the slope of the policy gradient.
    weights = [4 * (p := 1 / (1 + math.exp(-tau * (r - 1)))) * (1 - p) for r in RATIOS]
    assert slopes == pytest.approx([-w * r * advantage for w, r in zip(weights, RATIOS, strict=True)])
    assert weights[3] == 1.0 and clipped == [0.0] * 8


def test_sapo_takes_the_temperature_of_the_sign() -> None:
    log_ratio_R = torch.tensor([2.0, 2.0], dtype=torch.float64).log()
    loss_R, _ = soft_gated_surrogate(log_ratio_R, torch.tensor([1.0, -1.0]), tau_positive=0.5, tau_negative=4.0)
    assert loss_R.tolist() == pytest.approx([-8 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-4.0))])


@given(st.lists(st.lists(st.floats(-0.3, 0.3), min_size=1, max_size=5), min_size=1, max_size=4))
def test_gspo_has_the_gradient_of_the_sequence_form(log_ratios: list[list[float]]) -> None:
    lengths = [len(row) for row in log_ratios]
    flat = [x for row in log_ratios for x in row]
    advantages = [1.0 if i % 2 else -1.0 for i in range(len(lengths))]
    spread = [a for a, n in zip(advantages, lengths, strict=True) for _ in range(n)]
    ratios = [math.exp(x) for x in flat]
    _, slopes, _ = loss_and_slope(ratios, spread, lengths, policy_objective="gspo", eps_clip=0.1, eps_clip_high=0.15)
    new_R = torch.tensor(flat, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for row, advantage in zip(new_R.split(lengths), advantages, strict=True):
        s = torch.exp(row.mean())
        total = total - torch.min(s * advantage, s.clamp(0.9, 1.15) * advantage)
    (expected,) = torch.autograd.grad(total, new_R)
    # An answer's tokens are averaged by the weights, so each carries L times its share of the sequence gradient.
    per_token = [x / n for x, n in zip(slopes, [n for n in lengths for _ in range(n)], strict=True)]
    assert per_token == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("objective", ["clip", "gspo", "sapo", "cispo"])
def test_field_note_19_a_single_update_has_ratio_exactly_1_and_the_policy_gradient(objective: str) -> None:
    log_probs_R = torch.tensor([-0.123, -4.56, -0.7], requires_grad=True)
    inputs = TokenInputs(torch.tensor([2.0, -1.0, 0.0]), lengths_S=torch.tensor([1, 2]))
    values = policy_loss(log_probs_R, torch.zeros(3), inputs, AlgorithmConfig(policy_objective=objective))
    values["loss"].sum().backward()
    assert values["ppo_kl"].tolist() == [0.0, 0.0, 0.0]
    assert values["pg_clipfrac"].tolist() == [0.0, 0.0, 0.0]
    assert log_probs_R.grad.tolist() == pytest.approx([-2.0, 1.0, 0.0], rel=1e-6)


@pytest.mark.parametrize("objective", ["clip", "gspo", "sapo", "cispo"])
def test_far_apart_log_probs_stay_finite(objective: str) -> None:
    new_R = torch.tensor([-0.1, -300.0], requires_grad=True)
    inputs = TokenInputs(torch.tensor([1.0, -1.0]), torch.tensor([-300.0, -0.1]), lengths_S=torch.tensor([1, 1]))
    values = policy_loss(new_R, torch.zeros(2), inputs, AlgorithmConfig(policy_objective=objective))
    values["loss"].sum().backward()
    assert values["loss"].isfinite().all() and new_R.grad.isfinite().all()


def test_which_objective() -> None:
    names = [
        objective_name(AlgorithmConfig(advantage_estimator=estimator, policy_objective=wanted))
        for estimator, wanted in [("grpo", "auto"), ("gspo", "auto"), ("gspo", "clip"), ("rloo", "sapo")]
    ]
    assert names == ["clip", "gspo", "clip", "sapo"]


def zero_gradient(values_R: Tensor, log_probs_R: Tensor) -> bool:
    return bool((torch.autograd.grad(values_R.sum(), log_probs_R)[0] == 0).all())


def test_an_advantage_of_zero_has_no_gradient_in_any_objective() -> None:
    for objective in ("clip", "gspo", "cispo", "sapo"):
        new_R = torch.tensor([-0.1, -2.0, -1.0], requires_grad=True)
        inputs = TokenInputs(torch.zeros(3), torch.tensor([-1.0, -1.0, -1.0]), lengths_S=torch.tensor([3]))
        config = AlgorithmConfig(policy_objective=objective, use_opsm=True)
        assert zero_gradient(policy_loss(new_R, torch.zeros(3), inputs, config)["loss"], new_R)
