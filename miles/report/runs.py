"""One run as data, from its folder or from a log alone: the numbers of every step, evaluations, pauses, facts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from miles.errors import ConfigError, StorageError
from miles.observe.metrics import read_records
from miles.report.logs import Log, Record, read_log

_PAUSE_WORD = re.compile(r"\b(pause[d]?|resume[d]?|unpause[d]?)\b", re.IGNORECASE)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?")


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time. Times without a zone are read as UTC: a run and its pause log are written on one machine."""

    start: datetime
    end: datetime

    def overlaps(self, other: Window) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(slots=True)
class Step:
    """One rollout and the optimizer steps on it. A phase whose end or length is unknown has no window."""

    number: int
    metrics: dict[str, float]
    rollout: Window | None = None
    whole: Window | None = None


@dataclass
class RunData:
    """Everything that is known of a run. `folder` is None when only a log is there."""

    name: str
    path: Path
    folder: Path | None
    steps: list[Step]
    evals: dict[int, dict[str, float]]
    pauses: list[Window]
    log: Log | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever the number was logged."""
        return [(step.number, step.metrics[name]) for step in self.steps if name in step.metrics]

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.series(name)]

    def setting(self, name: str) -> Any:
        """A setting by its field name, or None when it is off or not known."""
        value = self.settings.get(name)
        return None if value in ("", "null") else value

    def number_setting(self, name: str) -> float | None:
        try:
            return float(self.settings[name])
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def finished(self) -> bool:
        return any(event["kind"] == "finish" for event in self.events[-1:])

    def sample_steps(self) -> list[int]:
        """Steps whose samples are on disk."""
        if self.folder is None:
            return []
        names = (path.stem.removeprefix("rollout_") for path in (self.folder / "samples").glob("rollout_*.parquet"))
        return sorted(int(name) for name in names if name.isdigit())


def open_run(path: Path, *, pauses: Path | None = None) -> RunData:
    """A run folder, or a log file of this or of public Miles. `pauses` is the log of a heat guard.

    Raises `ConfigError` when there is no run at `path`.
    """
    run = _from_folder(path) if path.is_dir() else _from_log(path)
    if pauses is not None:
        run.pauses = read_pauses(pauses)
    return run


def find_runs(folder: Path) -> list[Path]:
    """Run folders in `folder`, or `folder` itself when it is one; newest first."""
    if _is_run(folder):
        return [folder]
    found = [path for path in folder.iterdir() if path.is_dir() and _is_run(path)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (path / "config.yaml").stat().st_mtime, reverse=True)


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def _from_folder(path: Path) -> RunData:
    if not _is_run(path):
        found = find_runs(path)
        hint = f"; did you mean {found[0]}?" if found else ""
        raise ConfigError(f"{path} is no run folder: config.yaml is missing{hint}")
    records = read_records(path / "metrics.jsonl")
    return RunData(
        name=path.resolve().name,
        path=path,
        folder=path,
        steps=[_step_of(record) for record in records if record["kind"] == "step"],
        evals={record["step"]: _numbers(record) for record in records if record["kind"] == "eval"},
        pauses=read_pauses(path / "pauses.jsonl") if (path / "pauses.jsonl").is_file() else [],
        log=read_log(path / "log.txt") if (path / "log.txt").is_file() else None,
        events=read_records(path / "events.jsonl"),
        settings=_yaml(path / "config.yaml"),
        environment=_json(path / "environment.json"),
    )


def _step_of(record: Mapping[str, Any]) -> Step:
    """The record is written when the step ends; its rollout ended before the training."""
    step = Step(record["step"], _numbers(record))
    end = parse_time(record["time"])
    total, rollout = step.metrics.get("perf/step_time"), step.metrics.get("perf/rollout_time")
    if total is not None:
        step.whole = Window(end - timedelta(seconds=total), end)
        if rollout is not None:
            step.rollout = Window(step.whole.start, step.whole.start + timedelta(seconds=rollout))
    return step


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if "/" in name and isinstance(value, (int, float))}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError) as error:
        raise StorageError(f"{path}: cannot read the settings: {error}") from error
    return loaded if isinstance(loaded, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise StorageError(f"{path}: is no JSON: {error}") from error
    return loaded if isinstance(loaded, dict) else {}


def _from_log(path: Path) -> RunData:
    if not path.is_file():
        raise ConfigError(f"{path}: there is no run folder and no log of this name")
    log = read_log(path)
    steps: dict[int, Step] = {}
    evals: dict[int, dict[str, float]] = {}
    means: dict[int, list[dict[str, float]]] = {}
    rollout = -1  # the rollout that the trainer works on: its `step K` lines follow its `rollout N` line
    for record in log.records:
        if record.kind == "eval":
            evals[record.number] = record.values
            continue
        if record.kind in ("step", "critic-step"):
            owner = rollout if rollout >= 0 else record.number
            means.setdefault(owner, []).append(record.values)
            steps.setdefault(owner, Step(owner, {}))
            continue
        if record.kind == "rollout":
            if record.number <= rollout:  # the run went on from an older checkpoint: what was redone counts
                for number in [number for number in steps if number >= record.number]:
                    means.pop(number, None)
            rollout = record.number
        _merge(steps.setdefault(record.number, Step(record.number, {})), record)
    for number, several in means.items():
        names = {name for values in several for name in values}
        for name in names:
            found = [values[name] for values in several if name in values]
            steps[number].metrics[name] = sum(found) / len(found)
    # A rollout that nothing was trained on yet is no step.
    whole = [step for _, step in sorted(steps.items()) if step.number in means or step.whole is not None]
    return RunData(path.stem, path, None, whole, evals, [], log=log, settings=dict(log.settings))


def _merge(step: Step, record: Record) -> None:
    step.metrics |= record.values
    if record.kind == "perf" and record.time is not None:
        end = record.time.replace(tzinfo=UTC)
        for name, seconds in record.values.items():
            if name == "perf/rollout_time":
                step.rollout = Window(end - timedelta(seconds=seconds), end)
            elif name == "perf/step_time":
                step.whole = Window(end - timedelta(seconds=seconds), end)


def parse_time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def read_pauses(path: Path) -> list[Window]:
    """Pauses from `pauses.jsonl` or the text log of a heat guard: lines with a time and `pause` or `resume`. A pause
    that was never resumed lasts until the last line of the log."""
    windows: list[Window] = []
    start: datetime | None = None
    time: datetime | None = None
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise StorageError(f"{path}: cannot read the pauses: {error.strerror}") from error
    for line in lines:
        found, word = _TIME.search(line), _PAUSE_WORD.search(line)
        if found is None or word is None:
            continue
        time = parse_time(found[0])
        if word[0].lower().startswith("pause"):
            start = start or time
        elif start is not None:
            windows.append(Window(start, time))
            start = None
    if start is not None and time is not None and time > start:
        windows.append(Window(start, time))
    return windows
