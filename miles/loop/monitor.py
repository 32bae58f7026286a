"""What the watching side knows of a worker: its messages and log lines, shown, kept and judged."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miles.config.sections import ProcessConfig
from miles.loop.recover import End
from miles.observe.display import Display
from miles.observe.log import LogFile
from miles.observe.watchdog import Watchdog, where

_DISPLAY_INTERVAL_S = 0.25
_STALL_S = 2.0  # longer than a busy reader takes
_ERROR = re.compile(r" - Error: (.*)|([\w.]+(?:Error|Exception)\b.*)|(Fatal Python error.*)")
_MAX_ERROR_LENGTH = 300


class Monitor:
    """Follows one worker at a time. A terminal that has gone away (closed window, ended pipe) does not end the run, and
    one that takes nothing for a while (Ctrl+S, a stalled reader) does not hold it up: lines are left out then."""

    def __init__(self, log_file: Path, process: ProcessConfig, *, display: Display) -> None:
        self.log = LogFile(log_file)
        self._process = process
        self.expect_worker()
        self._display: Display | None = display
        self._next_display = 0.0
        self._is_stalled = False

    def expect_worker(self) -> None:
        """Forget the worker before; its log and display go on."""
        self.watchdog = Watchdog(
            heartbeat_timeout_s=self._process.heartbeat_timeout,
            phase_deadlines=self._process.phase_deadlines,
            now=time.monotonic(),
        )
        self.error: End | None = None  # what the worker said about its own end
        self.last_error_line = ""
        self.last_step = -1  # the last one that it finished

    @property
    def where(self) -> str:
        return where(self.watchdog.phase, self.watchdog.step)

    def output(self, line: bytes, *, shown: bool = True) -> None:
        """A line that the worker wrote to its log, stdout or stderr."""
        self.log.write(line)
        text = self.log.secrets.hide(line.decode(errors="replace").rstrip("\n"))
        if match := _ERROR.search(text):
            self.last_error_line = match[match.lastindex or 0][:_MAX_ERROR_LENGTH]
        if shown:
            self.show(lambda display: display.line(text))

    def message(self, message: Mapping[str, Any]) -> None:
        """A message of the heartbeat (see `observe/heartbeat.py`)."""
        if message["kind"] == "beat":
            self.watchdog.beat(message)
        elif message["kind"] == "step":
            step, metrics, num_steps = message["step"], message["metrics"], message["num_steps"]
            self.last_step = step
            self.show(lambda display: display.step(step, metrics, num_steps=num_steps))
        else:
            assert message["kind"] == "error", f"unknown message {message}"
            sentence = self.log.secrets.hide(message["message"])
            self.error = End(message["exit_code"], sentence, message["repairable"])

    def tick(self) -> str | None:
        """Let time pass; returns what is wrong with the worker, or None (see `Watchdog.tick`)."""
        now = time.monotonic()
        verdict = self.watchdog.tick(now)
        if now >= self._next_display:
            self._next_display = now + _DISPLAY_INTERVAL_S
            dog = self.watchdog
            self.show(
                lambda display: display.tick(
                    phase=dog.phase, age_s=dog.phase_age_s, detail=dog.detail, step=dog.step, num_steps=dog.num_steps
                )
            )
        return verdict

    def show(self, call: Callable[[Display], None]) -> None:
        if self._display is None or not self._can_show():
            return
        try:
            call(self._display)
        except OSError:
            self._display = None

    def _can_show(self) -> bool:
        """Whether stdout takes a line; waits a little unless it has stalled already."""
        try:
            fd = sys.stdout.fileno()
            _, ready, _ = select.select([], [fd], [], 0.0 if self._is_stalled else _STALL_S)
        except (OSError, ValueError):  # no file: a notebook, a test, a closed stream
            return True
        if ready and self._is_stalled:
            os.write(fd, b"(lines are missing here: the terminal took none; they are in log.txt)\n")
        self._is_stalled = not ready
        return bool(ready)

    def close(self) -> None:
        self.show(lambda display: display.close())
        self.log.close()
