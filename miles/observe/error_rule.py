"""When is a run dead that goes on running? Judged from its log alone, so that it also works for public Miles.

Every `INTERVAL_S` the errors of the last `WINDOW_S` are counted. A busy engine has bursts of errors that its client
retries; a dead one never stops. So only a count above the limit in many checks in a row ends a run. The second rule is
the absence of steps: shorter once the log shows a cause that no run survives.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from miles.observe.symptoms import Symptom, recognise

INTERVAL_S = 30
WINDOW_S = 60
NUM_OFFSETS = 30
LIMIT = 100
CHECKS = 10
NO_STEP_MINUTES = 60.0
DOOMED_MINUTES = 10.0  # without a step after a symptom that no run survives
DEAD_RATE = 45  # errors per second of the dead engine that the limits were made for

ENGINE_ERROR = re.compile(r"503 Service Unavailable")
_STEP = re.compile(r" (?:rollout|step|perf|eval) \d+: \{")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)")
# Ray puts the name of a process and terminals put colours before the time; further on it is part of a message.
_STAMP_WITHIN = 100


@dataclass(frozen=True)
class Limits:
    """More than `errors` in each of `checks` checks in a row ends a run, and so do `no_step_s` seconds without a line
    of a step; 0 switches that off."""

    errors: int = LIMIT
    checks: int = CHECKS
    no_step_s: float = NO_STEP_MINUTES * 60


@dataclass(frozen=True)
class Seen:
    """What a look at the log gave: errors of the last `WINDOW_S`, and of the new lines whether one is of a step and
    what was recognised."""

    num_errors: int = 0
    has_step: bool = False
    symptoms: tuple[Symptom, ...] = ()


def look(lines: Iterable[str]) -> Seen:
    """Read some lines. A symptom before the last line of a step has been survived."""
    num_errors, has_step, symptoms = 0, False, dict[str, Symptom]()
    for line in lines:
        if ENGINE_ERROR.search(line):
            num_errors += 1
        if _STEP.search(line):
            has_step = True
            symptoms.clear()
        elif (symptom := recognise(line)) is not None:
            symptoms[symptom.what] = symptom
    return Seen(num_errors, has_step, tuple(symptoms.values()))


@dataclass
class Judge:
    """Takes in one look per check; `now` is a monotonic time in seconds."""

    limits: Limits
    started: float
    strikes: int = 0
    symptoms: dict[str, Symptom] = field(default_factory=dict)
    _last_step: float | None = None

    def check(self, seen: Seen, now: float) -> str | None:
        """Why the run must be ended, as one sentence, or None."""
        if seen.has_step:
            self._last_step = now
            self.symptoms.clear()
        self.symptoms |= {symptom.what: symptom for symptom in seen.symptoms}
        self.strikes = self.strikes + 1 if seen.num_errors > self.limits.errors else 0
        if self.strikes >= self.limits.checks:
            return self._with_cause(
                f"more than {self.limits.errors} errors from the rollout engine in each of {self.limits.checks} "
                f"checks, last {seen.num_errors} in {WINDOW_S} s"
            )
        quiet_s = now - (self.started if self._last_step is None else self._last_step)
        limit_s = self.limits.no_step_s
        if limit_s and any(symptom.deadly for symptom in self.symptoms.values()):
            limit_s = min(limit_s, DOOMED_MINUTES * 60)
        if limit_s and quiet_s >= limit_s:
            return self._with_cause(f"no line of a step for {quiet_s / 60:.0f} minutes")
        return None

    def paused(self, seconds: float) -> None:
        """The run could not make a step for this long, and that is no fault of it."""
        self.started += seconds
        self._last_step = None if self._last_step is None else self._last_step + seconds

    def _with_cause(self, sentence: str) -> str:
        known = [symptom for symptom in self.symptoms.values() if not symptom.is_consequence]
        return sentence + "".join(f". Likely cause: {symptom.what}; {symptom.fix}" for symptom in known)


@dataclass(frozen=True)
class Timeline:
    """The errors of a log by time, in seconds since its first time stamp. A line without one has that of the line
    before."""

    first: datetime
    errors: Sequence[int]
    end: int
    longest_gap_s: int  # between two lines of steps, or the ends of the log

    def errors_in_window(self, end: int) -> int:
        """Of the seconds before `end`; the second `end` is not over."""
        return bisect_left(self.errors, end) - bisect_left(self.errors, end - WINDOW_S)


def read_timeline(lines: Iterable[str]) -> Timeline | None:
    """None when no line has a time stamp."""
    first: datetime | None = None
    now, last_step, gap = 0, 0, 0
    errors: list[int] = []
    for line in lines:
        if stamp := _STAMP.search(line, 0, _STAMP_WITHIN):
            time = datetime.fromisoformat(stamp[1].replace(" ", "T"))
            first = first or time
            now = max(now, round((time - first).total_seconds()))
        if ENGINE_ERROR.search(line):
            errors.append(now)
        if _STEP.search(line):
            gap, last_step = max(gap, now - last_step), now
    return None if first is None else Timeline(first, errors, now, max(gap, now - last_step))


@dataclass(frozen=True)
class Replay:
    """What the rule would have done, had the watch begun at any of `NUM_OFFSETS` seconds."""

    checks: int
    num_stopped: int
    most_in_a_row: int
    stopped_after: tuple[int, int] | None  # seconds from the first error to the stop: earliest, latest


def replay(timeline: Timeline, limits: Limits) -> Replay:
    stops: list[int] = []
    most = 0
    for offset in range(NUM_OFFSETS):
        in_a_row, stopped = 0, False
        for time in range(offset, timeline.end + INTERVAL_S, INTERVAL_S):
            in_a_row = in_a_row + 1 if timeline.errors_in_window(time) > limits.errors else 0
            most = max(most, in_a_row)
            if in_a_row >= limits.checks and not stopped:
                stopped = True
                stops.append(time - timeline.errors[0])
    return Replay(limits.checks, len(stops), most, (min(stops), max(stops)) if stops else None)


def dead_engine(limits: Limits) -> Replay:
    """The same for an engine that is dead from the start."""
    end = INTERVAL_S * (limits.checks + 10)
    errors = [second for second in range(end) for _ in range(DEAD_RATE)]
    return replay(Timeline(datetime.min, errors, end, end), limits)
