"""How many tokens the KV cache holds, and the cache itself.

Shapes: L layers, K key/value heads, S cache slots, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from miles.config.sections import EngineConfig
from miles.errors import EngineError
from miles.model.spec import ModelSpec
from miles.observe.log import get_logger
from miles.plan.memory import token_bytes, wanted_cache_tokens

logger = get_logger(__name__)

_CGROUP_LIMIT, _CGROUP_USAGE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


class KvCache:
    """Keys and values of all layers in one allocation. Starts as zeros: unused slots are read, then masked, and must
    be finite for that."""

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        shape = (2 * spec.num_layers, spec.num_kv_heads, num_blocks, page_size, spec.head_dim)
        self._data = _zeros(shape, dtype=dtype, device=device)
        caches = self._data.flatten(2, 3).unbind()
        self.k_caches, self.v_caches = caches[: spec.num_layers], caches[spec.num_layers :]

    @property
    def num_bytes(self) -> int:
        return self._data.numel() * self._data.element_size()

    def copy_blocks(self, pairs_N2: Tensor) -> None:
        """Copy every (source, target) pair; a source may be another pair's target and is read first."""
        source, target = pairs_N2.unbind(1)
        self._data.index_copy_(2, target, self._data.index_select(2, source))

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        self._data[:, :, list(blocks)] = 0


def cache_tokens(
    spec: ModelSpec, config: EngineConfig, *, num_rows: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Tokens the cache holds, a whole number of blocks: `--engine-max-total-tokens`, else the share of the GPU that
    `--engine-mem-fraction-static` gives, else what memory allows and `num_rows` answers can use. Raises `EngineError`
    when that is too little to work with, or more than there is."""
    page_size, per_token = config.engine_page_size, token_bytes(spec, dtype.itemsize)
    free_bytes, on_gpu = available_bytes(device), device.type == "cuda"
    wanted = wanted_cache_tokens(
        spec,
        config,
        num_rows=num_rows,
        itemsize=dtype.itemsize,
        free_bytes=free_bytes,
        gpu_bytes=total_bytes(device) if on_gpu else None,
    )
    asked_for = "--engine-max-total-tokens"
    if on_gpu and config.engine_max_total_tokens is None and config.engine_mem_fraction_static is not None:
        asked_for = f"--engine-mem-fraction-static {config.engine_mem_fraction_static} or {asked_for}"
    num_tokens = wanted // page_size * page_size
    if num_tokens < 2 * page_size:
        raise EngineError(
            f"the KV cache would hold {num_tokens} tokens and needs at least {2 * page_size}: raise {asked_for} (the "
            f"latter is now {config.engine_max_total_tokens}) or free memory ({free_bytes / 2**20:.0f} MiB are "
            f"available, a token takes {per_token} bytes)"
        )
    if num_tokens * per_token > free_bytes:
        raise EngineError(
            f"{asked_for}: {num_tokens} tokens take {num_tokens * per_token / 2**20:.0f} MiB but "
            f"{free_bytes / 2**20:.0f} MiB are available: at most {free_bytes // per_token} tokens fit"
        )
    if num_tokens < min(spec.max_position_embeddings, 1024 * num_rows):
        logger.warning(
            f"the KV cache holds only {num_tokens} tokens, for {num_rows} answers at a time at most: long answers wait "
            f"for each other, which can take several times as long. Raise {asked_for}, or free memory"
        )
    return num_tokens


def check_page_size(page_size: int, *, device: torch.device) -> None:
    if device.type == "cuda" and page_size & (page_size - 1):
        raise EngineError(f"--engine-page-size {page_size}: on a GPU it must be a power of two, such as 16")


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # By way of numpy, which takes zeros from the system and does not touch them: blocks that nobody uses cost nothing.
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def total_bytes(device: torch.device) -> int:
    """Memory of the GPU."""
    return torch.cuda.mem_get_info(device)[1]


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated: of the GPU, or of this machine and container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free_bytes = psutil.virtual_memory().available
    if _CGROUP_LIMIT.is_file() and (limit := _CGROUP_LIMIT.read_text().strip()) != "max":
        free_bytes = min(free_bytes, int(limit) - int(_CGROUP_USAGE.read_text()))
    return free_bytes
