"""Off-policy weights against plain formulas, and what they do to a loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from miles.config.sections import CORRECTIONS as CHOICES
from miles.config.sections import AlgorithmConfig
from miles.trainer.corrections import (
    CORRECTIONS,
    correction_in_use,
    correction_weights,
    off_policy_masked,
    vetoed,
)
from miles.trainer.losses import TokenInputs, policy_loss

LOG_W = [[0.4, -0.9], [-1.2, 2.0, 0.1], [0.005, -0.004, 0.006], [3.0, -2.5]]
LENGTHS = [len(row) for row in LOG_W]
ROLLOUT = torch.tensor([-1.0, -0.5, -2.0, -0.1, -0.7, -1.5, -0.3, -0.2, -4.0, -0.6], dtype=torch.float64)
OLD = ROLLOUT + torch.tensor([x for row in LOG_W for x in row], dtype=torch.float64)


def inside(w: float, low: float, high: float) -> float:
    return w if low <= w <= high else 0.0


def cap(w: float, low: float, high: float) -> float:
    return min(max(w, low), high)


PLAIN = {
    "tis": lambda row, low, high: [cap(math.exp(x), low, high) for x in row],
    "sequence_tis": lambda row, low, high: [cap(math.exp(sum(row)), low, high)] * len(row),
    "icepop": lambda row, low, high: [inside(math.exp(x), low, high) for x in row],
    "masked_is": lambda row, low, high: [inside(math.exp(x), low, high) for x in row],
    "sequence_masked_is": lambda row, low, high: [inside(math.exp(sum(row)), low, high)] * len(row),
    "geometric": lambda row, low, high: [inside(math.exp(sum(row) / len(row)), low, high)] * len(row),
    "decoupled": lambda row, low, high: [cap(math.exp(x), low, high) for x in row],
}
DEFAULTS = {
    "tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "masked_is": (0.0, 2.0),
    "sequence_masked_is": (0.0, 2.0),
    "geometric": (0.99, 1.01),
    "decoupled": (0.0, math.inf),
}


def weigh(name: str, **flags) -> dict[str, Tensor]:
    return correction_weights(OLD, ROLLOUT, torch.tensor(LENGTHS), name=name, config=AlgorithmConfig(**flags))


def test_the_flag_offers_every_correction() -> None:
    assert set(CHOICES) == {"none", *CORRECTIONS} == {"none", *PLAIN}


@pytest.mark.parametrize("name", PLAIN)
def test_weights_with_the_default_limits(name: str) -> None:
    expected = [w for row in LOG_W for w in PLAIN[name](row, *DEFAULTS[name])]
    assert weigh(name)["tis"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", PLAIN)
@given(low=st.floats(0.0, 1.0), high=st.floats(1.0, 6.0))
def test_weights_with_limits_of_the_flags(name: str, low: float, high: float) -> None:
    values = weigh(name, tis_clip_low=low, tis_clip=high)
    expected = [w for row in LOG_W for w in PLAIN[name](row, low, high)]
    free = [w for row in LOG_W for w in PLAIN[name](row, 0.0, math.inf)]
    assert values["tis"].tolist() == pytest.approx(expected)
    assert values["tis_clipfrac"].tolist() == [float(a != b) for a, b in zip(expected, free, strict=True)]
    assert values["tis_abs"].tolist() == pytest.approx([abs(math.exp(x) - 1) for row in LOG_W for x in row])


def test_weights_far_apart_stay_finite_and_have_no_gradient() -> None:
    old_R = torch.tensor([-500.0, -0.1], requires_grad=True)
    for name in CORRECTIONS:
        weights_R = correction_weights(
            old_R, torch.tensor([-0.1, -500.0]), torch.tensor([2]), name=name, config=AlgorithmConfig()
        )["tis"]
        assert weights_R.isfinite().all() and not weights_R.requires_grad


def test_veto_drops_the_answer_of_one_impossible_token() -> None:
    old_R = torch.tensor([-1.0, -12.0, -0.5, -1.0, -1.0])
    rollout_R = torch.tensor([-1.0, -1.0, -0.5, -2.0, -1.0])
    assert vetoed(old_R, rollout_R, torch.tensor([3, 2]), threshold=1e-4).tolist() == [1.0] * 3 + [0.0] * 2


def test_opsm_drops_bad_answers_that_the_policy_has_left() -> None:
    log_ratio_R = torch.tensor([-0.3, 0.1, 0.2, 0.3, -0.3, -0.3])
    advantages_R = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0])
    masked_R = off_policy_masked(log_ratio_R, advantages_R, torch.tensor([2, 2, 2]), delta=0.05)
    assert masked_R.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_masks_and_weights_multiply_the_loss_and_its_gradient() -> None:
    """Clip, then OPSM, then the weight, then the veto; a dropped token has neither loss nor gradient."""
    new_R = (OLD + 0.1).detach().requires_grad_()
    lengths_S = torch.tensor(LENGTHS)
    advantages_R = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64).repeat_interleave(lengths_S)
    inputs = TokenInputs(advantages_R, OLD, lengths_S=lengths_S, rollout_log_probs_R=ROLLOUT, correction="icepop")
    config = AlgorithmConfig(veto_threshold=0.1, use_opsm=True, opsm_delta=-0.2)
    values = policy_loss(new_R, torch.zeros_like(new_R), inputs, config)
    ratio = math.exp(0.1)
    expected = []
    for row, advantage in zip(LOG_W, [1.0, -1.0, 0.5, -2.0], strict=True):
        is_kept = advantage > 0 and min(row) >= math.log(0.1)
        weights = PLAIN["icepop"](row, 0.5, 5.0)
        expected += [-ratio * advantage * w * is_kept for w in weights]
    values["loss"].sum().backward()
    assert values["loss"].tolist() == pytest.approx(expected)
    assert new_R.grad.tolist() == pytest.approx(expected)
    assert values["veto_frac"].tolist() == [0.0] * 8 + [1.0] * 2
    assert values["opsm_clipfrac"].tolist() == [0.0] * 2 + [1.0] * 3 + [0.0] * 3 + [1.0] * 2


def test_tis_takes_out_the_bias_of_another_sampler() -> None:
    """Exact expectation over a small vocabulary: sampling from q with weight p / q gives the gradient under p."""
    logits_V = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    q_V = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
    rewards_V = torch.tensor([1.0, 0.0, -1.0, 2.0], dtype=torch.float64)
    log_p_V = logits_V.log_softmax(-1)
    inputs = TokenInputs(
        rewards_V, lengths_S=torch.ones(4, dtype=torch.int64), rollout_log_probs_R=q_V.log(), correction="decoupled"
    )
    loss_V = policy_loss(log_p_V, torch.zeros(4), inputs, AlgorithmConfig())["loss"]
    (ours,) = torch.autograd.grad((q_V * loss_V).sum(), logits_V, retain_graph=True)
    (expected,) = torch.autograd.grad(-(log_p_V.exp() * rewards_V).sum(), logits_V)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("flags", "age", "expected"),
    [
        ({}, 0, None),
        ({}, 1, "tis"),
        ({"off_policy_correction": "none"}, 3, None),
        ({"off_policy_correction": "icepop"}, 0, "icepop"),
        ({"use_tis": True}, 0, "tis"),
        ({"use_rollout_logprobs": True}, 2, None),
    ],
)
def test_a_correction_is_on_by_default_once_a_sample_is_older_than_the_weights(flags, age, expected) -> None:
    assert correction_in_use(AlgorithmConfig(**flags), oldest_age=age) == expected
