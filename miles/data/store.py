"""Prepared samples in a file, when they would need too much memory."""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from miles.errors import StorageError
from miles.observe.samples import from_row, to_row
from miles.types import Sample

# A prepared sample takes about this many times the bytes of its row: every token id is a Python number.
MEMORY_PER_FILE_BYTE = 12
MAX_MEMORY_SHARE = 0.25  # of what is free


class DiskSamples(Sequence[Sample]):
    """A sequence that only grows; a sample is read each time it is asked for. The file goes with the process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
        self._ends = array("Q", [0])

    def append(self, sample: Sample) -> None:
        """Raises `StorageError` when there is no room."""
        try:
            self._file.seek(self._ends[-1])
            self._file.write(json.dumps(to_row(sample)).encode())
            self._file.flush()
        except OSError as error:
            raise StorageError(
                f"{tempfile.gettempdir()}: cannot keep the prompts there, which would fill the memory: "
                f"{error.strerror or error}; make room, or name another folder in TMPDIR"
            ) from error
        self._ends.append(self._file.tell())

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        self._file.seek(self._ends[place])
        return from_row(json.loads(self._file.read(self._ends[place + 1] - self._ends[place])))


def store_for(path: Path) -> list[Sample] | DiskSamples:
    """An empty store for the rows of this file: a list, unless it would fill a quarter of the free memory."""
    needed = path.stat().st_size * MEMORY_PER_FILE_BYTE
    return DiskSamples() if needed > MAX_MEMORY_SHARE * psutil.virtual_memory().available else []
