"""Where the Triton kernels come in. The modules `triton_*.py` are imported here and nowhere else, and only when a
tensor on a CUDA device needs them: an installation for CPUs has no Triton."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from torch import Tensor

HEAD_SIZES = (32, 64, 128)  # of the attention kernels

# Tests set it where Triton interprets its kernels, to walk the path of a GPU on a CPU.
on_cpu_too = False


def has_kernels(x: Tensor) -> bool:
    """Whether operations on this tensor run as kernels of `triton_*.py`."""
    return x.is_cuda or on_cpu_too


@cache
def kernels(part: str) -> Any:
    """The module `triton_<part>.py`."""
    return importlib.import_module(f"miles.ops.triton_{part}")
