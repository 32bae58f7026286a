"""The small steps between the matrix products of a layer on CUDA, each one pass over memory.

Every value is rounded to the tensors' dtype exactly where the unfused operations of `ops/norm.py`, `ops/rope.py` and
`ops/activation.py` round, so that fusing opens no gap between the engine and the trainer beyond the order of a sum.

Shape letters: T packed tokens, D hidden, F feed-forward, N query heads, K key/value heads, H head size, S cache slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, eps, x_stride, residual_stride,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T). sum = x + residual and out = rms_norm(sum), both [T, D]."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < D
    x = tl.load(x_ptr + row * x_stride + offs, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + offs, mask=inside, other=0.0).to(tl.float32)
    total = (x + residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * D + offs, total, mask=inside)
    total = total.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
    weight = tl.load(weight_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + offs, (total * inverse_rms * weight).to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`: the start of a sublayer. Rows contiguous, no gradient."""
    num_tokens, width = x_TD.shape
    assert x_TD.stride(1) == residual_TD.stride(1) == 1, "rows must be contiguous"
    out_TD, sum_TD = (torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) for _ in range(2))
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[num_tokens,](
        x_TD, residual_TD, weight_D, out_TD, sum_TD, eps, x_TD.stride(0), residual_TD.stride(0),
        D=width, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out_TD, sum_TD


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
    NORM: tl.constexpr,
):  # fmt: skip
    """Grid (T, 2): queries of a token, then its keys and values. Half heads, since dimension i turns with i + H/2."""
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


def qk_norm_rope_store(
    qkv: Tensor,
    q_weight_H: Tensor | None,
    k_weight_H: Tensor | None,
    eps: float,
    cos_T1H: Tensor,
    sin_T1H: Tensor,
    slots_T: Tensor,
    k_cache_KSH: Tensor,
    v_cache_KSH: Tensor,
) -> Tensor:
    """Rotated queries [T, N, H]; the rotated keys and the values go to their cache slots.

    `qkv` [T, (N + 2 K) * H], rows contiguous: queries, keys, values. Without the two weights nothing is normalised.
    `cos_T1H` and `sin_T1H` as `ops/rope.rope_at` gives them. A slot of -1 stores nothing (padding). No gradient.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, _, size = k_cache_KSH.shape
    num_heads = qkv.shape[1] // size - 2 * num_kv_heads
    assert qkv.stride(1) == k_cache_KSH.stride(2) == v_cache_KSH.stride(2) == 1, "heads must be contiguous"
    assert cos_T1H.stride(-1) == sin_T1H.stride(-1) == 1, "rows of the rope table must be contiguous"
    q_TNH = torch.empty(num_tokens, num_heads, size, dtype=qkv.dtype, device=qkv.device)
    has_norm = q_weight_H is not None and k_weight_H is not None
    _qk_norm_rope_store_kernel[num_tokens, 2](
        qkv, q_weight_H if has_norm else qkv, k_weight_H if has_norm else qkv, cos_T1H, sin_T1H, slots_T,
        q_TNH, k_cache_KSH, v_cache_KSH, eps, qkv.stride(0), cos_T1H.stride(0), sin_T1H.stride(0),
        *k_cache_KSH.stride()[:2], *v_cache_KSH.stride()[:2], N=num_heads, K=num_kv_heads, H=size,
        BLOCK_N=triton.next_power_of_2(num_heads), BLOCK_K=triton.next_power_of_2(num_kv_heads), NORM=has_norm,
        num_warps=4,
    )  # fmt: skip
    return q_TNH


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


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
        out_TF = torch.empty(num_tokens, width, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
        _silu_mul_kernel[num_tokens, triton.cdiv(width, 1024)](gate_up_T2F, out_TF, F=width, BLOCK=1024, num_warps=4)
        return out_TF

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        grad_T2F = torch.empty_like(gate_up_T2F)
        num_tokens, width = grad_TF.shape
        _silu_mul_backward_kernel[num_tokens, triton.cdiv(width, 1024)](
            gate_up_T2F, grad_TF.contiguous(), grad_T2F, F=width, BLOCK=1024, num_warps=4
        )
        return grad_T2F


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves of a contiguous [T, 2 F]; T x F, differentiable."""
    assert gate_up_T2F.is_contiguous(), "gate and up must be one contiguous tensor"
    return _SiluMul.apply(gate_up_T2F)
