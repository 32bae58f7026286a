"""When does a worker count as hung? Pure logic on a clock that stops while the watcher itself does not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A gap between two ticks beyond this means that the watcher was not running either (paused container, suspended
# machine, everything stopped): that time says nothing about the worker.
MAX_TICK_S = 0.5

# Importing torch and reading weights hold the interpreter for long stretches on a slow disk.
START_SILENCE_S = 120.0
START_PHASES = frozenset({"start", "load"})

# Without a deadline of its own, a phase may last as long as it shows progress at least this often.
DEFAULT_STALL_S = 1800.0


class Watchdog:
    """Follows the beats of one worker.

    heartbeat_timeout_s: longest silence. While starting up it is `START_SILENCE_S` at least.
    phase_deadlines: longest time of a phase, by name. Any other phase may go on while it progresses.
    """

    def __init__(self, *, heartbeat_timeout_s: float, phase_deadlines: Mapping[str, float], now: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._phase_deadlines = phase_deadlines
        self._last_tick = now
        self._clock = 0.0
        self._last_beat = self._phase_start = self._last_progress = 0.0
        self._counts = (0, 0)
        self._paused = False
        self.phase = "start"
        self.detail = ""
        self.step = -1
        self.num_steps: int | None = None

    @property
    def phase_age_s(self) -> float:
        return self._clock - self._phase_start

    def beat(self, message: Mapping[str, Any]) -> None:
        """Take in a message of kind `beat` (see `heartbeat.py`)."""
        self._last_beat = self._clock
        counts = (message["phase_count"], message["progress_count"])
        if counts[0] != self._counts[0]:
            self._phase_start = self._clock
        if counts != self._counts:
            self._last_progress = self._clock
        self._counts = counts
        self._paused = message["paused"]
        self.phase, self.detail = message["phase"], message["detail"]
        self.step, self.num_steps = message["step"], message["num_steps"]

    def tick(self, now: float) -> str | None:
        """Move the clock on. Returns what is wrong, as the end of the sentence `the worker ...`, or None."""
        passed_s = min(max(now - self._last_tick, 0.0), MAX_TICK_S)
        self._clock += passed_s
        if self._paused:
            self._phase_start += passed_s
            self._last_progress += passed_s
        self._last_tick = now
        silence_s = self._clock - self._last_beat
        limit_s = self._heartbeat_timeout_s
        if self.phase in START_PHASES:
            limit_s = max(limit_s, START_SILENCE_S)
        if silence_s > limit_s:
            return f"has been silent for {silence_s:.1f} s (--heartbeat-timeout {self._heartbeat_timeout_s:g})"
        deadline_s = self._phase_deadlines.get(self.phase)
        if deadline_s is not None:
            if self.phase_age_s > deadline_s:
                return f"took longer than the {deadline_s:g} s that --phase-deadlines allows"
        elif self._clock - self._last_progress > DEFAULT_STALL_S:
            return f"made no progress for {DEFAULT_STALL_S:g} s (--phase-deadlines gives a slow phase more)"
        return None


def where(phase: str, step: int) -> str:
    """`in phase train of step 3`, or without a step before the first."""
    return f"in phase {phase} of step {step}" if step >= 0 else f"in phase {phase}"
