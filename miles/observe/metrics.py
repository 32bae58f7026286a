"""The numbers of a run on disk: `metrics.jsonl`, one record per step and per evaluation, and `events.jsonl`.

These files are the truth; trackers mirror them. A record is on disk when `write` returns. The step of an evaluation is
the number of steps trained before it, so the record `eval 0` describes the start weights.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from miles.errors import StorageError
from miles.observe import names
from miles.observe.atomic import write_atomically

EVENT_SCHEMA = 1
Listener = Callable[[int, Mapping[str, float], str], None]


class MetricsWriter:
    """Appends to the two files of a run folder.

    `first_step` is the step a resumed run begins with: records of it and of later steps, and of later evaluations, are
    dropped first, so that nothing is there twice. None begins anew. Raises `StorageError` when the folder cannot be
    written.
    """

    def __init__(self, run_dir: Path, *, first_step: int | None) -> None:
        self._metrics_path = run_dir / "metrics.jsonl"
        self._events_path = run_dir / "events.jsonl"
        kept = [] if first_step is None else _records_before(self._metrics_path, first_step)
        self._listeners: list[Listener] = []
        self._last_step = {record["kind"]: record["step"] for record in kept}
        try:
            write_atomically(self._metrics_path, "".join(json.dumps(record) + "\n" for record in kept))
            self._metrics = open(self._metrics_path, "a", encoding="utf-8")  # noqa: SIM115
            self._events = open(self._events_path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise StorageError(f"{run_dir}: cannot write the metrics of the run: {error.strerror}") from error

    def write(self, step: int, metrics: Mapping[str, float], *, kind: str = "step") -> None:
        """Add a record of kind `step` or `eval`. Steps rise; every name is known; every value is a finite number."""
        last_step = self._last_step.get(kind, -1)
        assert step > last_step, f"{kind} {step} comes after {kind} {last_step}"
        for name, value in metrics.items():
            names.describe(name)
            assert math.isfinite(value), f"{name} of step {step} is {value}: it must be finite to be recorded"
        _append(self._metrics, {"kind": kind, "step": step, "time": now(), **metrics})
        self._last_step[kind] = step
        for listener in self._listeners:
            listener(step, metrics, kind)

    def listen(self, listener: Listener) -> None:
        """Call this with step, numbers and kind of every record from now on, after it is on disk."""
        self._listeners.append(listener)

    def event(self, kind: str, **fields: Any) -> None:
        """Add something that happened: `start`, `resume`, `checkpoint`, `stop`, `error`, ..."""
        _append(self._events, {"schema": EVENT_SCHEMA, "time": now(), "kind": kind, **fields})

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


def append_event(run_dir: Path, kind: str, **fields: Any) -> None:
    """Add an event to a run folder whose worker does not run."""
    try:
        with open(run_dir / "events.jsonl", "a", encoding="utf-8") as file:
            _append(file, {"schema": EVENT_SCHEMA, "time": now(), "kind": kind, **fields})
    except OSError as error:
        raise StorageError(f"{run_dir}: cannot write the events of the run: {error.strerror}") from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; a last line that was cut off by a crash is left out. Missing file: none. Raises
    `StorageError` when another line is damaged."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], start=1):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise StorageError(f"{path}, line {number}: is damaged: {error}; repair or remove the line") from error
    return records


def now() -> str:
    """UTC time to the millisecond, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _records_before(path: Path, step: int) -> list[dict[str, Any]]:
    return [record for record in read_records(path) if record["step"] < step + (record["kind"] == "eval")]


def _append(file: Any, record: dict[str, Any]) -> None:
    try:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"{file.name}: cannot write: {error.strerror}; free space and resume the run") from error
