"""Whether a worker that has failed is started again, and after how long. Pure logic; `supervisor.py` acts on it."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.sections import ProcessConfig

MAX_WAIT_S = 60.0


@dataclass(frozen=True)
class End:
    """How a worker ended: exit code of the command, one sentence (empty when nothing is wrong), and whether another
    try can help. A wrong flag or a full disk would only be met again."""

    exit_code: int
    sentence: str = ""
    repairable: bool = False


class Restarts:
    """Counts the failures since the last step that was finished for the first time."""

    def __init__(self, process: ProcessConfig) -> None:
        self._allowed = process.max_restarts if process.use_fault_tolerance else 0
        self._first_wait_s = process.restart_backoff
        self._best_step = -1
        self.num_in_a_row = 0

    def wait_s(self, end: End, *, last_step: int) -> float | None:
        """Seconds until the next start, twice as long for each failure in a row; None when the run ends here.
        `last_step` is the last step that the worker finished, -1 for none."""
        if last_step > self._best_step:
            self._best_step = last_step
            self.num_in_a_row = 0
        if not end.repairable or self.num_in_a_row >= self._allowed:
            return None
        self.num_in_a_row += 1
        return min(self._first_wait_s * 2.0 ** (self.num_in_a_row - 1), MAX_WAIT_S)
