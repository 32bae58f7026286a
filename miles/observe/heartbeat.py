"""The worker's side of its supervision: which phase it is in, whether it moves, what a step gave, how it failed.

Messages are small dicts handed to `send`, one at a time. A worker sends them down a pipe as JSON lines; in process
they go straight to the display. Fields of `kind`:

- `beat`: `phase`, `phase_count` (changes with each new phase), `progress_count` (changes with each sign of progress),
  `detail`, `step` (-1 before the first), `num_steps` (None when unknown) and `paused` (it waits on purpose);
  every `BEAT_INTERVAL_S`
- `step`: `step`, `num_steps`, `metrics`; once per finished step
- `error`: `message` (one sentence), `exit_code`, `repairable` (whether a new worker may succeed)
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

BEAT_INTERVAL_S = 0.5

Send = Callable[[dict[str, Any]], None]


class Heartbeat:
    """Safe to call from any thread. Beats come from a thread of their own, so they stop only when Python stops."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_closed, name="heartbeat", daemon=True)
        self._state: dict[str, Any] = {
            "kind": "beat",
            "phase": "start",
            "phase_count": 0,
            "progress_count": 0,
            "detail": "",
            "step": -1,
            "num_steps": None,
            "paused": False,
        }

    @property
    def phase(self) -> str:
        return self._state["phase"]

    @property
    def step(self) -> int:
        """The step being worked on; -1 before the first."""
        return self._state["step"]

    def start(self) -> None:
        self._thread.start()

    def set_phase(self, phase: str, *, detail: str = "") -> None:
        """Enter a phase: its age starts at 0."""
        self._update(phase=phase, detail=detail, phase_count=self._state["phase_count"] + 1)

    def set_step(self, step: int, *, num_steps: int | None) -> None:
        self._update(step=step, num_steps=num_steps)

    def set_paused(self, paused: bool) -> None:
        """While it is paused, the time of a phase does not count."""
        self._update(paused=paused)

    def progress(self, detail: str = "") -> None:
        """A sign of life from inside a phase, such as `120 of 256 answers`. Costs no system call."""
        with self._lock:
            self._state["detail"] = detail
            self._state["progress_count"] += 1

    def report_step(self, step: int, metrics: Mapping[str, float], *, num_steps: int | None) -> None:
        """What a finished step gave, for the display."""
        self._transmit({"kind": "step", "step": step, "num_steps": num_steps, "metrics": dict(metrics)})

    def report_error(self, message: str, exit_code: int, *, repairable: bool = False) -> None:
        """Why the worker is about to end, as one sentence."""
        self._transmit({"kind": "error", "message": message, "exit_code": exit_code, "repairable": repairable})

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _update(self, **changes: Any) -> None:
        with self._lock:
            self._state.update(changes, progress_count=self._state["progress_count"] + 1)
            self._send(dict(self._state))

    def _transmit(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._send(message)

    def _beat_until_closed(self) -> None:
        while True:
            with self._lock:
                self._send(dict(self._state))
            if self._closed.wait(BEAT_INTERVAL_S):
                return


def send_to_pipe(fd: int, *, on_broken: Callable[[], None]) -> Send:
    """A `send` that writes JSON lines to `fd`; `on_broken` is called when nobody reads any more."""

    def send(message: dict[str, Any]) -> None:
        data = (json.dumps(message) + "\n").encode()
        try:
            while data:
                data = data[os.write(fd, data) :]
        except BrokenPipeError:
            on_broken()

    return send
