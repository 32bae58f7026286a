"""How much memory a micro-batch may take: tokens, layers that are computed again, logits at one time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch

from miles.config.memory_section import MemoryConfig
from miles.config.sections import RunConfig
from miles.model.activations import ActivationBudget
from miles.model.decoder import Decoder
from miles.observe.log import get_logger
from miles.trainer.packing import default_chunk_size

logger = get_logger(__name__)

CPU_ACTIVATION_BYTES = 2**30
CPU_CHUNK_SIZE = 1024
GPU_ACTIVATION_SHARE, GPU_LOGITS_SHARE = 0.2, 0.02  # of the device's memory
FREE_SHARE = 0.4  # what activations may take of the memory that is free: the KV cache needs some, and work space
FEWEST_TOKENS = {"cpu": 512, "cuda": 4096}  # layers are computed again before micro-batches become smaller


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_tokens` of a micro-batch (a longer sample is one of its own) and what its activations may take."""

    max_tokens: int
    chunk_size: int
    activations: ActivationBudget

    def apply_to(self, model: Decoder) -> None:
        model.num_recomputed = replace(self.activations, spec=model.spec).recomputed_for


def find_limits(model: Decoder, config: RunConfig) -> Limits:
    """From the flags and the memory: call it when masters and optimizer states are there.

    The token budget does not depend on what other programs leave free, so that a run packs alike each time; the number
    of layers that are computed again, which changes no bit of a result, does.
    """
    spec, device = model.spec, model.head_weight.device
    packed_bytes, chunk_size, free_bytes = CPU_ACTIVATION_BYTES, CPU_CHUNK_SIZE, psutil.virtual_memory().available
    max_bytes = int(FREE_SHARE * free_bytes)
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        unused_bytes = total_bytes - torch.cuda.memory_allocated(device)
        packed_bytes = int(min(GPU_ACTIVATION_SHARE * total_bytes, FREE_SHARE * unused_bytes))
        max_bytes = min(packed_bytes, int(FREE_SHARE * free_bytes))
        chunk_size = default_chunk_size(spec, memory_bytes=int(GPU_LOGITS_SHARE * total_bytes))
    num_recomputed = recomputed_layers(config.memory, spec.num_layers)
    budget = ActivationBudget(spec, model.head_weight.dtype.itemsize, max_bytes, num_recomputed)
    packed = replace(budget, max_bytes=packed_bytes)
    max_tokens = config.batch.max_tokens_per_gpu or packed.default_tokens(fewest=FEWEST_TOKENS[device.type])
    logger.info(
        f"micro-batches of {max_tokens} tokens, {budget.recomputed_for(max_tokens)} of {spec.num_layers} layers "
        f"computed again; activations may take {max_bytes / 2**30:.1f} GiB"
    )
    return Limits(max_tokens, config.batch.log_probs_chunk_size or chunk_size, budget)


def recomputed_layers(memory: MemoryConfig, num_layers: int) -> int | None:
    """How many of the model's layers are computed again; None: as many as memory asks for."""
    if memory.recompute_num_layers is not None and memory.recompute_method != "uniform":
        return min(memory.recompute_num_layers, num_layers)
    if memory.recompute_granularity == "full":
        return num_layers
    if memory.recompute_granularity == "selective":
        return 0
    return None
