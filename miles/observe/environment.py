"""`environment.json`: what a run ran on, so that a result can be repeated or doubted later."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from miles.config.secrets import SECRET_NAME, Secrets
from miles.observe.metrics import now

_PACKAGES = (
    "miles", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "math-verify", "sympy",
)  # fmt: skip
_FINGERPRINT_BYTES = 1 << 20


def describe_environment(*, command: Sequence[str], model_folder: Path | None, seeds: dict[str, int]) -> dict[str, Any]:
    """The content of `environment.json`. Imports nothing heavy; what is not there is None."""
    return {
        "time": now(),
        "command": hide_secrets(command),
        "commit": _git_commit(Path(__file__).parent),
        "seeds": seeds,
        "checkpoint": str(model_folder) if model_folder else None,
        "checkpoint_fingerprint": fingerprint(model_folder) if model_folder and model_folder.is_dir() else None,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "hardware": {
            "platform": platform.platform(),
            "cpu": _cpu_name(),
            "num_cpus": len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": gpu_names(),
        },
    }


def hide_secrets(command: Sequence[str]) -> str:
    """The command line as one string, with `***` for the values of secrets (by name) and for known forms of keys."""
    shown, secrets = [], Secrets()
    hide_next = False
    for token in command:
        name, equals, _ = token.partition("=")
        is_secret = SECRET_NAME.search(name) is not None
        if hide_next:
            shown.append("***")
        elif is_secret and equals:
            shown.append(f"{name}=***")
        else:
            shown.append(secrets.hide(token))
        hide_next = is_secret and not equals and token.startswith("--")
    return " ".join(token if token == "***" else shlex.quote(token) for token in shown)


def fingerprint(folder: Path) -> str:
    """SHA-256 over name, size, first and last MiB of every file of a model folder: quick, also for large models."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_FINGERPRINT_BYTES))
            file.seek(max(size - _FINGERPRINT_BYTES, 0))
            digest.update(file.read(_FINGERPRINT_BYTES))
    return digest.hexdigest()


def driver_version() -> str | None:
    """Version of the NVIDIA driver as it publishes it; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return match[1] if match else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit(folder: Path) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def gpu_names() -> list[str]:
    """Names as the NVIDIA driver publishes them; asking NVML would need a GPU library here."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
