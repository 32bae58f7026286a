from __future__ import annotations

import pytest
import torch

from miles.config.sections import AlgorithmConfig
from miles.trainer.kl import kl_estimate
from miles.trainer.losses import TokenInputs, policy_loss, sft_loss
from miles.trainer.ratios import effective_sample_share


def test_clip_range_is_symmetric_until_the_upper_one_is_given() -> None:
    old_R = torch.zeros(1, dtype=torch.float64)
    new_R = torch.tensor([1.25], dtype=torch.float64).log()
    inputs = TokenInputs(torch.ones(1, dtype=torch.float64), old_R)
    symmetric = policy_loss(new_R, old_R, inputs, AlgorithmConfig(eps_clip=0.2))
    higher = policy_loss(new_R, old_R, inputs, AlgorithmConfig(eps_clip=0.2, eps_clip_high=0.28))
    assert symmetric["pg_loss"].item() == pytest.approx(-1.2) and symmetric["pg_clipfrac"].item() == 1.0
    assert higher["pg_loss"].item() == pytest.approx(-1.25) and higher["pg_clipfrac"].item() == 0.0


def test_entropy_and_kl_enter_the_loss_with_their_coefficients() -> None:
    log_probs_R, entropy_R = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 0.25])
    inputs = TokenInputs(torch.zeros(2), None, torch.tensor([-1.5, -1.0]))
    config = AlgorithmConfig(use_kl_loss=True, entropy_coef=0.1, kl_loss_coef=2.0, kl_loss_type="k1")
    values = policy_loss(log_probs_R, entropy_R, inputs, config)
    assert values["kl_loss"].tolist() == [0.5, -1.0]
    assert values["loss"].tolist() == pytest.approx([2.0 * 0.5 - 0.05, 2.0 * -1.0 - 0.025])
    assert values["entropy_loss"] is entropy_R


def test_low_var_kl_is_k3_inside_its_limits_and_bounded_outside() -> None:
    near = torch.tensor([-1.0, -0.2, -3.0], dtype=torch.float64), torch.tensor([-1.3, -0.2, -2.0], dtype=torch.float64)
    assert kl_estimate(*near, "low_var_kl").tolist() == kl_estimate(*near, "k3").tolist()
    far = torch.tensor([-500.0, -0.1]), torch.tensor([-0.1, -500.0])
    assert kl_estimate(*far, "low_var_kl").tolist() == [10.0, 10.0]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_unbiased_kl_has_the_gradient_of_the_kl(kind: str) -> None:
    """Exact expectation over a small vocabulary. k1 and k3 give the KL's gradient, k2 its own; without the ratio k1 has
    no gradient at all on average."""
    logits_V = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    log_ref_V = torch.tensor([0.1, 0.5, -0.4, 0.2], dtype=torch.float64).log_softmax(-1)
    log_p_V = logits_V.log_softmax(-1)
    p_V = log_p_V.detach().exp()
    means = {}
    for unbiased in (True, False):
        config = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind, use_unbiased_kl=unbiased)
        inputs = TokenInputs(torch.zeros(4), None, log_ref_V, lengths_S=torch.ones(4, dtype=torch.int64))
        loss_V = policy_loss(log_p_V, torch.zeros(4), inputs, config)["loss"]
        (means[unbiased],) = torch.autograd.grad((p_V * loss_V).sum(), logits_V, retain_graph=True)
    estimate_V = kl_estimate(log_p_V, log_ref_V, kind)
    (expected,) = torch.autograd.grad((log_p_V.exp() * estimate_V).sum(), logits_V, retain_graph=True)
    torch.testing.assert_close(means[True], expected)
    if kind == "k1":
        torch.testing.assert_close(means[False], torch.zeros(4, dtype=torch.float64))
    if kind != "k2":
        (kl,) = torch.autograd.grad((logits_V.softmax(-1) * (logits_V.log_softmax(-1) - log_ref_V)).sum(), logits_V)
        torch.testing.assert_close(means[True], kl)


def test_sft_is_the_negative_log_likelihood() -> None:
    log_probs_R = torch.tensor([-1.0, -2.5])
    values = sft_loss(log_probs_R, torch.tensor([0.1, 0.2]), TokenInputs(torch.zeros(2)), AlgorithmConfig())
    assert values["loss"].tolist() == [1.0, 2.5]


def test_effective_sample_share_counts_each_answer_alone() -> None:
    ratio_R = torch.tensor([1.0, 1.0, 1.0, 3.0], dtype=torch.float64)
    share = effective_sample_share(ratio_R, torch.tensor([2, 0, 2]))
    assert share.item() == pytest.approx((1.0 + 16.0 / (2 * 10.0)) / 2)
