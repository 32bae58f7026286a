"""The small steps between the matrix products of a layer on CUDA, each one pass over memory.

Every value is rounded to the tensors' dtype exactly where the unfused operations of `ops/norm.py`, `ops/rope.py` and
`ops/activation.py` round, so that fusing opens no gap between the engine and the trainer beyond the order of a sum.

Shape letters: T packed tokens, D hidden, F feed-forward, N query heads, K key/value heads, H head size, S cache slots.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BACKWARD_PROGRAMS = 1024  # each sums the gradient of a weight over its rows; the partial sums are added up afterwards

# For numbers of the model. Triton's own are made for kernels: a call takes longer than many an operation.
next_power_of_2, cdiv = cache(triton.next_power_of_2), cache(triton.cdiv)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, added_ptr, weight_ptr, out_ptr, sum_ptr, eps, x_stride, added_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Grid (T). sum = x + added and out = rms_norm(sum), both [T, D]; without ADDS x is the sum."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < D
    x = tl.load(x_ptr + row * x_stride + offs, mask=inside, other=0.0).to(tl.float32)
    total = x
    if ADDS:
        added = tl.load(added_ptr + row * added_stride + offs, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + added).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * D + offs, rounded, mask=inside)
        total = rounded.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
    weight = tl.load(weight_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + offs, (total * inverse_rms * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_rms_norm_backward_kernel(
    sum_ptr, weight_ptr, grad_out_ptr, grad_sum_ptr, grad_ptr, partial_ptr, eps, num_tokens,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_GRAD_SUM: tl.constexpr,
):  # fmt: skip
    """Grid (P). grad [T, D] of the sum; partial [P, D]: what the rows of a program give the weight."""
    offs = tl.arange(0, BLOCK)
    inside = offs < D
    weight = tl.load(weight_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    partial = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        here = (tl.full([], 0, tl.int64) + row) * D + offs
        total = tl.load(sum_ptr + here, mask=inside, other=0.0).to(tl.float32)
        grad_out = tl.load(grad_out_ptr + here, mask=inside, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
        normed = total * inverse_rms
        partial += grad_out * normed
        grad_normed = grad_out * weight
        grad = (grad_normed - normed * (tl.sum(grad_normed * normed, 0) / D)) * inverse_rms
        if HAS_GRAD_SUM:
            grad += tl.load(grad_sum_ptr + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + here, grad.to(grad_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + tl.program_id(0) * D + offs, partial, mask=inside)


def _norm_rows(x_TD: Tensor, added_TD: Tensor | None, weight_D: Tensor, sum_TD: Tensor, eps: float) -> Tensor:
    (num_tokens, width), block = x_TD.shape, next_power_of_2(x_TD.shape[1])
    out_TD = x_TD.new_empty(num_tokens, width)
    added = x_TD if added_TD is None else added_TD
    _add_rms_norm_kernel[num_tokens,](
        x_TD, added, weight_D, out_TD, sum_TD, eps, x_TD.stride(0), added.stride(0), D=width, BLOCK=block,
        ADDS=added_TD is not None, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out_TD


def _add_rms_norm(x_TD: Tensor, added_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x_TD.stride(1) == added_TD.stride(1) == 1, "rows must be contiguous"
    sum_TD = x_TD.new_empty(*x_TD.shape)
    return _norm_rows(x_TD, added_TD, weight_D, sum_TD, eps), sum_TD


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, added_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out_TD, sum_TD = _add_rms_norm(x_TD, added_TD, weight_D, eps)
        ctx.save_for_backward(sum_TD, weight_D)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return out_TD, sum_TD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out_TD: Tensor | None, grad_sum_TD: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out_TD is None:
            return grad_sum_TD, grad_sum_TD, None, None
        sum_TD, weight_D = ctx.saved_tensors
        (num_tokens, width), block = sum_TD.shape, next_power_of_2(sum_TD.shape[1])
        grad_out_TD = grad_out_TD.contiguous()
        grad_sum_TD = None if grad_sum_TD is None else grad_sum_TD.contiguous()
        grad_TD = torch.empty_like(sum_TD)
        num_programs = min(num_tokens, BACKWARD_PROGRAMS)
        partial_PD = torch.empty(num_programs, width, dtype=torch.float32, device=sum_TD.device)
        _add_rms_norm_backward_kernel[num_programs,](
            sum_TD, weight_D, grad_out_TD, grad_out_TD if grad_sum_TD is None else grad_sum_TD, grad_TD, partial_PD,
            ctx.eps, num_tokens, D=width, BLOCK=block, HAS_GRAD_SUM=grad_sum_TD is not None,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
        return grad_TD, grad_TD, partial_PD.sum(0), None


def add_rms_norm(x_TD: Tensor, added_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + added), x + added)`: the start of a sublayer. Rows contiguous; differentiable."""
    # Without a gradient, here and below: going through autograd would cost as much as the launch.
    return (_AddRmsNorm.apply if torch.is_grad_enabled() else _add_rms_norm)(x_TD, added_TD, weight_D, eps)


