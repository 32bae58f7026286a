"""Matrix products of the decoder: `x @ weight.T`, with weights stored as (outputs, inputs)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from miles.ops.kernels import has_kernels, kernels
from miles.ops.numerics import cpu_tiles, is_invariant


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` in the dtype of `x`. The gradient of a weight that has a `gradient_sum` is added to it."""
    if is_invariant():
        return _Product.apply(x, weight, bias) if has_kernels(x) else _in_whole_tiles(x, weight, bias)
    if torch.is_grad_enabled() and gradient_sum(weight) is not None:
        return _Product.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def gradient_sum(weight: Tensor) -> Tensor | None:
    """The sum of a half-precision weight's gradients, kept in float32 (`Tensor.grad_dtype`), if there is one.

    A product adds to it at once, from its float32 accumulators. autograd would round each gradient to the dtype of the
    weight first, then write it in float32, and read and write both to add it.
    """
    return weight.grad if weight.grad is not None and weight.grad.dtype != weight.dtype else None


def gradient_to_add_to(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Where a backward pass adds up the gradient of `weight`, in float32 or wider, and what it returns for it."""
    if (total := gradient_sum(weight)) is not None:
        return total, None
    total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    return total, total


def add_linear(total: Tensor, x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """`total + scale * x @ weight.T`, added in place: one product that starts from `total`, or an invariant one."""
    if is_invariant():  # scaled and added apart: in one step, where an element lies would decide its last bit
        return total.add_(linear(x, weight).mul_(scale))
    return total.addmm_(x, weight.t(), alpha=scale)


def project_float32(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits `x @ weight.T` in float32 (T x V), never rounded to the dtype of the weights on the way.

    On a CUDA device half-precision inputs go to the tensor cores as they are and the float32 accumulators come back;
    this path has no gradient (the chunked head in `ops/logprob.py` has its own).
    """
    if is_invariant():
        if has_kernels(x_TD):
            return kernels("matmul").row_product(x_TD, weight_VD, dtype=torch.float32)
        return _in_whole_tiles(x_TD.float(), weight_VD.float())
    if x_TD.dtype == torch.float32:
        return F.linear(x_TD, weight_VD.float())
    if x_TD.is_cuda:
        return torch.mm(x_TD, weight_VD.t(), out_dtype=torch.float32)
    return F.linear(x_TD.float(), weight_VD.float())


def add_product_float32(total_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    """`total += left @ right` with a float32 total and float32 accumulators, whatever the dtype of the factors."""
    if left_MK.dtype == torch.float32:
        total_MN.addmm_(left_MK, right_KN)
    elif left_MK.is_cuda:
        torch.addmm(total_MN, left_MK, right_KN, out_dtype=torch.float32, out=total_MN)
    else:
        total_MN.addmm_(left_MK.float(), right_KN.float())


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """`x` with rows of zeros (of its last dimension but one) up to a multiple."""
    missing = -x.shape[-2] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _in_whole_tiles(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    tiles, num_rows = cpu_tiles(), x.shape[0]
    if tiles.doubles:
        return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)
    return F.linear(pad_rows(x, tiles.rows), weight, bias)[:num_rows]


class _Product(torch.autograd.Function):
    # Invariant or not, the gradients are the library's products, which are repeatable: nothing is compared with them.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # itself: what was saved may come back without its gradient
        return kernels("matmul").row_product(x, weight, bias) if is_invariant() else F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), grad_weight = ctx.saved_tensors, None
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        if wants_weight and (total := gradient_sum(ctx.weight)) is not None:
            add_product_float32(total, grad.t(), x)
        elif wants_weight:
            grad_weight = grad.t() @ x
        return grad @ weight if wants_x else None, grad_weight, grad.sum(0) if wants_bias else None
