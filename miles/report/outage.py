"""Tells bursts of refused requests from a dead engine, by time: the manual's watchdog rule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 60.0
EVERY_S = 30.0
LIMIT = 100
CHECKS = 10
OFFSETS = 30


@dataclass(frozen=True, slots=True)
class Replay:
    """The rule at one offset: most checks in a row above the limit, and seconds until it stops the run, if it does."""

    offset_s: float
    most_in_row: int
    stopped_after_s: float | None


def replay(
    times_s: Sequence[float], *, end_s: float, offset_s: float = 0.0, limit: int = LIMIT, checks: int = CHECKS
) -> Replay:
    """Errors at `times_s` (seconds, in order, from the start of the watch) checked every 30 s over the last 60 s."""
    strikes = most = 0
    stopped: float | None = None
    now = offset_s
    while now <= end_s:
        count = bisect_right(times_s, now) - bisect_right(times_s, now - WINDOW_S)
        strikes = strikes + 1 if count > limit else 0
        most = max(most, strikes)
        if strikes >= checks and stopped is None:
            stopped = now
        now += EVERY_S
    return Replay(offset_s, most, stopped)


def replay_offsets(times_s: Sequence[float], *, end_s: float, checks: int = CHECKS) -> list[Replay]:
    """The rule started at each of 30 offsets, one second apart: when a watch begins is chance."""
    return [replay(times_s, end_s=end_s, offset_s=float(offset), checks=checks) for offset in range(OFFSETS)]
