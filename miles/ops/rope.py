"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the layout where dimension i pairs with i + H/2.

Shapes: T packed tokens, N heads, H head size, S positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """Radians per position of each pair of dimensions (H/2, float32)."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def llama3_frequencies(
    frequencies: Tensor, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_positions: int
) -> Tensor:
    """Llama 3's stretch for longer contexts: wavelengths beyond `original_positions / low_freq_factor` grow by
    `factor`, those below `original_positions / high_freq_factor` stay, and those between are interpolated."""
    turns = original_positions * frequencies / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor)


def rope_table(frequencies: Tensor, num_positions: int) -> Tensor:
    """Cosines, then sines, of every position: S x H, float32. Half of what `apply_rope` takes: see `rope_at`."""
    angles = torch.arange(num_positions, dtype=torch.float32, device=frequencies.device).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rope_at(table_SH: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the table as `apply_rope` wants them: cosines and signed sines, each T x 1 x H."""
    cos, sin = table_SH.index_select(0, positions_T).unsqueeze(1).chunk(2, -1)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rope(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """Rotate every head by its token's position; float32 inside, in the dtype of `x`. Queries and keys may be passed
    together, since heads do not mix. `sin` carries the sign of the rotation (see `rope_at`)."""
    if torch.is_grad_enabled() and x_TNH.requires_grad:
        return _Rope.apply(x_TNH, cos_T1H, sin_T1H)
    return _rotate(x_TNH, cos_T1H, sin_T1H)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Two products and a sum, not addcmul: its fused rounding differs, and this form equals transformers bit for bit.
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class _Rope(torch.autograd.Function):
    # The gradient of a rotation is the rotation by the opposite angle: nothing of `x` needs to be kept.

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None
