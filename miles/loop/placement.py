"""Where a run computes: device, dtype of the weights, CPU threads. Decided once, said in the log."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass

import psutil
import torch

from miles.config.sections import ModelConfig
from miles.errors import ConfigError
from miles.model.spec import ModelSpec
from miles.observe.gpu import device_memory

# Below this size a second thread costs more than it gives: the products are too small to share.
SMALL_MODEL_PARAMETERS = 8_000_000


@dataclass(frozen=True)
class Placement:
    device: torch.device
    dtype: torch.dtype
    num_threads: int

    def describe(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"computing on {name} in {dtype} with {self.num_threads} CPU thread{'s' if self.num_threads > 1 else ''}"


def place(config: ModelConfig, spec: ModelSpec) -> Placement:
    """Choose device, dtype and threads for this model and set the threads of this process.

    Raises:
        ConfigError: the device asked for is not there.
    """
    keep_memory_in_one_piece()
    device = _device(config.device)
    num_threads = config.num_threads or _num_threads(spec, device)
    torch.set_num_threads(num_threads)
    is_half = device.type == "cuda" if config.dtype == "auto" else config.dtype == "bfloat16"
    return Placement(device, torch.bfloat16 if is_half else torch.float32, num_threads)


def _device(wanted: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError(
            "--device cuda: PyTorch sees no GPU. Check `nvidia-smi` and that the installed torch is a CUDA build "
            f"(this one is {torch.__version__}), or use --device cpu."
        )
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and has_cuda) else "cpu")


def _num_threads(spec: ModelSpec, device: torch.device) -> int:
    if device.type == "cpu" and spec.num_parameters < SMALL_MODEL_PARAMETERS:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_to_one_workspace() -> None:
    """The matrix library of a GPU repeats itself bit for bit only with a fixed workspace; set before its first call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def keep_memory_in_one_piece() -> None:
    """Let the allocator of a GPU grow what it has instead of taking pieces of fixed size: micro-batches differ in
    length, so the pieces of one hardly fit the next (docs/trainer.md). Set before its first call; what is set stays."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))


def memory_used_and_free_gb(device: torch.device) -> tuple[float, float]:
    """Memory used by this process and free on the device, in GiB; of the machine on a CPU."""
    on_gpu = device.type == "cuda"
    used_bytes = torch.cuda.memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss
    return used_bytes / 2**30, device_memory(device)[0] / 2**30


def peak_memory_gb(device: torch.device) -> float:
    """The most that this process has held so far, in GiB: of the GPU, or of the machine on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
