"""Rows of a JSONL or parquet file, `FILE@[a:b]`, one after the other, and one error for all that cannot be used.

A file on the hub is named `hf://datasets/OWNER/NAME/FILE` and lands in the hub's cache.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from miles.errors import ConfigError, DataError

Row = dict[str, Any]
NUM_SHOWN = 5
BATCH_ROWS = 1024

_HUB = re.compile(r"hf://datasets/(?P<repository>[^/]+/[^/]+)/(?P<file>.+)")
_HUB_TIMEOUT_S = 10

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
    """All rows of `stream_rows`, in memory."""
    path, rows = stream_rows(spec, flag=flag)
    return path, list(rows)


def stream_rows(spec: str, *, flag: str) -> tuple[Path, Iterator[tuple[int, Row]]]:
    """The rows that `FILE@[a:b]` names, each with its number in the file, counted from 1.

    Raises `ConfigError` for a bad slice and `DataError` for a file that is not there; a file or a row that cannot be
    read, or that no row is left, is a `DataError` while or after the rows are taken.
    """
    path, rows = split_slice(spec, flag=flag)
    if str(path).startswith("hf:"):
        path = _from_hub(spec.partition("@[")[0], flag=flag)
    if not path.is_file():
        raise DataError(f"{flag} {spec}: there is no file {path.absolute()}")
    formats = {".jsonl": (_count_lines, _read_jsonl), ".parquet": (_count_parquet, _read_parquet)}
    if path.suffix not in formats:
        raise DataError(f"{flag} {spec}: expected a .jsonl or .parquet file, not {path.suffix or 'no ending'!r}")
    return path, _stream(path, rows, spec, flag, *formats[path.suffix])


def _stream(
    path: Path,
    rows: slice,
    spec: str,
    flag: str,
    count: Callable[[Path], int],
    read: Callable[[Path, int, int, str], Iterator[tuple[int, Row]]],
) -> Iterator[tuple[int, Row]]:
    try:
        num_rows = count(path)
        start, stop, _ = rows.indices(num_rows)
        yield from read(path, start, stop, flag)
    except OSError as error:
        raise DataError(f"{flag} {spec}: cannot be read: {error}") from error
    except pyarrow.ArrowException as error:
        raise DataError(f"{flag} {path}: is not a readable parquet file: {error}") from error
    if start >= stop:
        reason = "the file is empty" if num_rows == 0 else f"the slice leaves none of its {num_rows} rows"
        raise DataError(f"{flag} {spec}: {reason}; at least one row is needed")


def _from_hub(name: str, *, flag: str) -> Path:
    match = _HUB.fullmatch(name)
    advice = f"give {flag} hf://datasets/OWNER/NAME/FILE of a .jsonl or .parquet file, or a local file"
    if match is None:
        raise DataError(f"{flag} {name} is no file of a data set on the hub; {advice}")
    try:
        return Path(
            hf_hub_download(match["repository"], match["file"], repo_type="dataset", etag_timeout=_HUB_TIMEOUT_S)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"{flag} {name}: the hub did not give it ({reason}); {advice}") from None


def _count_lines(path: Path) -> int:
    """What follows the last line end is a row only when there is something."""
    num_lines, line = 0, b"\n"
    with open(path, "rb") as file:
        for line in file:  # noqa: B007 - the last one counts
            num_lines += 1
    return num_lines - (not line.endswith(b"\n") and not line.strip())


def _read_jsonl(path: Path, start: int, stop: int, flag: str) -> Iterator[tuple[int, Row]]:
    bad = BadRows(path, flag=flag)
    with open(path, "rb") as file:
        for number, line in islice(enumerate(file, start=1), start, max(start, stop)):
            row = _parse(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            if isinstance(row, str):
                bad.add(number, row)
            else:
                yield number, row
    bad.raise_if_any(num_rows=stop - start, advice="every line must be one JSON object")


def _parse(line: bytes) -> Row | str:
    """The row of a line, or what is wrong with it."""
    if not line.strip():
        return "is empty"
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"is not JSON: {error}"
    except RecursionError:
        return "is nested too deeply to be read"
    return row if isinstance(row, dict) else f"is a JSON {type(row).__name__}; expected an object with columns"


def _count_parquet(path: Path) -> int:
    with pyarrow.parquet.ParquetFile(path) as file:
        return file.metadata.num_rows


def _read_parquet(path: Path, start: int, stop: int, flag: str) -> Iterator[tuple[int, Row]]:
    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH_ROWS):
            begin, end = max(start - number, 0), min(stop - number, batch.num_rows)
            if begin < end:
                yield from enumerate(batch.slice(begin, end - begin).to_pylist(), start=number + begin + 1)
            number += batch.num_rows


def column(key: str, row: Row, *, flag: str) -> Any:
    """The value of a column; a `DataError` when there is none."""
    if key not in row:
        raise DataError(missing_column(key, row, flag=flag))
    return row[key]


def missing_column(key: str, columns: Iterable[str], *, flag: str) -> str:
    """What to say about a column that is not there: the flag that asked for it and the closest name."""
    names = list(columns)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {flag} {close[0]}?" if close else f"it has: {', '.join(names) or 'no columns'}"
    return f"has no column {key!r} ({flag}); {hint}"
