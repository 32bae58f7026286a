"""Draws and log-probs: against float64 formulas, the published hash in plain integers, chi-square and transformers.

Statistical tests use fixed seeds and limits at 4.5 standard deviations or a chi-square quantile of 1 - 1e-5, so a
correct generator passes whatever the seed.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from miles.ops import sampling
from miles.ops.sampling import Cuts, row_seeds, sample

MASK_32, MASK_64 = 2**32 - 1, 2**64 - 1


def seeds(keys: list[int], positions: list[int]) -> Tensor:
    return row_seeds(torch.tensor(keys), torch.tensor(positions))


def exponential_noise(seeds_R2: Tensor, vocab_size: int) -> Tensor:
    return -sampling._negative_exponentials(seeds_R2, sampling._vocabulary_words(vocab_size, seeds_R2.device))


def all_cuts(num_rows: int, *, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0, candidates: int) -> Cuts:
    return Cuts(
        torch.arange(num_rows),
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
        candidates,
    )


def chi_square_limit(degrees: int) -> float:
    """Quantile 1 - 1e-5 of chi-square (Wilson and Hilferty)."""
    z = 4.265
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


def mix_32(x: int) -> int:
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ x >> shift) * multiplier) & MASK_32
    return x


def mix_64(x: int) -> int:
    """One output of SplitMix64 whose state was `x`."""
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK_64
    return x ^ x >> 31


def test_noise_is_the_documented_hash_in_plain_integers() -> None:
    keys, positions = [0, 1, 2**63 - 1, -(2**63)], [0, 17, 5, 100_000]
    noise = exponential_noise(seeds(keys, positions), 50)
    for row, (key, position) in enumerate(zip(keys, positions, strict=True)):
        state = (mix_64(key & MASK_64) + position * 0x9E3779B97F4A7C15) & MASK_64
        word = mix_64(state)
        low, high = word & MASK_32, word >> 32
        for token in range(50):
            bits = mix_32(((mix_32(token) ^ low) * (high | 1)) & MASK_32) & 0x7FFFFFFF
            exact = -math.log1p(-(bits + 0.5) / 2**31)
            # v is rounded to float32, which costs relative precision only where 1 - v is small: times that never win
            assert noise[row, token].item() == pytest.approx(exact, rel=1e-6, abs=2**-23 * math.exp(exact))


def test_splitmix_matches_its_published_vector() -> None:
    assert mix_64(1234567) == 6457827717110365317  # first output for seed 1234567 (Vigna, splitmix64.c)


def test_noise_is_a_unit_exponential() -> None:
    noise = exponential_noise(seeds(list(range(100)), list(range(100))), 2000).double().flatten()
    assert noise.min() > 0 and noise.isfinite().all()
    count = noise.numel()
    assert abs(noise.mean() - 1) < 4.5 / math.sqrt(count)
    assert abs(noise.var() - 1) < 4.5 * math.sqrt(8 / count)
    uniform = (-noise).exp().sort().values
    distance = (uniform - (torch.arange(count) + 0.5) / count).abs().max()
    assert distance < 2.5 / math.sqrt(count)  # Kolmogorov-Smirnov, p about 1e-5


@pytest.mark.parametrize("lag", [1, 2, 16, 64])
def test_noise_of_neighbours_is_independent(lag: int) -> None:
    n = 512
    by_position = exponential_noise(seeds([7] * n, list(range(n))), n)
    by_key = exponential_noise(seeds(list(range(n)), [3] * n), n)
    pairs = [
        (by_position[:-lag], by_position[lag:]),
        (by_key[:-lag], by_key[lag:]),
        (by_position[:, :-lag], by_position[:, lag:]),
        (by_position, by_key),
    ]
    for noise_a, noise_b in pairs:
        a, b = (-noise_a.double()).exp().flatten(), (-noise_b.double()).exp().flatten()
        correlation = torch.corrcoef(torch.stack((a, b)))[0, 1].item()
        assert abs(correlation) < 4.5 / math.sqrt(a.numel())
        cells = torch.histogramdd(torch.stack((a, b), 1), bins=[16, 16], range=[0.0, 1.0, 0.0, 1.0]).hist
        statistic = ((cells - a.numel() / 256) ** 2).sum().item() / (a.numel() / 256)
        assert statistic < chi_square_limit(255)


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_draws_follow_the_softmax(spread: float) -> None:
    torch.manual_seed(1)
    logits = spread * torch.randn(13)
    n = 40_000
    tokens = sample(logits.repeat(n, 1), seeds_R2=seeds([5] * n, list(range(n)))).tokens_R
    expected = n * torch.softmax(logits.double(), -1)
    counts = torch.bincount(tokens, minlength=13)
    assert ((counts - expected) ** 2 / expected).sum().item() < chi_square_limit(12)


def test_draws_at_neighbouring_positions_and_keys_are_independent() -> None:
    n, v = 30_000, 4
    logits = torch.tensor([0.0, 0.3, -0.2, 0.5])
    p = torch.softmax(logits.double(), -1)
    along_positions = sample(logits.repeat(n, 1), seeds_R2=seeds([11] * n, list(range(n)))).tokens_R
    along_keys = sample(logits.repeat(n, 1), seeds_R2=seeds(list(range(n)), [11] * n)).tokens_R
    for tokens in (along_positions, along_keys):
        counts = torch.bincount(tokens[:-1] * v + tokens[1:], minlength=v * v).double()
        expected = (n - 1) * torch.outer(p, p).flatten()
        # pairs overlap, so the statistic is a little wider than chi-square with 15 degrees
        assert ((counts - expected) ** 2 / expected).sum().item() < chi_square_limit(24)


def test_rare_tokens_are_drawn_at_their_rate() -> None:
    logits = torch.full((20_000,), -9.0)  # together about 0.71, each 3.6e-5
    logits[0] = 0.0
    n = 3000
    tokens = torch.cat(
        [
            sample(logits.repeat(100, 1), seeds_R2=seeds([3] * 100, list(range(i, i + 100)))).tokens_R
            for i in range(0, n, 100)
        ]
    )
    p = torch.softmax(logits.double(), -1)[0].item()
    assert abs((tokens == 0).sum().item() - n * p) < 4.5 * math.sqrt(n * p * (1 - p))
    rare = tokens[tokens > 0]
    assert rare.unique().numel() > 0.9 * rare.numel()
    assert abs((rare.double() / 20_000).mean() - 0.5) < 4.5 / math.sqrt(12 * rare.numel())


def test_a_row_draws_the_same_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    logits = torch.randn(9, 1000)
    keys, positions = list(range(40, 49)), [5, 3, 9, 100, 1, 2, 77, 8, 5]
    together = sample(logits.clone(), seeds_R2=seeds(keys, positions))
    monkeypatch.setattr(sampling, "_CPU_PIECE", 2500)  # pieces of two rows
    pieces = sample(logits.clone(), seeds_R2=seeds(keys, positions))
    alone = [sample(logits[i : i + 1].clone(), seeds_R2=seeds([keys[i]], [positions[i]])) for i in range(9)]
    for other in (pieces.tokens_R, torch.cat([draw.tokens_R for draw in alone])):
        assert torch.equal(other, together.tokens_R)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_are_those_of_the_tempered_distribution(temperature: float) -> None:
    """Field note 18."""
    torch.manual_seed(3)
    logits = 4 * torch.randn(64, 300)
    drawn = sample(
        logits.clone(),
        seeds_R2=seeds(list(range(64)), [0] * 64),
        temperature_R=torch.full((64,), temperature) if temperature != 1.0 else None,
    )
    expected = torch.log_softmax(logits.double() / temperature, -1).gather(1, drawn.tokens_R[:, None]).squeeze(1)
    assert drawn.log_probs_R.dtype == torch.float32
    torch.testing.assert_close(drawn.log_probs_R.double(), expected, rtol=0, atol=1e-5)


@given(
    top_k=st.sampled_from([-1, 0, 1, 5, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 50),
)
def test_cuts_keep_what_transformers_keeps(top_k: int, top_p: float, min_p: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits = 2 * torch.randn(6, 60)
    expected = logits.clone()
    if top_k > 0:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p > 0.0:
        expected = MinPLogitsWarper(min_p)(None, expected)
    candidates = top_k if top_k > 0 else (60 if top_p < 1.0 else 0)
    changed = logits.clone()
    drawn = sample(
        changed,
        seeds_R2=seeds(list(range(6)), [seed] * 6),
        cuts=all_cuts(6, top_k=top_k, top_p=top_p, min_p=min_p, candidates=candidates),
    )
    assert torch.equal(changed, expected)
    log_probs = torch.log_softmax(expected.double(), -1).gather(1, drawn.tokens_R[:, None]).squeeze(1)
    torch.testing.assert_close(drawn.log_probs_R.double(), log_probs, rtol=0, atol=1e-5)


def test_rows_with_and_without_cuts_share_a_batch() -> None:
    torch.manual_seed(4)
    logits = torch.randn(4, 30)
    cuts = Cuts(
        torch.tensor([1, 3]),
        torch.tensor([3, -1]),
        torch.tensor([1.0, 1.0]),
        torch.tensor([0.0, 0.5]),
        num_candidates=3,
    )
    changed = logits.clone()
    sample(changed, seeds_R2=seeds([0, 1, 2, 3], [0] * 4), cuts=cuts)
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    assert changed[1].isfinite().sum() == 3
    kept = torch.softmax(logits[3], -1) >= 0.5 * torch.softmax(logits[3], -1).max()
    assert torch.equal(changed[3].isfinite(), kept)


def test_one_kept_token_is_always_drawn() -> None:
    n = 5000
    logits = torch.randn(1, 50).repeat(n, 1)
    drawn = sample(logits.clone(), seeds_R2=seeds([1] * n, list(range(n))), cuts=all_cuts(n, top_k=1, candidates=1))
    assert (drawn.tokens_R == logits[0].argmax()).all()
    assert (drawn.log_probs_R == 0).all()


def test_greedy_rows_take_the_largest_logit_and_the_untempered_log_prob() -> None:
    torch.manual_seed(5)
    logits = 3 * torch.randn(6, 40)
    expected = torch.log_softmax(logits.double(), -1)
    all_greedy = sample(logits.clone(), seeds_R2=None)
    some = sample(
        logits.clone(),
        seeds_R2=seeds(list(range(6)), [1] * 6),
        temperature_R=torch.tensor([1.0, 0.7, 1.0, 0.7, 1.0, 0.7]),
        greedy_R=torch.tensor([True, False] * 3),
    )
    for drawn, rows in ((all_greedy, list(range(6))), (some, [0, 2, 4])):
        assert torch.equal(drawn.tokens_R[rows], logits[rows].argmax(-1))
        torch.testing.assert_close(drawn.log_probs_R[rows].double(), expected[rows].max(-1).values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_reported_for_their_row_only(bad: float) -> None:
    logits = torch.randn(3, 20)
    logits[1, 7] = bad
    for seeds_R2 in (None, seeds([0, 1, 2], [0, 0, 0])):
        drawn = sample(logits.clone(), seeds_R2=seeds_R2)
        assert drawn.finite_R.tolist() == [True, False, True]
        assert drawn.log_probs_R[[0, 2]].isfinite().all()
