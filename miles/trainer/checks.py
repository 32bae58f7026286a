"""Checks of the numbers that run in every training run.

At the first step some answers are scored twice by the same weights: packed together, and each alone. Packing must not
change what a token is worth, so the two must agree to rounding. R: trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles.config.sections import RunConfig
from miles.errors import TrainError
from miles.model.decoder import Decoder
from miles.trainer.batch import TokenBatch, micro_batches
from miles.trainer.forward import Scorer

NUM_CHECKED = 8


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Largest mean log-ratio, share of tokens outside of the clip range, and log-prob gap of one token."""

    ppo_kl: float
    clipfrac: float
    gap: float


LIMITS = {torch.float32: CheckLimits(1e-5, 1e-10, 1e-3), torch.bfloat16: CheckLimits(0.01, 0.05, 2.0)}

# `--ci-test`, at the first optimizer step of a rollout. A ratio to detached log-probs is exactly 1; one to a pass in
# another packing has its rounding.
CI_DETACHED = CheckLimits(1e-9, 1e-10, 0.0)
CI_GAP = 0.03  # mean distance of trainer and engine
GAP = "train/train_rollout_logprob_abs_diff"


def rescore_in_another_packing(
    model: Decoder, scorer: Scorer, batch: TokenBatch, config: RunConfig, *, max_tokens: int
) -> dict[str, float]:
    """Metrics of the comparison of packs of up to `max_tokens` with single answers. `TrainError` beyond a limit."""
    trained = [i for i, target in enumerate(batch.targets) if len(target.ids)]
    share = config.batch.share_prompts_in_training
    every = 1 if share else max(len(trained) // NUM_CHECKED, 1)  # neighbours share a prompt
    chosen = trained[::every][:NUM_CHECKED]
    if not chosen:
        return {}
    lengths_S = batch.lengths_S[torch.tensor(chosen, device=batch.lengths_S.device)]
    part = TokenBatch([batch.samples[i] for i in chosen], [batch.targets[i] for i in chosen], lengths_S, None)
    everyone = range(len(chosen))
    together_R, _ = scorer.score_all(model, micro_batches(part, everyone, max_tokens=max_tokens, share=share))
    alone_R, _ = scorer.score_all(model, micro_batches(part, everyone, max_tokens=max_tokens, max_samples=1))
    if not (together_R.isfinite() & alone_R.isfinite()).all():
        return {}  # the optimizer step will name the samples
    low, high = config.algorithm.eps_clip, config.algorithm.eps_clip_high or config.algorithm.eps_clip
    ratio_R = (together_R - alone_R).exp()
    found = {
        "train/check_ppo_kl": float((alone_R - together_R).mean()),
        "train/check_clipfrac": float(((ratio_R < 1 - low) | (ratio_R > 1 + high)).double().mean()),
        "train/check_gap_max": float((alone_R - together_R).abs().max()),
    }
    limits = LIMITS[model.head_weight.dtype]
    bounds = dict(zip(found, (limits.ppo_kl, limits.clipfrac, limits.gap), strict=True))
    _hold("the same answers packed together and alone do not have the same log-probs", found, bounds)
    return found


def check_rollout(record: dict[str, float], *, detached: bool, dtype: torch.dtype) -> None:
    """`--ci-test`: the first optimizer step of a rollout is judged against the weights that make it, so nothing has
    moved yet."""
    limits = CI_DETACHED if detached else LIMITS[dtype]
    bounds = {"train/ppo_kl": limits.ppo_kl, "train/pg_clipfrac": limits.clipfrac, GAP: CI_GAP}
    _hold("--ci-test: log-probs of the first optimizer step of a rollout are too far apart", record, bounds)


def check_gap(log_probs_R: Tensor, rollout_log_probs_R: Tensor, *, limit: float, exact: bool = False) -> None:
    """Raise a `TrainError` when trainer and engine differ by more than `limit` on average, or with `exact` at all."""
    gap_R = (log_probs_R - rollout_log_probs_R).abs().double()
    gap, num_differ = float(gap_R.mean()), int((gap_R > 0).sum())
    if exact and num_differ > 0:
        raise TrainError(
            f"--true-on-policy-mode: trainer and engine differ in {num_differ} of {len(gap_R)} log-probs, by up to "
            f"{float(gap_R.max()):.3g} nat; the weights are as they were before this optimizer step. Run `miles check` "
            "with these flags; --max-logprob-gap 0 goes on regardless"
        )
    if gap > limit:
        raise TrainError(
            f"trainer and engine differ by {gap:.4g} nat per token on average, more than --max-logprob-gap {limit}; "
            "the weights are as they were before this optimizer step. Usual causes: stale weights in the engine, "
            "another temperature or tokenizer on one side, old samples. --max-logprob-gap 0 goes on regardless"
        )


def _hold(what: str, found: dict[str, float], bounds: dict[str, float]) -> None:
    broken = [
        f"{name} is {found[name]:.3g}, at most {bound:g}"
        for name, bound in bounds.items()
        if name in found and not abs(found[name]) <= bound
    ]
    if broken:
        raise TrainError(f"{what}: {'; '.join(broken)}. --ci-disable-kl-checker switches this check off")
