"""How many tokens the KV cache holds, and the cache itself.

Shapes: L layers, K key/value heads, S cache slots, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from miles.config.sections import EngineConfig
from miles.errors import EngineError
from miles.model.spec import ModelSpec

# Of the memory that is free on a CPU; the trainer, the page cache and other programs need the rest.
_CPU_SHARE = 0.2
_CGROUP_LIMIT, _CGROUP_USAGE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


class KvCache:
    """Keys and values of all layers in one allocation. Starts as zeros: unused slots are read, then masked, and must
    be finite for that."""

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (2 * spec.num_layers, spec.num_kv_heads, num_blocks, page_size, spec.head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        caches = self._data.flatten(2, 3).unbind()
        self.k_caches, self.v_caches = caches[: spec.num_layers], caches[spec.num_layers :]

    @property
    def num_bytes(self) -> int:
        return self._data.numel() * self._data.element_size()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy every (source, target) pair; a source may be another pair's target and is read first."""
        source, target = torch.tensor(pairs, device=self._data.device).unbind(1)
        self._data.index_copy_(2, target, self._data.index_select(2, source))

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        self._data[:, :, list(blocks)] = 0


def token_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token, all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def cache_tokens(
    spec: ModelSpec, config: EngineConfig, *, num_rows: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Tokens the cache holds, a whole number of blocks: `--engine-max-total-tokens`, else what memory allows and
    `num_rows` answers can use. Raises `EngineError` when that is too little to work with."""
    page_size, per_token = config.engine_page_size, token_bytes(spec, dtype)
    free_bytes = available_bytes(device)
    wanted = config.engine_max_total_tokens
    if wanted is None:
        share = config.engine_mem_fraction_static if device.type == "cuda" else _CPU_SHARE
        wanted = min(num_rows * spec.max_position_embeddings, int(free_bytes * (share or 0.5)) // per_token)
    num_tokens = wanted // page_size * page_size
    if num_tokens < 2 * page_size:
        raise EngineError(
            f"the KV cache would hold {num_tokens} tokens and needs at least {2 * page_size}: raise "
            f"--engine-max-total-tokens (now {config.engine_max_total_tokens}) or free memory "
            f"({free_bytes / 2**20:.0f} MiB are available, a token takes {per_token} bytes)"
        )
    if num_tokens * per_token > free_bytes:
        raise EngineError(
            f"--engine-max-total-tokens {num_tokens} takes {num_tokens * per_token / 2**20:.0f} MiB but "
            f"{free_bytes / 2**20:.0f} MiB are available: at most {free_bytes // per_token} tokens fit"
        )
    return num_tokens


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated: of the GPU, or of this machine and container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free_bytes = psutil.virtual_memory().available
    if _CGROUP_LIMIT.is_file() and (limit := _CGROUP_LIMIT.read_text().strip()) != "max":
        free_bytes = min(free_bytes, int(limit) - int(_CGROUP_USAGE.read_text()))
    return free_bytes