def rms_norm_of_sum(sum_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The first result of `add_rms_norm` again, from the second. No gradient."""
    return _norm_rows(sum_TD, None, weight_D, sum_TD, eps)


@triton.jit
def _norm_rotate(first, second, first_weight, second_weight, cos, sin, eps, H: tl.constexpr, NORM: tl.constexpr):
    """Both halves [heads, H / 2] of heads after rms_norm over H and rotation, float32 holding rounded values."""
    dtype = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if NORM:
        inverse_rms = tl.rsqrt(tl.sum(first * first + second * second, 1) / H + eps)[:, None]
        first = (first * inverse_rms * first_weight.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
        second = (second * inverse_rms * second_weight.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, slots_ptr, q_ptr, k_cache_ptr, v_cache_ptr, eps,
    qkv_stride_t, cos_stride, sin_stride, k_stride_k, k_stride_s, v_stride_k, v_stride_s,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (T, 2): queries of a token, then its keys and values, which go to their slot, or in order without slots.
    Half heads, since dimension i turns with i + H/2."""
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, H // 2)
    cos = tl.load(cos_ptr + token * cos_stride + half).to(tl.float32)[None, :]
    # The second half of the sine row has the plain sign, the first half the opposite one.
    sin = tl.load(sin_ptr + token * sin_stride + H // 2 + half).to(tl.float32)[None, :]
    if tl.program_id(1) == 0:
        head = tl.arange(0, BLOCK_N)[:, None]
        heads = head < N
        source = qkv_ptr + token * qkv_stride_t + head * H + half[None, :]
        first = tl.load(source, mask=heads, other=0.0)
        second = tl.load(source + H // 2, mask=heads, other=0.0)
        first_weight = tl.load(q_weight_ptr + half)
        second_weight = tl.load(q_weight_ptr + H // 2 + half)
        first, second = _norm_rotate(first, second, first_weight, second_weight, cos, sin, eps, H, NORM)
        target = q_ptr + token * (N * H) + head * H + half[None, :]
        tl.store(target, first, mask=heads)
        tl.store(target + H // 2, second, mask=heads)
    else:
        slot = token
        if HAS_SLOTS:
            slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            head = tl.arange(0, BLOCK_K)[:, None]
            heads = head < K
            source = qkv_ptr + token * qkv_stride_t + (N + head) * H + half[None, :]
            first = tl.load(source, mask=heads, other=0.0)
            second = tl.load(source + H // 2, mask=heads, other=0.0)
            first_weight = tl.load(k_weight_ptr + half)
            second_weight = tl.load(k_weight_ptr + H // 2 + half)
            first, second = _norm_rotate(first, second, first_weight, second_weight, cos, sin, eps, H, NORM)
            target = k_cache_ptr + head.to(tl.int64) * k_stride_k + slot * k_stride_s + half[None, :]
            tl.store(target, first, mask=heads)
            tl.store(target + H // 2, second, mask=heads)
            target = v_cache_ptr + head.to(tl.int64) * v_stride_k + slot * v_stride_s + half[None, :]
            tl.store(target, tl.load(source + K * H, mask=heads, other=0.0), mask=heads)
            tl.store(target + H // 2, tl.load(source + K * H + H // 2, mask=heads, other=0.0), mask=heads)


def _rotate_into(
    qkv: Tensor, q_weight_H: Tensor | None, k_weight_H: Tensor | None, eps: float, cos_T1H: Tensor, sin_T1H: Tensor,
    slots_T: Tensor | None, k_KSH: Tensor, v_KSH: Tensor,
) -> Tensor:  # fmt: skip
    num_tokens = qkv.shape[0]
    num_kv_heads, _, size = k_KSH.shape
    num_heads = qkv.shape[1] // size - 2 * num_kv_heads
    assert qkv.stride(1) == k_KSH.stride(2) == v_KSH.stride(2) == 1, "heads must be contiguous"
    assert cos_T1H.stride(-1) == sin_T1H.stride(-1) == 1, "rows of the rope table must be contiguous"
    q_TNH = qkv.new_empty(num_tokens, num_heads, size)
    has_norm = q_weight_H is not None and k_weight_H is not None
    _qk_norm_rope_store_kernel[num_tokens, 2](
        qkv, q_weight_H if has_norm else qkv, k_weight_H if has_norm else qkv, cos_T1H, sin_T1H,
        cos_T1H if slots_T is None else slots_T, q_TNH, k_KSH, v_KSH, eps, qkv.stride(0), cos_T1H.stride(0),
        sin_T1H.stride(0), *k_KSH.stride()[:2], *v_KSH.stride()[:2], N=num_heads, K=num_kv_heads, H=size,
        BLOCK_N=next_power_of_2(num_heads), BLOCK_K=next_power_of_2(num_kv_heads), NORM=has_norm,
        HAS_SLOTS=slots_T is not None, num_warps=4,
    )  # fmt: skip
    return q_TNH


def qk_norm_rope_store(
    qkv: Tensor, q_weight_H: Tensor | None, k_weight_H: Tensor | None, eps: float, cos_T1H: Tensor, sin_T1H: Tensor,
    slots_T: Tensor, k_cache_KSH: Tensor, v_cache_KSH: Tensor,
) -> Tensor:  # fmt: skip
    """Rotated queries [T, N, H]; the rotated keys and the values go to their cache slots.

    `qkv` [T, (N + 2 K) * H], rows contiguous: queries, keys, values. Without the two weights nothing is normalised.
    `cos_T1H` and `sin_T1H` as `ops/rope.rope_at` gives them. A slot of -1 stores nothing (padding). No gradient.
    """
    return _rotate_into(qkv, q_weight_H, k_weight_H, eps, cos_T1H, sin_T1H, slots_T, k_cache_KSH, v_cache_KSH)


@triton.jit
def _norm_rotate_backward(
    grad_first, grad_second, first, second, first_weight, second_weight, cos, sin, eps,
    H: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Gradients of both halves [heads, H / 2], and of both halves of the weight for each head: a sum over heads in
    every round would make the warps wait for each other."""
    back_first = grad_first * cos + grad_second * sin
    back_second = grad_second * cos - grad_first * sin
    weight_first = back_first
    weight_second = back_second
    if NORM:
        inverse_rms = tl.rsqrt(tl.sum(first * first + second * second, 1) / H + eps)[:, None]
        normed_first = first * inverse_rms
        normed_second = second * inverse_rms
        weight_first = back_first * normed_first
        weight_second = back_second * normed_second
        back_first *= first_weight[None, :]
        back_second *= second_weight[None, :]
        mean = (tl.sum(back_first * normed_first + back_second * normed_second, 1) / H)[:, None]
        back_first = (back_first - normed_first * mean) * inverse_rms
        back_second = (back_second - normed_second * mean) * inverse_rms
    return back_first, back_second, weight_first, weight_second


@triton.jit(do_not_specialize=["num_tokens"])
def _qk_norm_rope_backward_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr, grad_ptr, partial_ptr,
    eps, num_tokens, qkv_stride_t, cos_stride, sin_stride,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Grid (P, 2): queries, then keys and values. grad [T, (N + 2 K) * H]; partial [P, 2, H] for the two weights."""
    half = tl.arange(0, H // 2)
    part = tl.program_id(1)
    HEADS: tl.constexpr = BLOCK_N if BLOCK_N > BLOCK_K else BLOCK_K
    head = tl.arange(0, HEADS)[:, None]
    first_head = part * N
    num_heads = tl.where(part == 0, N, K)
    heads = head < num_heads
    weight_ptr = q_weight_ptr
    grad_out_ptr = grad_q_ptr
    if part == 1:
        weight_ptr = k_weight_ptr
        grad_out_ptr = grad_k_ptr
    first_weight = tl.load(weight_ptr + half).to(tl.float32)
    second_weight = tl.load(weight_ptr + H // 2 + half).to(tl.float32)
    first_sum = tl.zeros([HEADS, H // 2], tl.float32)
    second_sum = tl.zeros([HEADS, H // 2], tl.float32)
    for row in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = tl.full([], 0, tl.int64) + row
        cos = tl.load(cos_ptr + token * cos_stride + half)[None, :]
        sin = tl.load(sin_ptr + token * sin_stride + H // 2 + half)[None, :]
        source = token * qkv_stride_t + (first_head + head) * H + half[None, :]
        first = tl.load(qkv_ptr + source, mask=heads, other=0.0).to(tl.float32)
        second = tl.load(qkv_ptr + source + H // 2, mask=heads, other=0.0).to(tl.float32)
        grad_out = grad_out_ptr + (token * num_heads + head) * H + half[None, :]
        grad_first = tl.load(grad_out, mask=heads, other=0.0).to(tl.float32)
        grad_second = tl.load(grad_out + H // 2, mask=heads, other=0.0).to(tl.float32)
        grad_first, grad_second, for_first, for_second = _norm_rotate_backward(
            grad_first, grad_second, first, second, first_weight, second_weight, cos, sin, eps, H, NORM
        )
        first_sum += for_first
        second_sum += for_second
        target = token * ((N + 2 * K) * H) + (first_head + head) * H + half[None, :]
        dtype = grad_ptr.dtype.element_ty
        tl.store(grad_ptr + target, grad_first.to(dtype), mask=heads)
        tl.store(grad_ptr + target + H // 2, grad_second.to(dtype), mask=heads)
        if part == 1:
            grad_v = grad_v_ptr + (token * K + head) * H + half[None, :]
            tl.store(grad_ptr + target + K * H, tl.load(grad_v, mask=heads, other=0.0), mask=heads)
            tl.store(grad_ptr + target + K * H + H // 2, tl.load(grad_v + H // 2, mask=heads, other=0.0), mask=heads)
    cell = (tl.program_id(0) * 2 + part) * H
    tl.store(partial_ptr + cell + half, tl.sum(first_sum, 0))
    tl.store(partial_ptr + cell + H // 2 + half, tl.sum(second_sum, 0))


def _qk_norm_rope(
    qkv: Tensor, num_kv_heads: int, size: int, q_weight_H: Tensor | None, k_weight_H: Tensor | None, eps: float,
    cos_T1H: Tensor, sin_T1H: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    k_TKH, v_TKH = (qkv.new_empty(qkv.shape[0], num_kv_heads, size) for _ in range(2))
    targets = (k_TKH.transpose(0, 1), v_TKH.transpose(0, 1))
    return _rotate_into(qkv, q_weight_H, k_weight_H, eps, cos_T1H, sin_T1H, None, *targets), k_TKH, v_TKH


class _QkNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, num_kv_heads: int, size: int, q_weight_H: Tensor | None, k_weight_H: Tensor | None,
        eps: float, cos_T1H: Tensor, sin_T1H: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        heads = _qk_norm_rope(qkv, num_kv_heads, size, q_weight_H, k_weight_H, eps, cos_T1H, sin_T1H)
        ctx.save_for_backward(qkv, q_weight_H, k_weight_H, cos_T1H, sin_T1H)
        ctx.eps, ctx.num_kv_heads, ctx.size = eps, num_kv_heads, size
        return heads

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_q_TNH: Tensor, grad_k_TKH: Tensor, grad_v_TKH: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight_H, k_weight_H, cos_T1H, sin_T1H = ctx.saved_tensors
        num_tokens, size, num_kv_heads = qkv.shape[0], ctx.size, ctx.num_kv_heads
        num_heads, has_norm = qkv.shape[1] // size - 2 * num_kv_heads, q_weight_H is not None
        grad_qkv = qkv.new_empty(num_tokens, qkv.shape[1])
        num_programs = min(num_tokens, BACKWARD_PROGRAMS)
        partial = torch.empty(num_programs, 2, size, dtype=torch.float32, device=qkv.device)
        _qk_norm_rope_backward_kernel[num_programs, 2](
            qkv, q_weight_H if has_norm else qkv, k_weight_H if has_norm else qkv, cos_T1H, sin_T1H,
            grad_q_TNH.contiguous(), grad_k_TKH.contiguous(), grad_v_TKH.contiguous(), grad_qkv, partial, ctx.eps,
            num_tokens, qkv.stride(0), cos_T1H.stride(0), sin_T1H.stride(0), N=num_heads, K=num_kv_heads, H=size,
            BLOCK_N=next_power_of_2(num_heads), BLOCK_K=next_power_of_2(num_kv_heads), NORM=has_norm,
            num_warps=4,
        )  # fmt: skip
        grad_weights = partial.sum(0).unbind() if has_norm else (None, None)
        return grad_qkv, None, None, *grad_weights, None, None, None


def qk_norm_rope(
    qkv: Tensor, num_kv_heads: int, head_dim: int, q_weight_H: Tensor | None, k_weight_H: Tensor | None, eps: float,
    cos_T1H: Tensor, sin_T1H: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rotated queries [T, N, H], rotated keys and copied values [T, K, H]; as `qk_norm_rope_store`, differentiable."""
    function = _QkNormRope.apply if torch.is_grad_enabled() else _qk_norm_rope
    return function(qkv, num_kv_heads, head_dim, q_weight_H, k_weight_H, eps, cos_T1H, sin_T1H)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, blocks of F). out [T, F] = silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < F
    gate = tl.load(gate_up_ptr + row * (2 * F) + offs, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * (2 * F) + F + offs, mask=inside, other=0.0).to(tl.float32)
    silu = (gate.to(tl.float32) * tl.sigmoid(gate.to(tl.float32))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * F + offs, (silu * up).to(gate.dtype), mask=inside)


@triton.jit
def _silu_mul_backward_kernel(gate_up_ptr, grad_ptr, grad_gate_up_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, blocks of F). Gradients of gate and up side by side, [T, 2 F]."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < F
    gate = tl.load(gate_up_ptr + row * (2 * F) + offs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * F) + F + offs, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * F + offs, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dtype = grad_gate_up_ptr.dtype.element_ty
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_gate_up_ptr + row * (2 * F) + offs, grad_gate.to(dtype), mask=inside)
    tl.store(grad_gate_up_ptr + row * (2 * F) + F + offs, (grad * gate * sigmoid).to(dtype), mask=inside)


def _silu_mul(gate_up_T2F: Tensor) -> Tensor:
    num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty(num_tokens, width)
    _silu_mul_kernel[num_tokens, cdiv(width, 1024)](gate_up_T2F, out_TF, F=width, BLOCK=1024, num_warps=4)
    return out_TF


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        return _silu_mul(gate_up_T2F)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        grad_T2F = torch.empty_like(gate_up_T2F)
        num_tokens, width = grad_TF.shape
        _silu_mul_backward_kernel[num_tokens, cdiv(width, 1024)](
            gate_up_T2F, grad_TF.contiguous(), grad_T2F, F=width, BLOCK=1024, num_warps=4
        )
        return grad_T2F


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves of a contiguous [T, 2 F]; T x F, differentiable."""
    assert gate_up_T2F.is_contiguous(), "gate and up must be one contiguous tensor"
    return (_SiluMul.apply if torch.is_grad_enabled() else _silu_mul)(gate_up_T2F)
