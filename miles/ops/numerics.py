"""Which arithmetic the operations use on this thread: the fastest, or one that gives a row the same bits in any batch.

An operation is invariant when each element of its result is one fixed chain of instructions, however many rows there
are and wherever its row lies. On a CPU the library's products keep to that once rows are padded to a whole number of
tiles; how large a tile must be belongs to processor and library, so `model/invariance.py` finds it out at start.
On CUDA the kernels of `triton_matmul.py` and `triton_paged_attention.py` do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CpuTiles:
    """`rows` of a product, `query_rows` of a product with keys or values. `doubles`: products in float64 instead."""

    rows: int = 16
    query_rows: int = 4
    doubles: bool = False


_here = threading.local()
_tiles = CpuTiles()


def is_invariant() -> bool:
    """Whether the operations called here must be invariant."""
    return getattr(_here, "invariant", False)


@contextmanager
def invariant(on: bool = True) -> Iterator[None]:
    """Use invariant operations within, on this thread only: engine and trainer each decide for themselves."""
    before = is_invariant()
    _here.invariant = on or before
    try:
        yield
    finally:
        _here.invariant = before


def as_in_the_forward_pass() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a forward pass and of its repetition in the backward pass, which can be on another thread."""
    return nullcontext(), invariant(is_invariant())


def cpu_tiles() -> CpuTiles:
    return _tiles


def set_cpu_tiles(tiles: CpuTiles) -> None:
    """For the whole process: what `model/invariance.py` found."""
    global _tiles  # noqa: PLW0603 - one processor, one library
    _tiles = tiles
