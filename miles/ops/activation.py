"""The gated activation of the feed-forward block (SwiGLU, Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miles.ops.kernels import has_kernels, kernels
from miles.ops.numerics import is_invariant


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """`silu(gate) * up`, where gate and up are the two halves of the last dimension; T x F."""
    if has_kernels(gate_up_T2F):
        return kernels("norm_rope").silu_mul(gate_up_T2F)
    if torch.is_grad_enabled() and gate_up_T2F.requires_grad:
        return _SiluMul.apply(gate_up_T2F)
    gate, up = gate_up_T2F.chunk(2, -1)
    return _silu(gate).mul_(up)


def _silu(gate: Tensor) -> Tensor:
    # The library's loop ends in another formula than it begins with: where an element lies would decide its last bit.
    return gate / gate.neg().exp_().add_(1.0) if is_invariant() else F.silu(gate)


class _SiluMul(torch.autograd.Function):
    # Saves the fused input alone, and writes both halves of the gradient into one tensor: no concatenation.

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        gate, up = gate_up_T2F.chunk(2, -1)
        return _silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        gate, up = gate_up_T2F.chunk(2, -1)
        grad_T2F = torch.empty_like(gate_up_T2F)
        grad_gate, grad_up = grad_T2F.chunk(2, -1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_T2F
