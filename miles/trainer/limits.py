"""How much memory a micro-batch may take: tokens, what is computed again, logits at one time."""

from __future__ import annotations

from dataclasses import replace

import torch

from miles.config.sections import RunConfig
from miles.model.decoder import Decoder
from miles.observe.gpu import device_memory
from miles.observe.log import get_logger
from miles.plan.memory import Limits, trainer_limits

logger = get_logger(__name__)


def find_limits(model: Decoder, config: RunConfig) -> Limits:
    """`plan/memory.py` says what follows from the memory; call this when masters and optimizer states are there."""
    spec, device = model.spec, model.head_weight.device
    free_bytes, total_bytes = device_memory(device)
    on_gpu = device.type == "cuda"
    unused_bytes = total_bytes - torch.cuda.memory_allocated(device) if on_gpu else free_bytes
    limits = trainer_limits(
        spec,
        config,
        itemsize=model.head_weight.dtype.itemsize,
        free_bytes=free_bytes,
        unused_bytes=unused_bytes,
        gpu_bytes=total_bytes if on_gpu else None,
    )
    logger.info(
        f"micro-batches of {limits.max_tokens} tokens, {limits.activations.recompute_for(limits.max_tokens)}; "
        f"activations may take {limits.activations.max_bytes / 2**30:.1f} GiB"
    )
    return limits


def apply_limits(limits: Limits, model: Decoder) -> None:
    model.recompute_for = replace(limits.activations, spec=model.spec).recompute_for
