"""What low-rank adapters add to a product that several of them share.

Query, key and value are rows of one product here, and so are gate and up: such a product has an adapter for each. Their
A lie on top of each other, and their B are the blocks of one matrix that is 0 elsewhere, so that all adapters of a
product cost two small products. The B that are trained are views of these blocks.

T tokens, I inputs, O outputs, R rank, N adapters of the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.ops.matmul import add_linear, linear


def add_lora(
    out_TO: Tensor,
    x_TI: Tensor,
    a: Tensor,
    blocks: Tensor,
    parts: Sequence[Tensor],
    starts: Sequence[int],
    scale: float,
) -> Tensor:
    """`out + scale * x @ A.T @ B.T`, in place, with `a` N R x I and `blocks` O x N R. Gradients go to `out`, `x`, `a`
    and `parts`: the block of adapter i, columns i R to (i + 1) R - 1 of the rows from `starts[i]` on."""
    return _AddLora.apply(out_TO, x_TI, a, blocks, tuple(starts), scale, *parts)


def drop(x: Tensor, rate: float, seed: int) -> Tensor:
    """`x` with this share of its entries set to 0 and the others scaled up. The same seed drops the same entries."""
    generator = torch.Generator(x.device).manual_seed(seed)
    return x * torch.empty_like(x).bernoulli_(1 - rate, generator=generator).div_(1 - rate)


class _AddLora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out_TO: Tensor,
        x_TI: Tensor,
        a: Tensor,
        blocks: Tensor,
        starts: tuple[int, ...],
        scale: float,
        *parts: Tensor,
    ) -> Tensor:
        h = linear(x_TI, a)
        ctx.save_for_backward(x_TI, a, blocks, h)
        ctx.rows = [slice(start, start + part.shape[0]) for start, part in zip(starts, parts, strict=True)]
        ctx.scale = scale
        ctx.mark_dirty(out_TO)
        return add_linear(out_TO, h, blocks, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, a, blocks, h = ctx.saved_tensors
        grad_h = (grad_TO @ blocks).mul_(ctx.scale)
        grad_x = grad_h @ a if ctx.needs_input_grad[1] else None
        columns = h.chunk(len(ctx.rows), 1)
        grad_parts = [
            (grad_TO[:, rows].t() @ columns_TR).mul_(ctx.scale)
            for rows, columns_TR in zip(ctx.rows, columns, strict=True)
        ]
        return grad_TO, grad_x, grad_h.t() @ x_TI, None, None, None, *grad_parts
