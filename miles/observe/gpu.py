"""What a device has and can do, measured at start: speeds are shown as shares of it, not of a data sheet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_CGROUP_LIMIT, _CGROUP_USAGE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a large square product in the dtype of the weights, and of a copy: bytes read plus bytes written."""

    matrix_flops_per_s: float
    copy_bytes_per_s: float


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """A short measurement: about 0.1 s."""
    on_gpu = device.type == "cuda"
    return Rates(
        matrix_flops_per_s=matrix_rate(device, dtype, size=8192 if on_gpu else 512),
        copy_bytes_per_s=copy_rate(device, num_bytes=2 << 30 if on_gpu else 64 << 20),
    )


def matrix_rate(device: torch.device, dtype: torch.dtype, *, size: int) -> float:
    """FLOPs per second of a size x size product on random data."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, device)


def copy_rate(device: torch.device, *, num_bytes: int) -> float:
    """Bytes read plus bytes written per second by a copy of `num_bytes` on the device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def seconds_of(call: Callable[[], object], device: torch.device, *, repeats: int = 10) -> float:
    """Mean seconds of a call after three for warming up."""
    for _ in range(3):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: torch.device) -> None:
    """Wait for what the device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that can still be allocated, and all: of the GPU, or of this machine and container. The latter also where
    the GPU shares it, or reports no memory of its own."""
    if device.type == "cuda" and not torch.cuda.get_device_properties(device).is_integrated:
        with contextlib.suppress(RuntimeError):  # "not supported"
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            if total_bytes > 0:
                return free_bytes, total_bytes
    host = psutil.virtual_memory()
    free_bytes, total_bytes = host.available, host.total
    if _CGROUP_LIMIT.is_file() and (limit := _CGROUP_LIMIT.read_text().strip()) != "max":
        free_bytes = min(free_bytes, int(limit) - int(_CGROUP_USAGE.read_text()))
        total_bytes = min(total_bytes, int(limit))
    return free_bytes, total_bytes
