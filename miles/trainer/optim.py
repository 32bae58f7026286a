"""AdamW on float32 masters, gradient clipping and the learning-rate schedule.

Parameters that need no gradient are left alone. A float32 parameter is its own master, unless it is a view into a
larger tensor: the fused update wants adjoining numbers. A 16-bit parameter has a float32 master, and its gradient is
summed over the micro-batches in float32 (`Tensor.grad_dtype`): with the two Adam moments 2 + 4 + 4 + 8 = 18 bytes a
parameter. Nothing here ever replaces the storage of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from miles.config.sections import OptimConfig
from miles.trainer.moments import MOMENTS, SCALES, Moments

Rename = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def learning_rate(config: OptimConfig, step: int, *, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Linear warm-up from `--lr-warmup-init` that reaches `--lr` at the last warm-up step, then the decay, which reaches
    `--min-lr` after `--lr-decay-iters` steps and stays there.
    """
    decay_steps = config.lr_decay_iters or total_steps
    warmup_steps = config.lr_warmup_iters
    if config.lr_warmup_fraction is not None:
        warmup_steps = round(config.lr_warmup_fraction * decay_steps)
    if step < warmup_steps:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * (step + 1) / warmup_steps
    if config.lr_decay_style == "constant":
        return config.lr
    progress = min((step - warmup_steps) / max(decay_steps - warmup_steps, 1), 1.0)
    if config.lr_decay_style == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2
    else:
        assert config.lr_decay_style == "linear", f"unknown --lr-decay-style {config.lr_decay_style!r}"
    return config.lr + (config.min_lr - config.lr) * progress


class Optimizer:
    """Owns masters, gradients and moments of a model's trainable parameters."""

    def __init__(self, model: nn.Module, config: OptimConfig, *, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.num_updates = 0
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters: dict[str, nn.Parameter] = {name: _master(p) for name, p in self.parameters.items()}
        for name, master in self.masters.items():
            self.parameters[name].grad_dtype = master.dtype
        self._make_gradients()
        self._moments = Moments(self.masters, config)
        self._shelf: dict[tuple[str, str], Tensor] = {}  # on the host, what `offload` has moved there

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return learning_rate(self.config, self.num_updates, total_steps=self.total_steps)

    def zero_grad(self) -> None:
        torch._foreach_zero_([master.grad for master in self.masters.values()])

    def grad_norm(self) -> float:
        """L2 norm of the whole gradient; nan or inf when a part of it is."""
        return float(torch.nn.utils.get_total_norm(parameter.grad for parameter in self.masters.values()))

    def clip(self, grad_norm: float) -> None:
        """Scale the gradient, whose norm this is, down to `--clip-grad`."""
        if 0 < self.config.clip_grad < grad_norm:
            torch._foreach_mul_([master.grad for master in self.masters.values()], self.config.clip_grad / grad_norm)

    def step(self) -> None:
        """One AdamW update at the scheduled learning rate; 16-bit parameters are derived from their masters."""
        self._moments.update(step=self.num_updates + 1, learning_rate=self.learning_rate)
        self.num_updates += 1
        self._derive_parameters()

    def moments(self, rename: Rename) -> dict[str, Tensor]:
        """The live moments under the names of a checkpoint: `exp_avg.NAME`, renamed (a part of a fused matrix has a
        name of its own); scales of 8-bit blocks, which have no such parts, under the names of the parameters."""
        self._moments.settle()
        states = self._moments.states
        named = {
            f"{moment}.{name}": tensor
            for moment in MOMENTS
            for name, tensor in rename({name: state[moment] for name, state in states.items()}).items()
        }
        scales = {f"{s}.{name}": state[s] for name, state in states.items() for s in SCALES if s in state}
        return named | scales

    def resume(self, num_updates: int) -> None:
        """Continue after this many updates, once a saved state was copied into the masters and moments."""
        self.num_updates = num_updates
        self._derive_parameters()

    def offload(self) -> None:
        """Move masters and moments to the host and drop the gradients, which the next step makes anew. Parameters stay
        where they are. `moments` and `masters` can be read and written there, but only `onload` allows an update."""
        for name, master in self.masters.items():
            self.parameters[name].grad = master.grad = None
        self._moments.settle()
        for place, tensor in self._movable().items():
            if place not in self._shelf:
                self._shelf[place] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._shelf[place].copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._put(self._shelf)

    def onload(self) -> None:
        """Undo `offload`."""
        device = next(iter(self.parameters.values())).device
        self._put({place: kept.to(device, non_blocking=True, copy=True) for place, kept in self._shelf.items()})
        self._make_gradients()

    def _movable(self) -> dict[tuple[str, str], Tensor]:
        """Masters that are no parameters, and moments that are not on the host, by parameter and kind."""
        masters = {(name, "master"): m.data for name, m in self.masters.items() if m is not self.parameters[name]}
        if self._moments.is_on_host:
            return masters
        states = self._moments.states.items()
        return masters | {(name, kind): tensor for name, state in states for kind, tensor in state.items()}

    def _put(self, tensors: dict[tuple[str, str], Tensor]) -> None:
        for (name, kind), tensor in tensors.items():
            if kind == "master":
                self.masters[name].data = tensor
            else:
                self._moments.states[name][kind] = tensor

    def _make_gradients(self) -> None:
        # Backward passes add into it, so its address stays until `offload`.
        for name, master in self.masters.items():
            self.parameters[name].grad = master.grad = torch.zeros_like(master, requires_grad=False)

    @torch.no_grad()
    def _derive_parameters(self) -> None:
        derived = [name for name, parameter in self.parameters.items() if self.masters[name] is not parameter]
        if derived:
            torch._foreach_copy_([self.parameters[name] for name in derived], [self.masters[name] for name in derived])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype.itemsize >= 4 and parameter.is_contiguous():
        return parameter
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(dtype, copy=True, memory_format=torch.contiguous_format))
