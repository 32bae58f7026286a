"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from miles.model.context import ForwardContext
from miles.model.layers import Linear
from miles.model.spec import ModelSpec
from miles.ops.activation import silu_mul


class Mlp(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up as one product."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_up = Linear(hidden, 2 * inner, bias=spec.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(inner, hidden, bias=spec.mlp_bias, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor, context: ForwardContext, make_x: Callable[[], Tensor]) -> Tensor:
        """`make_x` computes `x` again."""
        gate_up_T2F = self.gate_up(x_TD, context, make_x)
        return self.down(silu_mul(gate_up_T2F), context, partial(silu_mul, gate_up_T2F))
