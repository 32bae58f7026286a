"""Matrix products of the decoder: `x @ weight.T`, with weights stored as (outputs, inputs)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` in the dtype of `x`."""
    return F.linear(x, weight, bias)


def add_linear(total: Tensor, x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """`total + scale * x @ weight.T`, added in place: one product that starts from `total`."""
    return total.addmm_(x, weight.t(), alpha=scale)


def project_float32(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits `x @ weight.T` in float32 (T x V), never rounded to the dtype of the weights on the way.

    On a CUDA device half-precision inputs go to the tensor cores as they are and the float32 accumulators come back;
    this path has no gradient (the chunked head in `ops/logprob.py` has its own).
    """
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
