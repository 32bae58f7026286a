"""The one door that computing passes between two decode steps and between two micro-batches. Heat shuts it.

One for the process, since heat is not a matter of one engine or trainer. What stands at the door keeps its state, so a
pause changes no number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# A door that nobody opens any more opens by itself: a dead guard must not leave a run waiting.
LONGEST_WAIT_S = 150.0

_LOOK_S = 0.1


class Gate:
    """Open at first."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opened = threading.Event()
        self._opened.set()
        self._shut_at = 0.0
        self._seconds = 0.0
        self._is_ignored = False

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def shut(self) -> None:
        self._shut_at = self._clock()
        self._opened.clear()

    def open(self) -> None:
        if not self._opened.is_set():
            self._seconds += self._clock() - self._shut_at
            self._opened.set()

    def wait(self) -> None:
        """Return at once when open, else once it is."""
        if self._opened.is_set():
            return
        end = self._clock() + LONGEST_WAIT_S
        while not self._is_ignored and not self._opened.wait(_LOOK_S):
            if self._clock() > end:
                self.open()

    def begin(self) -> None:
        """Open, and heeded again: a run begins."""
        self._is_ignored = False
        self.open()

    def ignore(self) -> None:
        """Let everyone through from now on: the run is to save and end. Takes no lock, as signal handlers must not."""
        self._is_ignored = True

    def take_seconds(self) -> float:
        """Seconds that it was shut since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


GATE = Gate()
