"""Divergences and scores over the n most likely tokens and a rest, against exact sums over a vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from miles.config.sections import AlgorithmConfig
from miles.trainer.losses import TokenInputs, policy_loss
from miles.trainer.partition import TopLogProbs, coarse_kl, expected_score, rest_of


def random_logits(seed: int, vocab: int = 9) -> Tensor:
    return torch.randn(3, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2


def at(log_p_RV: Tensor, ids_RK: Tensor) -> Tensor:
    return log_p_RV.gather(1, ids_RK)


def exact_kl(p_RV: Tensor, base_RV: Tensor) -> Tensor:
    return (p_RV.exp() * (p_RV - base_RV)).sum(-1)


@given(st.integers(0, 1000), st.integers(1, 9))
def test_coarse_kl_is_between_0_and_the_whole_kl(seed: int, num_top: int) -> None:
    p_RV, base_RV = random_logits(seed).log_softmax(-1), random_logits(seed + 1).log_softmax(-1)
    ids_RK = base_RV.topk(num_top).indices
    coarse_R = coarse_kl(at(p_RV, ids_RK), at(base_RV, ids_RK))
    assert (coarse_R > -1e-5).all() and (coarse_R <= exact_kl(p_RV, base_RV) + 1e-5).all()
    if num_top == 9:
        torch.testing.assert_close(coarse_R, exact_kl(p_RV, base_RV), rtol=1e-5, atol=1e-5)


def test_coarse_kl_of_a_hand_worked_case() -> None:
    p, base = torch.tensor([[0.5, 0.25]]), torch.tensor([[0.25, 0.25]])
    # 0.5 log 2 + 0 + 0.25 log(0.25 / 0.5)
    assert coarse_kl(p.log(), base.log()).item() == pytest.approx(0.25 * 0.6931472)
    assert coarse_kl(p.log(), p.log()).item() == 0.0


def test_coarse_kl_has_its_exact_gradient() -> None:
    logits_RV = random_logits(0).requires_grad_()
    base_RV = random_logits(1).log_softmax(-1)
    ids_RK = base_RV.topk(3).indices
    ours = torch.autograd.grad(coarse_kl(at(logits_RV.log_softmax(-1), ids_RK), at(base_RV, ids_RK)).sum(), logits_RV)
    merged = []
    for row, base, ids in zip(logits_RV.softmax(-1), base_RV.exp(), ids_RK, strict=True):
        p4, q4 = (torch.cat((x[ids], (1 - x[ids].sum()).reshape(1))) for x in (row, base))
        merged.append((p4 * (p4.log() - q4.log())).sum())
    torch.testing.assert_close(ours, torch.autograd.grad(torch.stack(merged).sum(), logits_RV))


def test_the_expected_score_is_zero_where_the_sampler_is_the_policy() -> None:
    logits_RV = random_logits(2).requires_grad_()
    log_p_RV = logits_RV.log_softmax(-1)
    ids_RK = log_p_RV.topk(4).indices
    value_R = expected_score(at(log_p_RV, ids_RK), at(log_p_RV, ids_RK).detach())
    (gradient,) = torch.autograd.grad(value_R.sum(), logits_RV)
    assert value_R.tolist() == [0.0] * 3
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_the_expected_score_over_all_ids_is_the_samplers_mean_score() -> None:
    logits_RV = random_logits(3).requires_grad_()
    log_p_RV, log_q_RV = logits_RV.log_softmax(-1), random_logits(4).log_softmax(-1)
    ids_RK = torch.arange(9).expand(3, 9)
    ours = torch.autograd.grad(expected_score(at(log_p_RV, ids_RK), log_q_RV).sum(), logits_RV, retain_graph=True)[0]
    # The mean of d log p[a] / d logits = onehot(a) - p under a ~ q is q - p.
    torch.testing.assert_close(ours, (log_q_RV.exp() - log_p_RV.exp()).detach(), rtol=1e-5, atol=1e-5)


def test_rest_of_never_is_negative() -> None:
    assert rest_of(torch.tensor([[0.7, 0.31]]).log()).item() == 0.0
    assert rest_of(torch.tensor([[-1e30, -torch.inf]])).item() == 1.0


@pytest.mark.parametrize("num_top", [3, 9])
def test_centred_scores_have_mean_zero_under_the_sampler(num_top: int) -> None:
    """Score centering: with one advantage for all tokens the sampler's drift is gone, exactly when all ids are known
    and mostly when the likely ones are; without it the policy is pulled towards the sampler."""
    logits_V = random_logits(5)[0].requires_grad_()
    log_p_V, log_q_V = logits_V.log_softmax(-1), random_logits(6)[0].log_softmax(-1)
    ids_K = log_q_V.topk(num_top).indices
    top = TopLogProbs(ids_K.expand(9, num_top), log_q_V[ids_K].expand(9, num_top))
    gradients = {}
    for centred in (True, False):
        inputs = TokenInputs(
            torch.full((9,), 0.7, dtype=torch.float64),
            lengths_S=torch.ones(9, dtype=torch.int64),
            rollout_log_probs_R=log_q_V,
            engine_top=top if centred else None,
            policy_at_engine_top_RK=log_p_V[ids_K].expand(9, num_top) if centred else None,
        )
        loss_V = policy_loss(log_p_V, torch.zeros(9), inputs, AlgorithmConfig())["loss"]
        (gradients[centred],) = torch.autograd.grad((log_q_V.exp() * loss_V).sum(), logits_V, retain_graph=True)
    assert gradients[True].norm() < (1e-5 if num_top == 9 else 0.3) * gradients[False].norm()


def test_centring_follows_clip_and_weight_of_the_token() -> None:
    """A clipped token has no score to centre; a weight counts for the score and its mean alike."""
    log_p_V = random_logits(7)[0].log_softmax(-1).detach().requires_grad_()
    log_q_V = random_logits(8)[0].log_softmax(-1)
    top = TopLogProbs(torch.arange(9).expand(2, 9), log_q_V.expand(2, 9))
    drawn = torch.tensor([1, 2])
    log_probs_R = log_p_V[drawn]
    inputs = TokenInputs(
        torch.tensor([1.0, 1.0], dtype=torch.float64),
        torch.stack((log_probs_R[0] - 1.0, log_probs_R[1])).detach(),  # the first ratio is e, far above the clip
        lengths_S=torch.tensor([1, 1]),
        rollout_log_probs_R=torch.stack((log_probs_R[0], log_probs_R[1] - 0.5)).detach(),
        engine_top=top,
        policy_at_engine_top_RK=log_p_V.expand(2, 9),
        correction="tis",
    )
    loss_R = policy_loss(log_probs_R, torch.zeros(2), inputs, AlgorithmConfig())["loss"]
    first = torch.autograd.grad(loss_R[0], log_p_V, retain_graph=True)[0]
    second = torch.autograd.grad(loss_R[1], log_p_V)[0]
    weight = 0.5
    assert first.abs().max() == 0.0
    expected = torch.exp(torch.tensor(weight)) * log_q_V.exp()
    expected[2] -= torch.exp(torch.tensor(weight))
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-4)
