"""Log lines and records.

A line is `[YYYY-MM-DD HH:MM:SS.mmm process] file.py:line - message`; a record is a line whose message is
`kind n: {python dict}` with numbers in fixed notation, so that `grep` and `ast.literal_eval` both read it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path

from miles.config.secrets import Secrets
from miles.errors import StorageError
from miles.observe import names

_PREFIX = {logging.WARNING: "Warning: ", logging.ERROR: "Error: ", logging.CRITICAL: "Error: "}


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; call it with `__name__`."""
    return logging.getLogger(name)


def setup_logging(process: str, write: Callable[[str], None]) -> None:
    """Send every log line of this process to `write`, newline included. Libraries are heard from warnings up."""
    stop_logging()
    handler = _WriteHandler(write)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("miles").setLevel(logging.INFO)
    logging.captureWarnings(True)


def stop_logging() -> None:
    """Undo `setup_logging`: nothing is written any more."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, _WriteHandler):
            root.removeHandler(handler)
    logging.captureWarnings(False)


class LineFormatter(logging.Formatter):
    """The line format above. Warnings and errors say so at the start of their message."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        message = _PREFIX.get(record.levelno, "") + record.getMessage()
        line = f"[{seconds}.{int(record.msecs):03d} {self.process}] {record.filename}:{record.lineno} - {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _WriteHandler(logging.Handler):
    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record) + "\n")


class LogFile:
    """`log.txt`, appended to, with secrets hidden. A full disk must not end a run that can still report it, so failed
    writes are counted; a file that cannot be opened at all is a `StorageError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_failed_writes = 0
        self.secrets = Secrets()
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise StorageError(f"{path}: cannot write the log of the run: {error.strerror}") from error

    def write(self, data: bytes) -> None:
        try:
            self._file.write(self.secrets.hide(data.decode(errors="surrogateescape")).encode(errors="surrogateescape"))
        except OSError:
            self.num_failed_writes += 1

    def close(self) -> None:
        self._file.close()


def fixed(value: float | int) -> str:
    """A finite number without an exponent, in the fewest digits that read back as the same number."""
    if isinstance(value, int):
        return str(int(value))
    assert math.isfinite(value), f"a logged number must be finite, not {value}"
    digits = format(Decimal(repr(float(value))), "f")
    return digits if "." in digits else digits + ".0"


def format_record(kind: str, n: int, metrics: Mapping[str, float]) -> str:
    """`kind n: {'name': number, ...}`. Every name must be in `observe/names.py`."""
    for name in metrics:
        names.describe(name)
    pairs = ", ".join(f"{name!r}: {fixed(value)}" for name, value in metrics.items())
    return f"{kind} {n}: {{{pairs}}}"


def log_record(kind: str, n: int, metrics: Mapping[str, float], *, logger: logging.Logger | None = None) -> None:
    """Log a record; the line carries the file and line of the caller."""
    (logger or logging.getLogger("miles")).info(format_record(kind, n, metrics), stacklevel=2)
