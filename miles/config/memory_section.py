"""The flags that trade time for memory of the trainer, and what contradicts itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from miles.config.fields import NOT_NEGATIVE, flag


@dataclass(frozen=True)
class MemoryConfig:
    """Memory of the trainer (what each flag costs: docs/trainer.md)"""

    recompute_granularity: str | None = flag(
        None,
        "what the backward pass computes again; selective: cheap parts of all layers; full: whole layers; "
        "default: as little as memory asks for",
        choices=("full", "selective"),
        resume=True,
    )
    recompute_method: str | None = flag(
        None,
        "uniform: all layers; block: the first --recompute-num-layers",
        choices=("uniform", "block"),
        resume=True,
    )
    recompute_num_layers: int | None = flag(
        None,
        "layers that are computed again; default: by --recompute-granularity",
        unit="layers",
        bounds=NOT_NEGATIVE,
        resume=True,
    )
    offload_train: bool = flag(
        False, "move masters and moments to the host, and drop gradients, while the engine writes", resume=True
    )


def memory_violations(memory: MemoryConfig, *, adam_state: str) -> Iterator[str]:
    if adam_state == "8bit" and importlib.util.find_spec("bitsandbytes") is None:
        yield "--adam-state 8bit needs the package bitsandbytes: pip install 'miles[adam8bit]'"
    num_layers, method = memory.recompute_num_layers, memory.recompute_method
    if memory.recompute_granularity == "selective" and (num_layers is not None or method):
        yield "--recompute-num-layers and --recompute-method need --recompute-granularity full"
    if method == "block" and num_layers is None:
        yield "--recompute-method block needs --recompute-num-layers"
    if method == "uniform" and memory.recompute_granularity is None:
        yield "--recompute-method uniform needs --recompute-granularity full"
    if method == "uniform" and num_layers not in (None, 1):
        yield (
            f"--recompute-method uniform --recompute-num-layers {num_layers}: layers are computed again one at a time "
            "here; leave the number out, or use --recompute-method block for the first layers only"
        )
