"""Parameter holders that call `ops/`. Memory is left uninitialised: `load.py` fills it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from miles.model.context import ForwardContext
from miles.ops.matmul import linear
from miles.ops.norm import add_rms_norm, rms_norm, rms_norm_of_sum
from miles.ops.remake import made_again


class Linear(nn.Module):
    """`x @ weight.T + bias`, plus what `lora` adds (`lora.py`) where there is one."""

    def __init__(
        self, num_inputs: int, num_outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(num_outputs, dtype=dtype, device=device)) if bias else None
        self.lora: nn.Module | None = None

    def forward(self, x: Tensor, context: ForwardContext, make: Callable[[], Tensor] | None = None) -> Tensor:
        """`make` computes `x` again, with the same bits; None: `x` is kept."""
        with made_again(make if context.remakes else None, x):
            out = linear(x, self.weight, self.bias)
            return out if self.lora is None or not context.adapter else self.lora(out, x, context)


class RmsNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `x + added`, and `x + added`."""
        return add_rms_norm(x, added, self.weight, self.eps)

    def of_sum(self, total: Tensor) -> Tensor:
        """The first result of `after_adding` again, from the second."""
        return rms_norm_of_sum(total, self.weight, self.eps)
