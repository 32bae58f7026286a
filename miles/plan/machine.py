"""What a machine has and how fast it is: from a name, from flags, or from what is found here. Rates are those of data
sheets; `miles check` and `miles plan --measure` put measured ones in their place.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from miles.errors import ConfigError

GIB = 2**30
# GiB that the driver reports, TFLOP/s of dense bfloat16 products, GB/s of memory, one memory for CPU and GPU
_GPUS = {
    "B200": (178.3, 2250, 8000, False),
    "H200": (139.8, 989, 4800, False),
    "H100 PCIe": (79.1, 756, 2000, False),
    "H100": (79.1, 989, 3350, False),
    "A100 40GB": (39.4, 312, 1555, False),
    "A100": (79.1, 312, 2039, False),
    "GB10": (128.0, 125, 273, True),
    "L40S": (44.4, 362, 864, False),
    "L4": (22.0, 121, 300, False),
    "A10": (22.0, 125, 600, False),
    "RTX PRO 6000": (94.9, 503, 1792, False),
    "RTX 6000 Ada": (47.4, 364, 960, False),
    "RTX A6000": (47.4, 155, 768, False),
    "RTX 5090": (31.4, 209, 1792, False),
    "RTX 4090": (23.5, 165, 1008, False),
    "RTX 3090": (23.6, 71, 936, False),
}
GPU_NAMES = tuple(_GPUS)
# Of the rates of a data sheet, what a large product and a copy reach: 773 of 989 TFLOP/s, 4,277 of 4,800 GB/s (H200).
_REACHED_FLOPS, _REACHED_BYTES = 0.78, 0.89
# A CPU core with 256-bit vectors in float32, and the memory of a desktop machine.
_CORE_FLOPS_PER_S, _CPU_BYTES_PER_S = 50e9, 15e9
# Of a memory that CPU and GPU share: the firmware keeps 5 percent, and the operating system lives in it too.
UNIFIED_SHARE = 0.92


@dataclass(frozen=True, slots=True)
class Machine:
    """`memory_bytes` is where weights and activations lie, `host_bytes` the memory of the CPU; with `shares_memory`
    they are one. Rates as in `observe/gpu.py: Rates`."""

    name: str
    on_gpu: bool
    memory_bytes: int
    host_bytes: int
    shares_memory: bool
    matrix_flops_per_s: float
    copy_bytes_per_s: float
    disk_bytes: int


def gpu_machine(
    name: str, *, memory_gib: float | None = None, unified: bool | None = None, host_bytes: int, disk_bytes: int
) -> Machine:
    """A machine with the GPU whose name has the words of one of `GPU_NAMES`; without one, but with a memory, its rates
    are those of the GB10 if the memory is unified, else of the A100. Raises `ConfigError` when there is neither."""
    words = set(re.split(r"[\s_-]+", name.lower()))
    found = next((known for known in GPU_NAMES if words.issuperset(known.lower().split())), None)
    if found is None and memory_gib is None:
        raise ConfigError(
            f"--gpu {name or '(none given)'}: not a known GPU; give --gpu-memory too, or one of {', '.join(GPU_NAMES)}"
        )
    gib, tflops, gb_per_s, is_unified = _GPUS[found or ("GB10" if unified else "A100")]
    shares = is_unified if unified is None else unified
    memory_bytes = int((memory_gib or gib) * GIB * (UNIFIED_SHARE if shares else 1))
    return Machine(
        name=found or f"a GPU like the {'GB10' if unified else 'A100'}",
        on_gpu=True,
        memory_bytes=memory_bytes,
        host_bytes=memory_bytes if shares else host_bytes,
        shares_memory=shares,
        matrix_flops_per_s=_REACHED_FLOPS * tflops * 1e12,
        copy_bytes_per_s=_REACHED_BYTES * gb_per_s * 1e9,
        disk_bytes=disk_bytes,
    )


def cpu_machine(*, host_bytes: int, disk_bytes: int) -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flops = cores * _CORE_FLOPS_PER_S
    return Machine(f"CPU, {cores} cores", False, host_bytes, host_bytes, True, flops, _CPU_BYTES_PER_S, disk_bytes)


def host_memory() -> int:
    return psutil.virtual_memory().total


def free_disk(folder: Path) -> int:
    """Bytes free where `folder` is or would be made."""
    return shutil.disk_usage(next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())).free
