"""Bytes of what operations made and what is alive of it, saved tensors too, whatever hooks say about them."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles.model.activations import Recompute
from miles.model.context import ForwardContext
from miles.model.decoder import Decoder


class Living(TorchDispatchMode):
    """`peak` is the most after any operation within."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.given: dict[int, StorageWeakRef] = {}  # a reference also keeps its address from being used again
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for key, storage in _storages((args, kwargs)).items():
            if key not in self.made:
                self.given.setdefault(key, StorageWeakRef(storage))
        result = func(*args, **(kwargs or {}))
        for key, storage in _storages(result).items():
            if key not in self.given:
                self.made[key] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.num_bytes)
        return result

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for storage, num_bytes in self.made.values() if not storage.expired())


def _storages(values: Any) -> dict[int, Any]:
    found = (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor))
    return {storage._cdata: storage for storage in found}


def outcome(model: Decoder, again: Recompute, context: ForwardContext) -> tuple[list[Tensor], int]:
    """Hidden states and gradients of a pass that computes this again, and bytes that its forward kept."""
    model.recompute_for = lambda num_tokens: again
    ids_T = torch.arange(len(context.positions_T)) * 7 % model.spec.vocab_size
    with Living() as living:
        hidden_TD = model(ids_T, context)
    gc.collect()  # the interpreter of Triton leaves cycles
    kept = living.num_bytes
    scale_TD = torch.linspace(-1, 1, hidden_TD.numel()).view_as(hidden_TD)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad((hidden_TD * scale_TD).sum(), trained, allow_unused=True)
    return [hidden_TD.detach(), *(gradient for gradient in gradients if gradient is not None)], kept
