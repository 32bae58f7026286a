"""Reads logs, those of public Miles as well as ours.

A record is a line `[time process] file.py:line - kind n: {python dict}`, which Ray may prefix with `(Actor pid=1)`.
Engine lines have no process and no place; lines of a traceback have no time at all and belong to the line above.
Numbers are found by their names, so a record whose middle was cut out still gives the numbers that are left.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from miles.errors import StorageError

_LINE = re.compile(
    r"(?:\((?P<actor>[\w.]+)(?: pid=\d+)?(?:, ip=[^)]*)?\)\s*)?"
    r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{3})?)(?: (?P<process>[^\]]+))?\]\s*"
    r"(?:(?P<place>[\w./<>-]+:\d+) - )?(?P<message>.*)"
)
_ACTOR = re.compile(r"\([\w.]+ pid=\d+(?:, ip=[^)]*)?\)\s*")
_RECORD = re.compile(r"(?P<kind>perf|rollout|step|critic-step|eval|multi_turn) (?P<number>\d+): (?P<body>\{.*)")
_PAIR = re.compile(
    r"['\"]([^'\"]+)['\"]:\s*(?:[A-Za-z_.]+\d*\()?(-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|inf|nan))(?![\w.])"
)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_REPEATED = re.compile(r"\[repeated (\d+)x across cluster\]")
_COMMAND = re.compile(r"(?:^|\s)--(?:hf-checkpoint|rollout-batch-size|train-backend)[\s=]")
_ENGINE_LINE = re.compile(
    r"Decode batch.*?#running-req: (?P<running>\d+).*?(?:token usage: (?P<usage>[\d.]+))?.*?"
    r"gen throughput \(token/s\): (?P<speed>[\d.]+)"
)
_KV_TOKENS = re.compile(r"KV Cache is allocated\..*?#tokens: (\d+)")

UNAVAILABLE = "503 Service Unavailable"
MAX_KEPT_CHARS = 2_000


@dataclass(slots=True)
class LogLine:
    """`time` is None until the first line that has one; later lines without a time have that of the line above."""

    number: int
    time: datetime | None
    process: str
    message: str


@dataclass(slots=True)
class Record:
    kind: str
    number: int
    time: datetime | None
    values: dict[str, float]


@dataclass(slots=True)
class EngineSample:
    """One `Decode batch` line of the engine."""

    running: int
    tokens_per_s: float


@dataclass
class Log:
    """What a log says. `lines` leaves out records, engine statistics and the flood of refused requests."""

    path: Path
    records: list[Record] = field(default_factory=list)
    lines: list[LogLine] = field(default_factory=list)
    unavailable: list[datetime] = field(default_factory=list)  # one per refused request
    engine: list[EngineSample] = field(default_factory=list)
    kv_tokens: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    first_time: datetime | None = None
    last_time: datetime | None = None
    num_lines: int = 0
    is_public: bool = False  # written by public Miles: Ray actors or its process names

    def find(self, pattern: str) -> LogLine | None:
        """The first line that holds the pattern (a regular expression)."""
        compiled = re.compile(pattern)
        return next((line for line in self.lines if compiled.search(line.message)), None)


def read_log(path: Path) -> Log:
    """Read a whole log. Raises `StorageError` when the file cannot be read."""
    log = Log(path)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in _lines(file):
                log.num_lines += 1
                _take(log, line)
    except OSError as error:
        raise StorageError(f"{path}: cannot read the log: {error.strerror}") from error
    return log


def _lines(file: Iterator[str]) -> Iterator[LogLine]:
    time, process = None, ""
    for number, raw in enumerate(file, start=1):
        text = _ESCAPE.sub("", raw.rstrip("\n"))
        match = _LINE.match(text)
        if match is None:
            yield LogLine(number, time, process, _ACTOR.sub("", text, count=1))
            continue
        time, process = _time(match["time"]) or time, match["process"] or match["actor"] or ""
        yield LogLine(number, time, process, match["message"])


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text.replace(",", "."))
    except ValueError:  # a day 32 in a damaged line
        return None


def _take(log: Log, line: LogLine) -> None:
    if line.time is not None:
        log.first_time = log.first_time or line.time
        log.last_time = line.time
    message = line.message
    if UNAVAILABLE in message:
        repeated = _REPEATED.search(message)
        if line.time is not None:
            log.unavailable += [line.time] * (int(repeated[1]) if repeated else 1)
        if len(log.unavailable) > 3:
            return
    match = _RECORD.match(message)
    if match is not None:
        values = {name: float(number) for name, number in _PAIR.findall(match["body"])}
        log.records.append(Record(match["kind"], int(match["number"]), line.time, values))
        log.is_public = log.is_public or line.process.startswith(("rollout_", "actor_", "critic_"))
        return
    if match := _ENGINE_LINE.search(message):
        log.engine.append(EngineSample(int(match["running"]), float(match["speed"])))
        return
    if match := _KV_TOKENS.search(message):
        log.kv_tokens = int(match[1])
    if _COMMAND.search(message):
        log.settings |= command_settings(message)
    line.message = message[:MAX_KEPT_CHARS]
    if message.strip():
        log.lines.append(line)


def command_settings(command: str) -> dict[str, str]:
    """`--rollout-batch-size 32` of a command line as {"rollout_batch_size": "32"}; a switch alone is "true"."""
    try:
        tokens = shlex.split(command)
    except ValueError:  # quotes that were cut off with the end of the line
        tokens = command.split()
    settings: dict[str, str] = {}
    name = ""
    for token in tokens:
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token[2:].partition("=")
            name = name.replace("-", "_")
            settings[name] = value if equals else "true"
        elif name:
            settings[name] = token if settings[name] == "true" else f"{settings[name]} {token}"
    return settings


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
