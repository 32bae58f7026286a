"""Tensors that the backward pass makes again instead of keeping them: cheap results of what is kept anyway."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from miles.ops.numerics import invariant, is_invariant


def made_again(make: Callable[[], Any] | None, *tensors: Tensor) -> AbstractContextManager[Any]:
    """Where operations within would keep one of `tensors` for their backward pass, that calls `make` again.

    `make` returns `tensors`, or the only one, with the same bits. What it reads stays alive until then. Without it
    everything is kept.
    """
    if make is None:
        return nullcontext()
    again = _Again(make, tensors)
    return saved_tensors_hooks(again.pack, again.unpack)


class _Again:
    def __init__(self, make: Callable[[], Any], tensors: tuple[Tensor, ...]) -> None:
        self.make, self.is_invariant = make, is_invariant()  # the backward pass can be on another thread
        self.places = {x.data_ptr(): (number, x.shape, x.stride()) for number, x in enumerate(tensors)}
        self.made: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor | int:
        number, *layout = self.places.get(tensor.data_ptr(), (0,))  # hooks see aliases
        return number if layout == [tensor.shape, tensor.stride()] else tensor

    def unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed not in self.made:
            with torch.no_grad(), invariant() if self.is_invariant else nullcontext():
                made = self.make()
            self.made = dict(enumerate((made,) if isinstance(made, Tensor) else made))
        return self.made.pop(packed)  # who asks keeps it alive, and nobody else does
