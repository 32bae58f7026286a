"""Adam's two moments as they are kept between updates, and the update that is made from them.

float32 is exact. bfloat16 is rounded up or down at random, so that the mean is right: to the nearest, a second moment
would never follow a change of less than 0.4 percent. 8 bit: blocks of 256 numbers with a scale each (arXiv 2110.02861),
by bitsandbytes. Vectors (norms, biases) stay float32: they are few.

On the host the moments pass through the device in pieces; one piece is updated while the next comes and the last goes.
"""

from __future__ import annotations

import importlib
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from miles.config.sections import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
BLOCK = 256  # numbers that share a scale
PIECE = 2**25  # numbers that are on their way at one time, whole blocks

Piece = tuple[str, slice]  # of the numbers of a parameter


class Moments:
    """Owns the moments of these masters. `states[name]` has tensors of the parameter's shape by name of the moment,
    and the scales of 8-bit blocks."""

    def __init__(self, masters: dict[str, nn.Parameter], config: OptimConfig) -> None:
        self._masters, self._config = masters, config
        self._device = next(iter(masters.values())).device
        self.is_on_host = config.optimizer_cpu_offload and self._device.type == "cuda"
        self.states = {name: self._empty(master) for name, master in masters.items()}
        in_pieces = self.is_on_host or config.adam_state == "bfloat16"
        self._batches = list(self._in_batches(PIECE if in_pieces else sys.maxsize))
        if self.is_on_host:
            self._inward, self._outward = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        if config.adam_state == "8bit":
            self._library: Any = importlib.import_module("bitsandbytes.functional")
            self._maps = [self._library.create_dynamic_map(signed).to(self._device) for signed in (True, False)]

    def settle(self) -> None:
        """Wait until what is on its way to the host has arrived: before the states are read or written there."""
        if self.is_on_host:
            self._outward.synchronize()

    @torch.no_grad()
    def update(self, *, step: int, learning_rate: float) -> None:
        """AdamW update number `step` (from 1) of the masters by their gradients."""
        leaving: deque[tuple[Any, list[dict[str, Tensor]]]] = deque()
        if self.is_on_host:
            self._inward.wait_stream(self._outward)
        coming = self._fetch(self._batches[0])
        for i, batch in enumerate(self._batches):
            states = coming
            if self.is_on_host:
                torch.cuda.current_stream().wait_stream(self._inward)
            if i + 1 < len(self._batches):
                coming = self._fetch(self._batches[i + 1])
            self._update(batch, states, step=step, learning_rate=learning_rate)
            if self.is_on_host:
                leaving.append((self._put_back(batch, states), states))
                if len(leaving) > 1:  # the host is far ahead: without waiting all would be on the device at one time
                    leaving.popleft()[0].synchronize()

    def _empty(self, master: nn.Parameter) -> dict[str, Tensor]:
        kind = self._config.adam_state if master.ndim >= 2 else "float32"
        dtype = {"float32": master.dtype, "bfloat16": torch.bfloat16, "8bit": torch.uint8}[kind]
        where: dict[str, Any] = {"pin_memory": True} if self.is_on_host else {"device": self._device}
        state = {moment: torch.zeros(master.shape, dtype=dtype, **where) for moment in MOMENTS}
        if kind == "8bit":
            state |= {scale: torch.zeros(-(-master.numel() // BLOCK), **where) for scale in SCALES}
        return state

    def _in_batches(self, most: int) -> Iterator[list[Piece]]:
        """Matrices, then vectors, which have no weight decay; a batch has at most so many numbers."""
        for is_matrix in (True, False):
            batch: list[Piece] = []
            room = most
            for name, master in self._masters.items():
                if (master.ndim >= 2) != is_matrix:
                    continue
                for start in range(0, master.numel(), most):
                    stop = min(start + most, master.numel())
                    if stop - start > room:
                        yield batch
                        batch, room = [], most
                    batch.append((name, slice(start, stop)))
                    room -= stop - start
            if batch:
                yield batch

    def _parts(self, piece: Piece) -> dict[str, Tensor]:
        name, span = piece
        blocks = slice(span.start // BLOCK, -(-span.stop // BLOCK))
        return {key: _part(kept, blocks if key in SCALES else span) for key, kept in self.states[name].items()}

    def _fetch(self, batch: list[Piece]) -> list[dict[str, Tensor]]:
        parts = [self._parts(piece) for piece in batch]
        if not self.is_on_host:
            return parts
        with torch.cuda.stream(self._inward):
            return [{key: t.to(self._device, non_blocking=True) for key, t in part.items()} for part in parts]

    def _put_back(self, batch: list[Piece], states: list[dict[str, Tensor]]) -> Any:
        here = torch.cuda.current_stream()
        self._outward.wait_stream(here)
        with torch.cuda.stream(self._outward):
            for piece, state in zip(batch, states, strict=True):
                for key, kept in self._parts(piece).items():
                    kept.copy_(state[key], non_blocking=True)
                    # Its memory belongs to the stream it came on.
                    state[key].record_stream(here)
                    state[key].record_stream(self._outward)
            return self._outward.record_event()

    def _update(self, batch: list[Piece], states: list[dict[str, Tensor]], *, step: int, learning_rate: float) -> None:
        config = self._config
        masters = [_part(self._masters[name], span) for name, span in batch]
        grads = [_part(self._masters[name].grad, span) for name, span in batch]
        rule = {
            "beta1": config.adam_beta1,
            "beta2": config.adam_beta2,
            "eps": config.adam_eps,
            "lr": learning_rate,
            "weight_decay": config.weight_decay if self._masters[batch[0][0]].ndim >= 2 else 0.0,
        }
        if SCALES[0] in states[0]:
            for master, grad, state in zip(masters, grads, states, strict=True):
                kept = {f"state{i}": state[moment] for i, moment in enumerate(MOMENTS, 1)}
                kept |= {f"absmax{i}": state[scale] for i, scale in enumerate(SCALES, 1)}
                kept |= {f"qmap{i}": values for i, values in enumerate(self._maps, 1)}
                self._library.optimizer_update_8bit_blockwise(
                    "adam", grad, master, **kept, beta3=0.0, alpha=0.0, step=step, **rule
                )
            return
        moments = [[state[moment].to(masters[0].dtype) for state in states] for moment in MOMENTS]
        steps = list(torch.full((len(batch),), float(step - 1), device=self._device).unbind())
        adamw(masters, grads, *moments, [], steps, fused=True, amsgrad=False, maximize=False, **rule)
        for moment, exact in zip(MOMENTS, moments, strict=True):
            for state, values in zip(states, exact, strict=True):
                if state[moment].dtype == torch.bfloat16:
                    round_at_random_(state[moment], values)


def _part(tensor: Tensor, span: slice) -> Tensor:
    """These of its numbers. Thousands of views of whole tensors would take longer than the update."""
    return tensor if span.stop - span.start == tensor.numel() else tensor.view(-1)[span]


def round_at_random_(kept: Tensor, exact: Tensor) -> None:
    """Set bfloat16 `kept` to one of the two neighbours of each float32 number, the nearer one more often: the mean is
    the number. Overwrites `exact`."""
    bits = exact.view(torch.int32)
    bits += torch.randint_like(bits, 1 << 16)
    kept.copy_(bits.bitwise_and_(-(1 << 16)).view(torch.float32))
