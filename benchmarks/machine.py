"""What a benchmark says of the machine: measured rates, and the record every script ends with."""

from __future__ import annotations

import json
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from miles.observe.environment import describe_environment


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def copy_rate(device: str, *, gigabytes: float | None = None) -> float:
    """Bytes read and written per second by a large copy on the device."""
    size = int((gigabytes or (4.0 if device.startswith("cuda") else 0.25)) * 1e9)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def matrix_rate(device: str, dtype: torch.dtype, *, size: int | None = None, repeats: int = 10) -> float:
    """FLOPs per second of a large square matrix product on random data."""
    size = size or (8192 if device.startswith("cuda") else 1024)
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _seconds(lambda: left @ right, device, repeats=repeats)


def record(result: dict[str, Any], *, write: Path | None) -> None:
    """Add hardware, versions, commit, date and command; print one JSON line, and store it when asked to."""
    environment = describe_environment(command=sys.argv, model_folder=None, seeds={})
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    result |= {
        "hardware": gpu or environment["hardware"]["cpu"],
        "versions": environment["versions"],
        "commit": environment["commit"],
        "date": date.today().isoformat(),
        "command": environment["command"],
    }
    if write is not None:
        write.mkdir(parents=True, exist_ok=True)
        hardware = "".join(letter if letter.isalnum() else "-" for letter in result["hardware"].lower()).strip("-")
        path = write / f"{result['name']}_{hardware}_{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)


def _seconds(call: Any, device: str, *, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats
