"""What a terminal shows of a run: phase and its age, step, reward, length, speed, time left.

`live` redraws two lines at the bottom; `plain` prints a line per step and one for each 30 s of a long phase; both
leave records out, which are in `log.txt`. `off` prints the log as it is.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

LONG_PHASE_S = 30.0

_RECORD = re.compile(r"\[[^]]+\] \S+:\d+ - [a-z_-]+ -?\d+: \{")
_SHOWN = (
    ("rollout/raw_reward", "reward", ".3f"),
    ("train/loss", "loss", ".4f"),
    ("rollout/response_lengths", "length", ".1f"),
    ("perf/tokens_per_gpu_per_sec", "tokens/s", ",.0f"),
)


class Display(Protocol):
    """Where a run is shown. `line` gets a log line without its newline."""

    def line(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float], *, num_steps: int | None) -> None: ...

    def tick(self, *, phase: str, age_s: float, detail: str, step: int, num_steps: int | None) -> None: ...

    def close(self) -> None: ...


def make_display(progress: str) -> Display:
    """The display for a value of `--progress`."""
    if progress == "auto":
        progress = "live" if sys.stdout.isatty() else "plain"
    return {"live": LiveDisplay, "plain": PlainDisplay, "off": LogDisplay}[progress]()


class LogDisplay:
    """Prints the log as it is."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def step(self, step: int, metrics: Mapping[str, float], *, num_steps: int | None) -> None: ...

    def tick(self, *, phase: str, age_s: float, detail: str, step: int, num_steps: int | None) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """Lines for a terminal that cannot redraw, a pipe or a file."""

    def __init__(self) -> None:
        self._eta = Eta()
        self._next_age_s = LONG_PHASE_S

    def line(self, text: str) -> None:
        if not is_record(text):
            print(text, flush=True)

    def step(self, step: int, metrics: Mapping[str, float], *, num_steps: int | None) -> None:
        self._eta.step_ended()
        print(describe_step(step, metrics, num_steps=num_steps, left_s=self._eta.left_s(step, num_steps)), flush=True)

    def tick(self, *, phase: str, age_s: float, detail: str, step: int, num_steps: int | None) -> None:
        if age_s < self._next_age_s:
            self._next_age_s = (age_s // LONG_PHASE_S + 1) * LONG_PHASE_S
            return
        self._next_age_s += LONG_PHASE_S
        print(f"{step_of(step, num_steps)}: {phase} for {duration(age_s)} {detail}".rstrip(), flush=True)

    def close(self) -> None: ...


class LiveDisplay:
    """Two lines at the bottom of a terminal, redrawn; log lines that are not records scroll above."""

    def __init__(self, console: Console | None = None) -> None:
        self._eta = Eta()
        self._summary = ""
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def line(self, text: str) -> None:
        if not is_record(text):
            self._console.print(Text(text))

    def step(self, step: int, metrics: Mapping[str, float], *, num_steps: int | None) -> None:
        self._eta.step_ended()
        self._summary = describe_step(step, metrics, num_steps=num_steps, left_s=self._eta.left_s(step, num_steps))

    def tick(self, *, phase: str, age_s: float, detail: str, step: int, num_steps: int | None) -> None:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=num_steps or 1, completed=max(step, 0), width=24),
            Text(step_of(step, num_steps)),
            Text(f"{phase} {duration(age_s)}", style="bold"),
            Text(detail, style="dim"),
        )
        self._live.update(Group(head, Text(self._summary)), refresh=True)

    def close(self) -> None:
        self._live.stop()


class Eta:
    """Time left, from the median of the last steps: one slow step (a checkpoint, an evaluation) does not move it."""

    def __init__(self) -> None:
        # Empty at first: the time before the first step is start-up, not a step.
        self._ends: deque[float] = deque(maxlen=21)

    def step_ended(self) -> None:
        self._ends.append(time.monotonic())

    def left_s(self, step: int, num_steps: int | None) -> float | None:
        """Seconds until the last step ends, after `step` has ended; None when the number of steps is unknown."""
        if num_steps is None or len(self._ends) < 2:
            return None
        ends = list(self._ends)
        return median(later - earlier for earlier, later in zip(ends, ends[1:], strict=False)) * (num_steps - 1 - step)


def is_record(line: str) -> bool:
    """True for a log line that carries a record (`step 3: {...}`)."""
    return _RECORD.match(line) is not None


def describe_step(step: int, metrics: Mapping[str, float], *, num_steps: int | None, left_s: float | None) -> str:
    """`step 2 (3/40): reward 0.628  length 21.3  tokens/s 5,214  left 0:31`, of what the metrics hold."""
    parts = [f"{label} {metrics[name]:{form}}" for name, label, form in _SHOWN if name in metrics]
    parts += [f"{name} {value:.3f}" for name, value in metrics.items() if re.fullmatch(r"eval/[^/-]+", name)]
    if left_s is not None:
        parts.append(f"left {duration(left_s)}")
    return f"{step_of(step, num_steps)}: " + "  ".join(parts)


def step_of(step: int, num_steps: int | None) -> str:
    """The number of the step as the records have it, and its place in the run: `step 2 (3/40)`."""
    if step < 0:
        return "before step 0"
    return f"step {step}" + (f" ({step + 1}/{num_steps})" if num_steps is not None else "")


def duration(seconds: float) -> str:
    """`0:07`, `12:31` or `1:02:00`."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest_s:02d}" if hours else f"{minutes}:{rest_s:02d}"
