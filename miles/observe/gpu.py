"""What a device can do, measured at start: speeds are shown as shares of it, not of a data sheet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


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
