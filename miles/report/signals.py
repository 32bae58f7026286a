"""The numbers that tell whether a run is healthy, and what is known of their ranges before any run of your own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from miles.report.runs import RunData

MEAN_STEPS = 5  # one step tells little: trends are read from means over this many
FIRST_STEPS = 10
GAP = "train/train_rollout_logprob_abs_diff"


@dataclass(frozen=True, slots=True)
class Signal:
    """`names` are alternatives, best first. `watch` says which change needs action."""

    key: str
    title: str
    names: tuple[str, ...]
    hue: str
    unit: str
    watch: str
    first_five: bool = False  # one of the five numbers of the first ten steps


SIGNALS = (
    Signal(
        "reward", "Reward", ("rollout/raw_reward",), "green", "",
        "should rise over tens of steps; read means, not single steps", first_five=True,
    ),
    Signal(
        "length", "Answer length", ("rollout/response_lengths", "rollout/response_len/mean"), "green", "tokens",
        "a jump to the limit or to almost nothing is a broken run", first_five=True,
    ),
    Signal(
        "truncated", "Cut answers", ("rollout/truncated", "rollout/truncated_ratio"), "amber", "share",
        "cut answers earn nothing: above a quarter, raise the limit",
    ),
    Signal(
        "gap", "Log-prob gap", (GAP,), "violet", "nat",
        "trainer against engine; flat, a jump means that they compute different models", first_five=True,
    ),
    Signal(
        "kl", "KL to old policy", ("train/ppo_kl",), "blue", "nat",
        "0 at the first update of a rollout; growth means too many or too large updates", first_five=True,
    ),
    Signal(
        "clip", "Clip fraction", ("train/pg_clipfrac",), "blue", "share",
        "0 with one update per rollout; above 0.3 updates are too large",
    ),
    Signal(
        "entropy", "Entropy", ("rollout/entropy", "train/entropy_loss"), "violet", "nat",
        "a fall to almost 0 ends exploration",
    ),
    Signal(
        "grad", "Gradient norm", ("train/grad_norm",), "blue", "norm",
        "spikes of ten times the median, or exactly 0, need a look", first_five=True,
    ),
)  # fmt: skip
BY_KEY = {signal.key: signal for signal in SIGNALS}


def points(run: RunData, key: str) -> list[tuple[int, float]]:
    """(step, value) of a signal under the first of its names that the run has."""
    for name in BY_KEY[key].names:
        series = run.series(name)
        if series:
            return series
    return []


def values(run: RunData, key: str) -> list[float]:
    return [value for _, value in points(run, key)]


def moving_mean(series: Sequence[float], width: int = MEAN_STEPS) -> list[float]:
    """Mean of each value and up to `width - 1` values before it."""
    return [fmean(series[max(0, end - width) : end]) for end in range(1, len(series) + 1)]


def window(num_steps: int) -> int:
    """Steps at the start and at the end of a run whose means are compared: 8 of 48, a third of a short run."""
    return max(1, min(8, num_steps // 3))


def ends(series: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last steps."""
    width = window(len(series))
    return fmean(series[:width]), fmean(series[-width:])
