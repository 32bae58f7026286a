"""Rows of a JSONL or parquet file, `FILE@[a:b]`, and one error for all rows that cannot be used."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from miles.errors import ConfigError, DataError

Row = dict[str, Any]
NUM_SHOWN = 5

_SLICE_SUFFIX = re.compile(r"(?P<file>.*)@\[(?P<slice>[^\[\]]*)\]")
_SLICE = re.compile(r"\s*(?P<start>-?\d+)?\s*:\s*(?P<stop>-?\d+)?\s*")


class BadRows:
    """Collects what is wrong with the rows of a file, so that one error reports all of them."""

    def __init__(self, path: Path, *, flag: str) -> None:
        self._path = path
        self._flag = flag
        self._problems: dict[int, str] = {}

    def add(self, row: int, problem: str) -> None:
        """`row` counts from 1. The first problem of a row is the one that is shown."""
        self._problems.setdefault(row, problem)

    def raise_if_any(self, *, num_rows: int, advice: str = "") -> None:
        """Raise a `DataError` with the number of bad rows and the first of them."""
        if not self._problems:
            return
        shown = [f"  {self._path} row {row}: {self._problems[row]}" for row in sorted(self._problems)[:NUM_SHOWN]]
        more = len(self._problems) - len(shown)
        if more:
            shown.append(f"  and {more} more")
        head = f"{self._flag}: {len(self._problems)} of {num_rows} rows cannot be used"
        raise DataError("\n".join([f"{head}; {advice}" if advice else head, *shown]))


def split_slice(spec: str, *, flag: str) -> tuple[Path, slice]:
    """`FILE@[a:b]` as path and Python slice; bounds may be left out or negative. A bad slice is a `ConfigError`."""
    match = _SLICE_SUFFIX.fullmatch(spec)
    if match is None:
        if "@[" in spec:
            raise ConfigError(f"{flag} {spec}: the slice must end the value, as in FILE@[0:100]")
        return Path(spec), slice(None)
    bounds = _SLICE.fullmatch(match["slice"])
    if bounds is None:
        raise ConfigError(
            f"{flag} {spec}: [{match['slice']}] is not a slice of rows; write FILE@[a:b] with whole numbers, "
            "FILE@[:b], FILE@[a:], or FILE@[-b:] for the last b rows"
        )
    start, stop = (int(bound) if bound is not None else None for bound in (bounds["start"], bounds["stop"]))
    return Path(match["file"]), slice(start, stop)


def read_rows(spec: str, *, flag: str) -> tuple[Path, list[tuple[int, Row]]]:
    """The rows that `FILE@[a:b]` names, each with its number in the file, counted from 1.

    Raises `ConfigError` for a bad slice, `DataError` for a file or a row that cannot be read, or when no row is left.
    """
    path, rows = split_slice(spec, flag=flag)
    if not path.is_file():
        raise DataError(f"{flag} {spec}: there is no file {path.absolute()}")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise DataError(f"{flag} {spec}: expected a .jsonl or .parquet file, not {path.suffix or 'no ending'!r}")
    try:
        num_rows, numbered = readers[path.suffix](path, rows, flag)
    except OSError as error:
        raise DataError(f"{flag} {spec}: cannot be read: {error}") from error
    if not numbered:
        reason = "the file is empty" if num_rows == 0 else f"the slice leaves none of its {num_rows} rows"
        raise DataError(f"{flag} {spec}: {reason}; at least one row is needed")
    return path, numbered


def _read_jsonl(path: Path, rows: slice, flag: str) -> tuple[int, list[tuple[int, Row]]]:
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1].strip():
        lines.pop()  # what follows the last line end is not a row
    numbered: list[tuple[int, Row]] = []
    bad = BadRows(path, flag=flag)
    chosen = list(enumerate(lines, start=1))[rows]
    for number, line in chosen:
        if not line.strip():
            bad.add(number, "is empty")
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            bad.add(number, f"is not JSON: {error}")
            continue
        except RecursionError:
            bad.add(number, "is nested too deeply to be read")
            continue
        if not isinstance(row, dict):
            bad.add(number, f"is a JSON {type(row).__name__}; expected an object with columns")
            continue
        numbered.append((number, row))
    bad.raise_if_any(num_rows=len(chosen), advice="every line must be one JSON object")
    return len(lines), numbered


def _read_parquet(path: Path, rows: slice, flag: str) -> tuple[int, list[tuple[int, Row]]]:
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{flag} {path}: is not a readable parquet file: {error}") from error
    start, stop, _ = rows.indices(table.num_rows)
    return table.num_rows, list(enumerate(table.slice(start, max(0, stop - start)).to_pylist(), start=start + 1))


def missing_column(key: str, columns: Iterable[str], *, flag: str) -> str:
    """What to say about a column that is not there: the flag that asked for it and the closest name."""
    names = list(columns)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {flag} {close[0]}?" if close else f"it has: {', '.join(names) or 'no columns'}"
    return f"has no column {key!r} ({flag}); {hint}"
