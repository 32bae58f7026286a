"""The one-pass sampler, interpreted, against ops/sampling.py: same noise, so the same tokens.

Log-probs to 1e-5: float32 sums over 9,000 terms. Tokens are equal unless two arrivals are closer than rounding; the
seeds here have no such pair.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from miles.ops import kernels
from miles.ops.numerics import invariant
from miles.ops.sampling import Cuts, row_seeds, sample
from tests.gpu.ops.references import require_interpreter

require_interpreter()

from miles.ops.triton_logprob import chunk_log_probs  # noqa: E402
from miles.ops.triton_sampling import sample_uncut  # noqa: E402


def test_same_draws_as_the_reference() -> None:
    torch.manual_seed(0)
    for num_ids in (9000, 260):
        logits = torch.randn(12, num_ids) * 2
        seeds = row_seeds(torch.arange(12) * 7919 - 3, torch.arange(12))
        temperatures = torch.linspace(0.5, 1.5, 12)
        greedy = torch.arange(12) % 4 == 0
        temperatures[greedy] = 1.0
        actual = sample_uncut(logits, seeds_R2=seeds, temperature_R=temperatures, greedy_R=greedy)
        expected = sample(logits.clone(), seeds_R2=seeds, temperature_R=temperatures, greedy_R=greedy)
        assert torch.equal(actual.tokens_R, expected.tokens_R)
        torch.testing.assert_close(actual.log_probs_R, expected.log_probs_R, rtol=1e-5, atol=1e-5)
        assert actual.finite_R.all()
        plain = sample_uncut(logits, seeds_R2=seeds)
        assert torch.equal(plain.tokens_R, sample(logits.clone(), seeds_R2=seeds).tokens_R)


def test_the_trainer_computes_the_same_bits() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 9000) * 3
    seeds = row_seeds(torch.arange(5), torch.arange(5))
    draw = sample_uncut(logits, seeds_R2=seeds, temperature_R=torch.full((5,), 0.7))
    assert torch.equal(chunk_log_probs(logits, draw.tokens_R, 0.7)[0], draw.log_probs_R)


def test_rows_that_are_not_finite_are_reported() -> None:
    logits = torch.zeros(4, 300)
    logits[1, 200], logits[2, 7] = torch.nan, torch.inf
    seeds = row_seeds(torch.arange(4), torch.arange(4))
    assert sample_uncut(logits, seeds_R2=seeds).finite_R.tolist() == [True, False, False, True]


def test_rows_with_cuts_change_no_bit_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on_cpu_too", True)
    torch.manual_seed(2)
    logits, seeds = torch.randn(12, 5000) * 3, row_seeds(torch.arange(12), torch.arange(12))
    is_cut, temperatures = torch.arange(12) % 4 == 1, torch.full((12,), 0.7)
    rows = is_cut.nonzero().squeeze(1)
    cuts = Cuts(rows, torch.full((3,), 5), torch.ones(3), torch.zeros(3), num_candidates=5)
    tempered = logits.clone()
    with invariant():
        alone = sample(logits.clone(), seeds_R2=seeds, temperature_R=temperatures)
        mixed = sample(tempered, seeds_R2=seeds, temperature_R=temperatures, cuts=cuts)
        only = dataclasses.replace(cuts, rows_R=torch.arange(3))
        apart = sample(logits[rows], seeds_R2=seeds[rows], temperature_R=temperatures[rows], cuts=only)
    assert torch.equal(mixed.tokens_R[is_cut], apart.tokens_R)
    assert torch.equal(mixed.log_probs_R[is_cut], apart.log_probs_R)
    assert torch.equal(mixed.tokens_R[~is_cut], alone.tokens_R[~is_cut])
    assert torch.equal(mixed.log_probs_R[~is_cut], alone.log_probs_R[~is_cut])
    assert mixed.finite_R.all() and (tempered.isfinite().sum(1) == torch.where(is_cut, 5, 5000)).all()
    expected, _, _ = chunk_log_probs(tempered[rows], mixed.tokens_R[rows], 1.0)
    assert torch.equal(mixed.log_probs_R[rows], expected)
