"""How many tokens the KV cache holds, and the cache itself.

Shapes: L layers, K key/value heads, S cache slots, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from miles.config.sections import EngineConfig
from miles.errors import ConfigError, EngineError
from miles.model.spec import ModelSpec
from miles.observe.gpu import device_memory
from miles.observe.log import get_logger
from miles.plan.memory import cache_reserve, token_bytes, wanted_cache_tokens

logger = get_logger(__name__)


class KvCache:
    """Keys and values of all layers in one allocation. Starts as zeros: unused slots are read, then masked, and must
    be finite for that."""

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self._num_layers, self._device = num_blocks, spec.num_layers, device
        shape = (2 * spec.num_layers, spec.num_kv_heads, num_blocks, page_size, spec.head_dim)
        self._make = partial(_zeros, shape, dtype=dtype, device=device)
        self._data = torch.empty(0)
        self.allocate()

    def allocate(self) -> None:
        """Take the memory; after `release` it need not lie where it was. Raises `EngineError` when it is not there."""
        self.release()  # also what a trainer has left in pieces
        try:
            self._data = self._make()
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"the memory of the KV cache is not there any more ({str(error).partition('. ')[0]}): lower "
                "--engine-mem-fraction-static or --engine-max-total-tokens"
            ) from None
        caches = self._data.flatten(2, 3).unbind()
        self.k_caches, self.v_caches = caches[: self._num_layers], caches[self._num_layers :]

    def release(self) -> int:
        """Give the memory back, to other programs too; the bytes. What was stored is lost."""
        num_bytes = self.num_bytes
        self._data, self.k_caches, self.v_caches = torch.empty(0), (), ()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return num_bytes

    @property
    def num_bytes(self) -> int:
        return self._data.numel() * self._data.element_size()

    @property
    def address(self) -> int:
        return self._data.data_ptr()

    def copy_blocks(self, pairs_N2: Tensor) -> None:
        """Copy every (source, target) pair; a source may be another pair's target and is read first."""
        source, target = pairs_N2.unbind(1)
        self._data.index_copy_(2, target, self._data.index_select(2, source))

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        self._data[:, :, list(blocks)] = 0


def cache_tokens(
    spec: ModelSpec, config: EngineConfig, *, num_rows: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Tokens the cache holds, a whole number of blocks: `--engine-max-total-tokens`, else the share of the memory that
    `--engine-mem-fraction-static` gives, else what memory allows and `num_rows` answers can use. Raises `ConfigError`
    when that is too little to work with, or more than there is."""
    page_size, per_token = config.engine_page_size, token_bytes(spec, dtype.itemsize)
    free_bytes, total, on_gpu = available_bytes(device), total_bytes(device), device.type == "cuda"
    wanted = wanted_cache_tokens(
        spec,
        config,
        num_rows=num_rows,
        itemsize=dtype.itemsize,
        free_bytes=free_bytes,
        total_bytes=total,
        on_gpu=on_gpu,
    )
    asked_for = "--engine-max-total-tokens"
    if config.engine_max_total_tokens is None and config.engine_mem_fraction_static is not None:
        asked_for = f"--engine-mem-fraction-static {config.engine_mem_fraction_static} or {asked_for}"
    num_tokens = wanted // page_size * page_size
    if num_tokens < 2 * page_size:
        raise ConfigError(
            f"the KV cache would hold {num_tokens} tokens and needs at least {2 * page_size}: raise {asked_for}, or "
            f"free memory ({free_bytes / 2**20:.0f} MiB are available, a token takes {per_token} bytes)"
        )
    left_bytes = free_bytes - num_tokens * per_token
    if left_bytes < 0:
        raise ConfigError(
            f"{asked_for}: {num_tokens} tokens take {num_tokens * per_token / 2**20:.0f} MiB but "
            f"{free_bytes / 2**20:.0f} MiB are available: at most {free_bytes // per_token} tokens fit"
        )
    if num_tokens < min(spec.max_position_embeddings, 1024 * num_rows):
        logger.warning(
            f"the KV cache holds only {num_tokens} tokens, {num_tokens // num_rows} for each of the {num_rows} answers "
            "that may be written at one time: longer ones wait for each other, which can take several times as long. "
            f"Raise {asked_for}, or free memory"
        )
    if on_gpu and left_bytes < cache_reserve(config) / 2 * total:
        logger.warning(
            f"a KV cache of {num_tokens} tokens leaves {left_bytes / 2**20:.0f} MiB of the GPU, where CUDA graphs and "
            f"what the trainer keeps of a micro-batch must fit: they may run out of memory. Lower {asked_for}"
        )
    return num_tokens


def check_page_size(page_size: int, *, device: torch.device) -> None:
    if device.type == "cuda" and page_size & (page_size - 1):
        raise ConfigError(f"--engine-page-size {page_size}: on a GPU it must be a power of two, such as 16")


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # By way of numpy, which takes zeros from the system and does not touch them: blocks that nobody uses cost nothing.
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def total_bytes(device: torch.device) -> int:
    """Memory of the device, as `device_memory` finds it."""
    return device_memory(device)[1]


def available_bytes(device: torch.device) -> int:
    """Memory of the device that can still be allocated."""
    return device_memory(device)[0]
