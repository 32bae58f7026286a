"""Spans of time with names: the only place that reads the clock for phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """Seconds per name since the last `take`. Spans nest; the time of an inner one also counts for the outer one.

    `on_phase` hears which span is the innermost open one (`idle` when none is), so that a heartbeat can report it.
    Belongs to one thread.
    """

    def __init__(
        self, on_phase: Callable[[str], None] | None = None, *, clock: Callable[[], float] = time.perf_counter
    ):
        self._on_phase = on_phase
        self._clock = clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block under `name`, also when it raises."""
        assert name not in self._open, f"span {name!r} is open already, its time would count twice"
        self._open.append(name)
        self._tell_phase()
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)
            self._open.pop()
        # Not reached when the block raises: the error report then still names the phase that failed.
        self._tell_phase()

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds per name of the spans that have ended since the last call, and start anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _tell_phase(self) -> None:
        if self._on_phase is not None:
            self._on_phase(self._open[-1] if self._open else "idle")
