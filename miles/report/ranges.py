"""Healthy ranges of a setup, built from several seeds of it, and the alarms that follow from them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from miles.errors import ConfigError, StorageError
from miles.observe.atomic import write_atomically
from miles.report import signals
from miles.report.runs import RunData

SCHEMA = 1
MIN_RUNS = 2
# A new healthy run leaves the range of a few seeds now and then, so an alarm needs a mean of five steps this much
# (in widths of the range) outside of it, and at step 0 a value this many times the highest one.
MARGIN = 0.5
STEP_ZERO_TIMES = 2.0
FLOOR = 0.05  # least width, as a share of the size of the values: a range of equal values has none

Range = tuple[float, float]


@dataclass(frozen=True)
class Ranges:
    """Lowest and highest value of each signal: at step 0, in the first ten steps, in all steps."""

    runs: tuple[str, ...]
    step_zero: dict[str, Range]
    first_ten: dict[str, Range]
    every: dict[str, Range]

    def gap_limit(self) -> float | None:
        """Log-prob gap above which step 0 is not healthy; None when the runs had none."""
        if "gap" not in self.step_zero:
            return None
        return max(self.step_zero["gap"][1] * STEP_ZERO_TIMES, 1e-12)


def build_ranges(runs: Sequence[RunData]) -> Ranges:
    """Raises `ConfigError` with fewer than two runs: the spread of one run says nothing about the next."""
    if len(runs) < MIN_RUNS:
        raise ConfigError(f"healthy ranges need at least {MIN_RUNS} runs of the same setup with different seeds")
    step_zero, first_ten, every = {}, {}, {}
    for signal in signals.SIGNALS:
        series = [signals.values(run, signal.key) for run in runs]
        series = [values for values in series if values]
        if len(series) < MIN_RUNS:
            continue
        step_zero[signal.key] = _range([values[0] for values in series])
        first_ten[signal.key] = _range([value for values in series for value in values[: signals.FIRST_STEPS]])
        every[signal.key] = _range([value for values in series for value in values])
    return Ranges(tuple(run.name for run in runs), step_zero, first_ten, every)


def _range(values: Sequence[float]) -> Range:
    return min(values), max(values)


def save_ranges(path: Path, ranges: Ranges) -> None:
    data = {"schema": SCHEMA, **asdict(ranges)}
    try:
        write_atomically(path, json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"{path}: cannot write the ranges: {error.strerror}") from error


def load_ranges(path: Path) -> Ranges:
    """Raises `ConfigError` when the file is missing or is no file of ranges."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        parts = [
            {str(key): (float(low), float(high)) for key, (low, high) in data[name].items()}
            for name in ("step_zero", "first_ten", "every")
        ]
        return Ranges(tuple(data["runs"]), *parts)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the healthy ranges: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: holds no ranges; `miles compare RUN RUN --ranges {path}` writes them") from error


@dataclass
class RangeAlarm:
    """Follows the steps of a run and says, once for each signal, when it leaves its healthy range."""

    ranges: Ranges
    recent: dict[str, deque[float]] = field(default_factory=dict)
    raised: set[str] = field(default_factory=set)

    def check(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Alarms of this step, as sentences."""
        alarms = []
        for signal in signals.SIGNALS:
            value = next((metrics[name] for name in signal.names if name in metrics), None)
            if value is None or signal.key in self.raised or signal.key not in self.ranges.every:
                continue
            recent = self.recent.setdefault(signal.key, deque(maxlen=signals.MEAN_STEPS))
            recent.append(value)
            alarm = self._step_zero(signal, value) if step == 0 else None
            if alarm is None and len(recent) == signals.MEAN_STEPS:
                alarm = self._mean(signal, fmean(recent))
            if alarm is not None:
                self.raised.add(signal.key)
                alarms.append(alarm)
        return alarms

    def _step_zero(self, signal: signals.Signal, value: float) -> str | None:
        limit = self.ranges.gap_limit()
        if signal.key != "gap" or limit is None or value <= limit:
            return None
        high = self.ranges.step_zero[signal.key][1]
        return f"{signal.title} at step 0 is {value:.3g}, healthy runs had at most {high:.3g}: {signal.watch}"

    def _mean(self, signal: signals.Signal, mean: float) -> str | None:
        low, high = self.ranges.every[signal.key]
        room = MARGIN * max(high - low, FLOOR * max(abs(low), abs(high)), 1e-9)
        if low - room <= mean <= high + room:
            return None
        text = f"{signal.title}: the mean of the last {signals.MEAN_STEPS} steps is {mean:.3g}"
        return f"{text}, healthy runs were in {low:.3g} to {high:.3g}: {signal.watch}"
