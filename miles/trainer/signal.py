"""From one advantage per sample to one per trained token: discounting, GAE, KL penalty, distillation, whitening.

Pure functions in float64. Tokens that are not trained have no place in the vectors, so they neither earn nor cost
anything and time does not pass on them. R: trained tokens; S: samples; L: tokens of the longest answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles.config.sections import AlgorithmConfig
from miles.trainer.kl import kl_estimate

WHITEN_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Signal:
    """What each token is reinforced by, and what a critic should have predicted for it. Float32."""

    advantages_R: Tensor
    returns_R: Tensor


@dataclass(frozen=True, slots=True)
class Judgements:
    """Log-probs of the drawn tokens by other models, and values of a critic; None where the flags need none."""

    policy_R: Tensor | None = None
    ref_R: Tensor | None = None
    teacher_R: Tensor | None = None
    values_R: Tensor | None = None


def scan_back(values_R: Tensor, lengths_S: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_(t+1) within each answer."""
    lengths = lengths_S.tolist()
    # On the CPU: a few thousand tiny additions one after the other are faster there than as kernels.
    padded_LS = torch.nn.utils.rnn.pad_sequence(values_R.cpu().split(lengths))
    for t in range(len(padded_LS) - 2, -1, -1):
        padded_LS[t] += decay * padded_LS[t + 1]
    scanned = [column[:length] for column, length in zip(padded_LS.unbind(1), lengths, strict=True)]
    return torch.cat(scanned).to(values_R.device)


def on_last_token(values_S: Tensor, lengths_S: Tensor) -> Tensor:
    """0 on every token but the last of each answer, which gets the number of its answer."""
    values_R = torch.zeros(int(lengths_S.sum()), dtype=values_S.dtype, device=values_S.device)
    written = lengths_S > 0
    values_R[lengths_S.cumsum(0)[written] - 1] = values_S[written]
    return values_R


def next_of_answer(values_R: Tensor, lengths_S: Tensor) -> Tensor:
    """The number of the following token of the same answer, 0 after its last."""
    shifted_R = torch.cat((values_R[1:], values_R.new_zeros(1)))
    shifted_R[lengths_S.cumsum(0)[lengths_S > 0] - 1] = 0.0
    return shifted_R


def gae(rewards_R: Tensor, values_R: Tensor, lengths_S: Tensor, *, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, arXiv 1506.02438. After the last token nothing is worth anything, in cut answers too."""
    deltas_R = rewards_R + gamma * next_of_answer(values_R, lengths_S) - values_R
    advantages_R = scan_back(deltas_R, lengths_S, gamma * lambd)
    return advantages_R, advantages_R + values_R


def whiten(values_R: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens, variance with n - 1; equal values give exactly 0."""
    if len(values_R) == 0 or bool((values_R == values_R[0]).all()):
        return torch.zeros_like(values_R)
    return (values_R - values_R.mean()) * (values_R.var() + WHITEN_EPS).rsqrt()


def token_signal(
    advantages_S: Tensor,
    lengths_S: Tensor,
    judged: Judgements,
    config: AlgorithmConfig,
    *,
    scored_S: Tensor | None = None,
) -> Signal:
    """Advantage and return of each token. `advantages_S` come from `advantages.py`.

    The KL penalty (`--kl-coef`) and the distance to the teacher (`--use-opd`) count before whitening. An answer without
    a reward (False in `scored_S`) teaches nothing: it is left out of the whitening, its advantages are 0 and its
    returns what the critic expects.
    """
    advantages_S = advantages_S.to(lengths_S.device)
    if scored_S is None:
        scored_S = torch.ones_like(advantages_S, dtype=torch.bool)
    scored_R = scored_S.to(lengths_S.device).repeat_interleave(lengths_S)
    if lengths_S.sum() == 0:
        nothing_R = torch.zeros(0, device=lengths_S.device)
        return Signal(nothing_R, nothing_R)
    penalty_R = torch.zeros(int(lengths_S.sum()), dtype=torch.float64, device=lengths_S.device)
    if config.kl_coef != 0.0:
        assert judged.policy_R is not None and judged.ref_R is not None, "--kl-coef needs policy and reference scores"
        penalty_R = config.kl_coef * kl_estimate(judged.policy_R.double(), judged.ref_R.double(), config.kl_loss_type)
    if config.advantage_estimator == "ppo":
        assert judged.values_R is not None, "ppo needs the values of a critic"
        rewards_R = on_last_token(advantages_S, lengths_S) - penalty_R
        values_R = judged.values_R.double()
        advantages_R, returns_R = gae(rewards_R, values_R, lengths_S, gamma=config.gamma, lambd=config.lambd)
    elif config.advantage_estimator == "reinforce_plus_plus":
        advantages_R = scan_back(on_last_token(advantages_S, lengths_S) - penalty_R, lengths_S, config.gamma)
        returns_R = advantages_R
    else:
        advantages_R = advantages_S.repeat_interleave(lengths_S) - penalty_R
        returns_R = advantages_R
    if judged.teacher_R is not None:
        assert judged.policy_R is not None, "--use-opd needs the policy's scores"
        reverse_kl_R = judged.policy_R.double() - judged.teacher_R.double()
        advantages_R = advantages_R - config.opd_kl_coef * reverse_kl_R
    if config.normalize_advantages:
        advantages_R = advantages_R.masked_scatter(scored_R, whiten(advantages_R[scored_R]))
    expected_R = torch.zeros_like(returns_R) if judged.values_R is None else judged.values_R.double()
    advantages_R = advantages_R.where(scored_R, 0.0)
    return Signal(advantages_R.float(), returns_R.where(scored_R, expected_R).float())
