"""The worked cases of `policy_losses.json`: values in float64 and float32, gradients against a plain formula.

Each estimator is one entry of `ESTIMATORS`, by the name of its expected value in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles.config.sections import AlgorithmConfig
from miles.trainer.advantages import advantages
from miles.trainer.corrections import correction_weights
from miles.trainer.kl import kl_estimate
from miles.trainer.losses import TokenInputs, policy_loss
from miles.trainer.objectives import answer_log_ratio
from miles.trainer.ratios import log_ratio
from miles.trainer.reduce import constant_weights, sample_mean_weights, token_mean_weights


@dataclass
class Case:
    """Flat tensors of one case; `new` carries the gradient."""

    rewards: list[float]
    lengths_S: Tensor
    old: Tensor
    new: Tensor
    rollout: Tensor
    ref: Tensor
    eps_clip: float
    eps_clip_high: float

    def advantages(self, estimator: str = "grpo") -> Tensor:
        return advantages(self.rewards, [0] * len(self.rewards), AlgorithmConfig(advantage_estimator=estimator))

    def loss(self, estimator: str = "grpo", correction: str | None = None, **flags: Any) -> Tensor:
        """The policy loss of each token as the trainer computes it; `estimator` is that of the advantages only."""
        config = AlgorithmConfig(**{"eps_clip": self.eps_clip, "eps_clip_high": self.eps_clip_high, **flags})
        inputs = TokenInputs(
            advantages_R=self.advantages(estimator).to(self.new.dtype).repeat_interleave(self.lengths_S),
            old_log_probs_R=self.rollout if config.use_rollout_logprobs else self.old,
            lengths_S=self.lengths_S,
            rollout_log_probs_R=self.rollout,
            correction=correction,
        )
        return policy_loss(self.new, torch.zeros_like(self.new), inputs, config)["loss"]

    def weights(self, name: str) -> Tensor:
        """The correction weight of each token, without a limit."""
        config = AlgorithmConfig(tis_clip_low=0.0, tis_clip=1e9)
        return correction_weights(self.old, self.rollout, self.lengths_S, name=name, config=config)["tis"]

    def token_mean(self, values_R: Tensor) -> Tensor:
        return (values_R * token_mean_weights(self.lengths_S)).sum()

    def sample_mean(self, values_R: Tensor) -> Tensor:
        return (values_R * sample_mean_weights(self.lengths_S)).sum()

    def first_of_answers(self, values_R: Tensor) -> Tensor:
        return values_R[self.lengths_S.cumsum(0) - self.lengths_S]


TIGHT = {"eps_clip": 3e-4, "eps_clip_high": 4e-4}
ESTIMATORS: dict[str, Callable[[Case, dict[str, Any]], Tensor]] = {
    "ratio": lambda case, _: log_ratio(case.new, case.old).exp(),
    "advantage_grpo": lambda case, _: case.advantages("grpo"),
    "advantage_dr_grpo": lambda case, _: case.advantages("dr_grpo"),
    "advantage_rloo": lambda case, _: case.advantages("rloo"),
    "advantage_max_rl": lambda case, _: case.advantages("max_rl"),
    "token_loss": lambda case, _: case.loss(),
    "grpo_loss": lambda case, _: case.sample_mean(case.loss()),
    "dapo_loss": lambda case, _: case.token_mean(case.loss()),
    "dr_grpo_loss": lambda case, expected: (
        case.loss("dr_grpo") * constant_weights(case.lengths_S, length=expected["dr_grpo_loss_const"])
    ).sum(),
    "gspo_s": lambda case, _: case.first_of_answers(
        answer_log_ratio(log_ratio(case.new, case.old), case.lengths_S).exp()
    ),
    "gspo_loss_3e4_4e4": lambda case, _: case.sample_mean(case.loss(policy_objective="gspo", **TIGHT)),
    "gspo_loss_same_clip": lambda case, _: case.sample_mean(case.loss(policy_objective="gspo")),
    "cispo_loss_token_mean": lambda case, _: case.token_mean(case.loss(policy_objective="cispo")),
    "tis_weight_raw": lambda case, _: case.weights("tis"),
    "tis_loss_C2": lambda case, _: case.token_mean(case.loss(correction="tis")),
    "icepop_loss_0.5_5": lambda case, _: case.token_mean(case.loss(correction="icepop")),
    "seq_is_weight": lambda case, _: case.first_of_answers(case.weights("sequence_tis")),
    "geo_is_weight": lambda case, _: case.first_of_answers(case.weights("geometric")),
    "bypass_loss": lambda case, _: case.token_mean(case.loss(use_rollout_logprobs=True)),
    "kl_k1": lambda case, _: case.token_mean(kl_estimate(case.new, case.ref, "k1")),
    "kl_k2": lambda case, _: case.token_mean(kl_estimate(case.new, case.ref, "k2")),
    "kl_k3": lambda case, _: case.token_mean(kl_estimate(case.new, case.ref, "k3")),
    "logprob_abs_diff": lambda case, _: case.token_mean((case.old - case.rollout).abs()),
}


class Plain:
    """The same losses as loops over Python floats and scalar tensors, one answer at a time; for the gradient."""

    def __init__(self, case: Case) -> None:
        self.case = case
        columns = (case.new, case.old, case.rollout, case.ref)
        self.answers = list(zip(*(column.split(case.lengths_S.tolist()) for column in columns), strict=True))
        self.group = len(self.answers)
        self.tokens = len(case.new)

    def clip(self, ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
        return -torch.min(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)

    def clipped(self, *, estimator: str = "grpo", weight=lambda i, t: 1.0, divide=lambda length: 1.0, bypass=False):
        total = torch.zeros((), dtype=self.case.new.dtype)
        for i, (new, old, rollout, _) in enumerate(self.answers):
            advantage = float(self.case.advantages(estimator)[i])
            for t in range(len(new)):
                base = rollout[t] if bypass else old[t]
                loss = self.clip(torch.exp(new[t] - base), advantage, self.case.eps_clip, self.case.eps_clip_high)
                total = total + weight(i, t) * loss / divide(len(new))
        return total

    def w(self, i: int, t: int) -> float:
        _, old, rollout, _ = self.answers[i]
        return float(torch.exp(old[t] - rollout[t]))

    def gspo(self, low: float, high: float) -> Tensor:
        losses = []
        for i, (new, old, _, _) in enumerate(self.answers):
            s = torch.exp((new - old).sum() / len(new))
            losses.append(self.clip(s, float(self.case.advantages()[i]), low, high))
        return torch.stack(losses).sum() / self.group

    def cispo(self) -> Tensor:
        total = torch.zeros((), dtype=self.case.new.dtype)
        for i, (new, old, _, _) in enumerate(self.answers):
            for t in range(len(new)):
                weight = min(float(torch.exp(new[t].detach() - old[t])), 1 + self.case.eps_clip_high)
                total = total - weight * float(self.case.advantages()[i]) * new[t]
        return total / self.tokens


PLAIN: dict[str, Callable[[Plain, dict[str, Any]], Tensor]] = {
    "grpo_loss": lambda plain, _: plain.clipped(divide=lambda length: length * plain.group),
    "dapo_loss": lambda plain, _: plain.clipped(divide=lambda _: plain.tokens),
    "dr_grpo_loss": lambda plain, expected: plain.clipped(
        estimator="dr_grpo", divide=lambda _: plain.group * expected["dr_grpo_loss_const"]
    ),
    "gspo_loss_3e4_4e4": lambda plain, _: plain.gspo(3e-4, 4e-4),
    "gspo_loss_same_clip": lambda plain, _: plain.gspo(plain.case.eps_clip, plain.case.eps_clip_high),
    "cispo_loss_token_mean": lambda plain, _: plain.cispo(),
    "tis_loss_C2": lambda plain, _: plain.clipped(
        weight=lambda i, t: min(plain.w(i, t), 2.0), divide=lambda _: plain.tokens
    ),
    "icepop_loss_0.5_5": lambda plain, _: plain.clipped(
        weight=lambda i, t: plain.w(i, t) if 0.5 <= plain.w(i, t) <= 5 else 0.0, divide=lambda _: plain.tokens
    ),
    "bypass_loss": lambda plain, _: plain.clipped(bypass=True, divide=lambda _: plain.tokens),
    "kl_k1": lambda plain, _: (plain.case.new - plain.case.ref).mean(),
    "kl_k2": lambda plain, _: 0.5 * ((plain.case.new - plain.case.ref) ** 2).mean(),
    "kl_k3": lambda plain, _: (
        torch.exp(plain.case.ref - plain.case.new) - 1 - (plain.case.ref - plain.case.new)
    ).mean(),
}
CONSTANTS = {"dr_grpo_loss_const"}


@pytest.fixture(scope="session")
def cases(cases_dir: Path) -> list[dict[str, Any]]:
    return json.loads((cases_dir / "policy_losses.json").read_text())


def _case(inputs: dict[str, Any], dtype: torch.dtype) -> Case:
    flat = {
        name: torch.tensor(list(chain.from_iterable(inputs[name])), dtype=dtype)
        for name in ("old", "new", "rollout", "ref")
    }
    flat["new"].requires_grad_()
    return Case(
        rewards=inputs["rewards"],
        lengths_S=torch.tensor([len(row) for row in inputs["new"]]),
        eps_clip=inputs["eps_clip"],
        eps_clip_high=inputs["eps_clip_high"],
        **flat,
    )


def _flat(expected: Any) -> Tensor:
    rows = expected if isinstance(expected, list) else [expected]
    return torch.tensor([x for row in rows for x in (row if isinstance(row, list) else [row])], dtype=torch.float64)


def test_every_entry_of_the_file_is_reproduced(cases: list[dict[str, Any]]) -> None:
    assert cases
    assert all(set(entry["expected"]) <= set(ESTIMATORS) | CONSTANTS for entry in cases)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_value(cases: list[dict[str, Any]], name: str, dtype: torch.dtype, tolerance: float) -> None:
    assert cases
    for entry in cases:
        ours = ESTIMATORS[name](_case(entry["inputs"], dtype), entry["expected"]).detach().double().reshape(-1)
        torch.testing.assert_close(ours, _flat(entry["expected"][name]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", PLAIN)
def test_gradient(cases: list[dict[str, Any]], name: str, dtype: torch.dtype, tolerance: float) -> None:
    for entry in cases:
        ours, exact = _case(entry["inputs"], dtype), _case(entry["inputs"], torch.float64)
        ESTIMATORS[name](ours, entry["expected"]).backward()
        loss = PLAIN[name](Plain(exact), entry["expected"])
        loss.backward()
        assert loss.item() == pytest.approx(entry["expected"][name], rel=1e-6, abs=1e-9)
        torch.testing.assert_close(ours.new.grad.double(), exact.new.grad, rtol=tolerance, atol=tolerance)


def test_gradients_of_the_worked_vector() -> None:
    inputs = {
        "rewards": [1, 0],
        "old": [[-1.0, -0.5], [-2.0, -0.1, -0.7]],
        "new": [[-0.7, -0.6], [-2.5, -0.1, -0.4]],
        "rollout": [[-1.2, -0.5], [-1.0, -0.1, -0.9]],
        "ref": [[-1.1, -0.5], [-2.0, -0.2, -0.7]],
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
    }
    expected = {
        "dapo_loss": [0, -0.127963, 0, 0.141421, 0.190899],
        "cispo_loss_token_mean": [-0.181019, -0.127963, 0.085776, 0.141421, 0.181019],
    }
    for name, gradient in expected.items():
        case = _case(inputs, torch.float64)
        ESTIMATORS[name](case, {}).backward()
        assert case.new.grad.tolist() == pytest.approx(gradient, abs=1e-6)
