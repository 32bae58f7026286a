"""Is a difference between two settings real? A paired bootstrap over prompts and seeds.

Two sources of chance are kept apart. Answers are drawn: that chance is measured well, by drawing the prompts of each
run again (both runs of a pair keep the same prompts, so their difficulty cancels). Runs take different ways: that
spread between seeds is known from two or three runs only, so its size is drawn from what it can be, given the
runs and how large it usually is (a half-Cauchy prior whose scale is a share of the spread of single answers).

    difference of pair s = true difference + chance of its answers (bootstrap) + N(0, 2 t^2),   t: spread of a seed

With the size of `t` drawn by its likelihood instead of guessed from two numbers, three seeds are enough to find a
difference of 0.05, and few enough false alarms remain (`benchmarks/compare_calibration.py` measures both).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

NUM_DRAWS = 2000
PRIOR_SHARE = 0.04  # of the spread of single values: 0.019 for rewards of 0 and 1 near 0.65
POWER_Z = 2.8  # distance in standard errors that is found in 80 of 100 comparisons at 95 percent
CONFIDENCE = 0.95

# What a run is compared by: one value per unit, where a unit is a prompt of a step, or a whole step.
Units = Mapping[tuple[int, str], float]

REAL, INSIDE, UNSURE = "real", "inside the spread", "cannot tell"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`low` and `high` hold the true difference with 95 percent confidence. `spread` is of one seed of the baseline
    (standard deviation), None with one run. `more_seeds` is how many more pairs would settle it."""

    baseline: float
    change: float
    difference: float
    low: float
    high: float
    spread: float | None
    num_pairs: int
    paired: bool  # both sides answered the same prompts
    word: str
    more_seeds: int = 0

    @property
    def text(self) -> str:
        if self.word == UNSURE:
            return f"cannot tell: {self.more_seeds} more seed{'s' if self.more_seeds > 1 else ''} needed"
        return self.word


def compare_units(baseline: Sequence[Units], change: Sequence[Units], *, scale: float, seed: int = 0) -> Verdict:
    """Runs of both sides in the order of their seeds. `scale` is the spread of single values (of answers: their
    standard deviation)."""
    generator = np.random.default_rng(seed)
    num_pairs = min(len(baseline), len(change))
    sides = list(baseline), list(change)
    draws, paired = [], True
    for place in range(num_pairs):
        first, second = _common(baseline[place], change[place])
        is_paired = first.keys() == second.keys()
        sides[0][place], sides[1][place] = first, second
        draws.append(_draw_pair(first, second, generator, paired=is_paired))
        paired = paired and is_paired
    means = [_mean(units) for units in sides[0]], [_mean(units) for units in sides[1]]
    differences = np.array([b - a for a, b in zip(means[0][:num_pairs], means[1][:num_pairs], strict=True)])
    difference = float(np.mean(means[1]) - np.mean(means[0]))
    variances = [float(np.var(drawn)) for drawn in draws]
    spreads = _draw_spreads(means, differences, variances, paired, PRIOR_SHARE * scale, generator)
    chance = np.mean(draws, axis=0) - float(differences.mean())
    effective = 2.0 / (1.0 / len(baseline) + 1.0 / len(change))  # runs without a partner count too
    total = chance + generator.normal(size=NUM_DRAWS) * spreads * math.sqrt(2.0 / effective)
    low, high = difference + np.quantile(total, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    spread = float(np.std(means[0], ddof=1)) if len(baseline) > 1 else None
    word, more = _judge(difference, float(low), float(high), spread, len(change), float(np.std(total)))
    return Verdict(
        float(np.mean(means[0])), float(np.mean(means[1])), difference, float(low), float(high), spread,
        num_pairs, paired, word, more,
    )  # fmt: skip


def _mean(units: Units) -> float:
    return float(np.mean(list(units.values())))


def _common(first: Units, second: Units) -> tuple[Units, Units]:
    """Both runs on the units they share, when these are most of them; else as they are."""
    shared = first.keys() & second.keys()
    if len(shared) * 2 <= max(len(first), len(second)):
        return first, second
    order = sorted(shared)
    return {key: first[key] for key in order}, {key: second[key] for key in order}


def _draw_pair(first: Units, second: Units, generator: np.random.Generator, *, paired: bool) -> np.ndarray:
    """Differences of two runs with their prompts drawn again: the same ones for both when they are paired."""
    values = [np.array(list(units.values())) for units in (first, second)]
    if paired:
        return _resampled_means(values[1] - values[0], generator)
    return _resampled_means(values[1], generator) - _resampled_means(values[0], generator)


def _resampled_means(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    places = generator.integers(0, len(values), size=(NUM_DRAWS, len(values)), dtype=np.int32)
    means: np.ndarray = values[places].mean(axis=1)
    # A sample of n shows (n - 1) / n of the variance it was drawn from.
    return means.mean() + (means - means.mean()) * math.sqrt(len(values) / max(len(values) - 1, 1))


def _draw_spreads(
    means: tuple[Sequence[float], Sequence[float]],
    differences: np.ndarray,
    variances: Sequence[float],
    paired: bool,
    scale: float,
    generator: np.random.Generator,
) -> np.ndarray:
    """The spread of a seed, drawn by how well it explains what is seen: of the pairs, or of both sides on their own
    when their prompts differ."""
    grid = scale * np.concatenate([np.linspace(0.01, 3, 60), np.geomspace(3.1, 60, 40)])
    widths = np.gradient(grid)
    within = float(np.mean(variances))
    log_weights = -np.log1p((grid / scale) ** 2) + np.log(widths)
    groups = [(differences, 2.0, within)] if paired else [(np.array(side), 1.0, within / 2) for side in means]
    for values, times, noise in groups:
        variance = noise + times * grid**2
        deviation = float(np.sum((values - values.mean()) ** 2))
        log_weights += -0.5 * (len(values) - 1) * np.log(variance) - 0.5 * deviation / variance
    weights = np.exp(log_weights - log_weights.max())
    drawn: np.ndarray = generator.choice(grid, size=NUM_DRAWS, p=weights / weights.sum())
    return drawn


def _judge(
    difference: float, low: float, high: float, spread: float | None, num_changed: int, error: float
) -> tuple[str, int]:
    """Real needs two seeds of the change and an interval without 0. Inside the spread: small against what a seed alone
    does. Else: how many seeds the difference would need to be found, if it is what it seems."""
    if num_changed >= 2 and (low > 0 or high < 0):
        return REAL, 0
    if spread is not None and abs(difference) <= spread:
        return INSIDE, 0
    needed = math.ceil(num_changed * (POWER_Z * error / max(abs(difference), 1e-12)) ** 2)
    return UNSURE, max(1, 2 - num_changed, min(needed, 99) - num_changed)
