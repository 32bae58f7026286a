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
from miles.trainer.kl import kl_estimate
from miles.trainer.losses import TokenInputs, policy_loss
from miles.trainer.ratios import log_ratio
from miles.trainer.reduce import sample_mean_weights, token_mean_weights


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

    def advantages(self, **flags: Any) -> Tensor:
        return advantages(self.rewards, [0] * len(self.rewards), AlgorithmConfig(**flags))

    def loss(self, **flags: Any) -> Tensor:
        config = AlgorithmConfig(eps_clip=self.eps_clip, eps_clip_high=self.eps_clip_high, **flags)
        advantages_R = self.advantages().to(self.new.dtype).repeat_interleave(self.lengths_S)
        return policy_loss(self.new, torch.zeros_like(self.new), TokenInputs(advantages_R, self.old), config)["loss"]

    def token_mean(self, values_R: Tensor) -> Tensor:
        return (values_R * token_mean_weights(self.lengths_S)).sum()

    def sample_mean(self, values_R: Tensor) -> Tensor:
        return (values_R * sample_mean_weights(self.lengths_S)).sum()


ESTIMATORS: dict[str, Callable[[Case], Tensor]] = {
    "ratio": lambda case: log_ratio(case.new, case.old).exp(),
    "advantage_grpo": lambda case: case.advantages(),
    "advantage_dr_grpo": lambda case: case.advantages(disable_grpo_std_normalization=True),
    "token_loss": lambda case: case.loss(),
    "grpo_loss": lambda case: case.sample_mean(case.loss()),
    "dapo_loss": lambda case: case.token_mean(case.loss()),
    "kl_k1": lambda case: case.token_mean(kl_estimate(case.new, case.ref, "k1")),
    "kl_k2": lambda case: case.token_mean(kl_estimate(case.new, case.ref, "k2")),
    "kl_k3": lambda case: case.token_mean(kl_estimate(case.new, case.ref, "k3")),
    "logprob_abs_diff": lambda case: case.token_mean((case.old - case.rollout).abs()),
}

# The same losses as loops over Python numbers, for the gradient.
PLAIN_GRADIENTS: dict[str, Callable[[Case], Tensor]] = {
    "grpo_loss": lambda case: _plain_clip_loss(
        case, 1.0 / (case.lengths_S * len(case.lengths_S)).repeat_interleave(case.lengths_S)
    ),
    "dapo_loss": lambda case: _plain_clip_loss(case, torch.full_like(case.new, 1.0 / len(case.new))),
    "kl_k2": lambda case: 0.5 * ((case.new - case.ref) ** 2).mean(),
    "kl_k3": lambda case: (torch.exp(case.ref - case.new) - 1 - (case.ref - case.new)).mean(),
}


def _plain_clip_loss(case: Case, weights_R: Tensor) -> Tensor:
    advantages_R = case.advantages().to(case.new.dtype).repeat_interleave(case.lengths_S)
    total = torch.zeros((), dtype=case.new.dtype)
    for new, old, advantage, weight in zip(case.new, case.old, advantages_R, weights_R, strict=True):
        ratio = torch.exp(new - old)
        clipped = torch.clamp(ratio, 1 - case.eps_clip, 1 + case.eps_clip_high)
        total = total - weight * torch.min(ratio * advantage, clipped * advantage)
    return total


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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_value(cases: list[dict[str, Any]], name: str, dtype: torch.dtype, tolerance: float) -> None:
    assert cases
    for entry in cases:
        ours = ESTIMATORS[name](_case(entry["inputs"], dtype)).detach().double().reshape(-1)
        torch.testing.assert_close(ours, _flat(entry["expected"][name]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", PLAIN_GRADIENTS)
def test_gradient(cases: list[dict[str, Any]], name: str, dtype: torch.dtype, tolerance: float) -> None:
    for entry in cases:
        ours, exact = _case(entry["inputs"], dtype), _case(entry["inputs"], torch.float64)
        ESTIMATORS[name](ours).backward()
        PLAIN_GRADIENTS[name](exact).backward()
        torch.testing.assert_close(ours.new.grad.double(), exact.new.grad, rtol=tolerance, atol=tolerance)


def test_dapo_gradient_of_the_worked_vector() -> None:
    inputs = {
        "rewards": [1, 0],
        "old": [[-1.0, -0.5], [-2.0, -0.1, -0.7]],
        "new": [[-0.7, -0.6], [-2.5, -0.1, -0.4]],
        "rollout": [[-1.2, -0.5], [-1.0, -0.1, -0.9]],
        "ref": [[-1.1, -0.5], [-2.0, -0.2, -0.7]],
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
    }
    case = _case(inputs, torch.float64)
    case.token_mean(case.loss()).backward()
    assert case.new.grad.tolist() == pytest.approx([0, -0.127963, 0, 0.141421, 0.190899], abs=1e-6)
