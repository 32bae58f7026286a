"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miles.ops.kernels import has_kernels, kernels


def add_rms_norm(x_TD: Tensor, added_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + added), x + added)`: the start of a sublayer, where the output of the one before joins."""
    if has_kernels(x_TD):
        return kernels("norm_rope").add_rms_norm(x_TD, added_TD, weight_D, eps)
    total_TD = x_TD + added_TD
    return rms_norm(total_TD, weight_D, eps), total_TD


def rms_norm_of_sum(total_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The first result of `add_rms_norm` from the second, with the same bits; no gradient."""
    return (kernels("norm_rope").rms_norm_of_sum if has_kernels(total_TD) else rms_norm)(total_TD, weight_D, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32, in the dtype of `x`."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _RmsNorm(torch.autograd.Function):
    # The built-in backward makes about three times as many passes over memory as this one.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_f, x_f, weight_f = grad.float(), x.float(), weight.float()
        inverse_rms = torch.rsqrt(x_f.pow(2).mean(-1, keepdim=True).add_(ctx.eps))
        normed = x_f * inverse_rms
        grad_by_normed = grad_f * normed
        mean_dot = (grad_by_normed @ weight_f).div_(weight.shape[0]).unsqueeze(-1)
        grad_x = torch.addcmul(grad_f * weight_f, normed, mean_dot, value=-1).mul_(inverse_rms)
        grad_weight = grad_by_normed.flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
