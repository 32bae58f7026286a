"""From the fused projection to the heads of attention: split, normalise queries and keys, rotate them.

Shapes: T packed tokens, N query heads, K key/value heads, H head size, S cache slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from miles.ops.kernels import HEAD_SIZES, has_kernels, kernels
from miles.ops.kv_store import store_kv
from miles.ops.norm import rms_norm
from miles.ops.rope import apply_rope


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Weights of the norms of queries and keys, over H; None where a family has none."""

    q_weight_H: Tensor | None
    k_weight_H: Tensor | None
    eps: float


def rotated_heads(
    qkv: Tensor, num_kv_heads: int, head_dim: int, norm: HeadNorm, cos_T1H: Tensor, sin_T1H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries T x N x H, keys and values T x K x H of `qkv` [T, (N + 2 K) * H]. Differentiable."""
    if has_kernels(qkv) and head_dim in HEAD_SIZES:
        return kernels("norm_rope").qk_norm_rope(
            qkv, num_kv_heads, head_dim, norm.q_weight_H, norm.k_weight_H, norm.eps, cos_T1H, sin_T1H
        )
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    if norm.q_weight_H is None or norm.k_weight_H is None:
        qk, v_TKH = heads.split((num_heads + num_kv_heads, num_kv_heads), 1)
        q_TNH, k_TKH = apply_rope(qk, cos_T1H, sin_T1H).split((num_heads, num_kv_heads), 1)
    else:
        q, k, v_TKH = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
        q_TNH = apply_rope(rms_norm(q, norm.q_weight_H, norm.eps), cos_T1H, sin_T1H)
        k_TKH = apply_rope(rms_norm(k, norm.k_weight_H, norm.eps), cos_T1H, sin_T1H)
    return q_TNH, k_TKH, v_TKH


def store_rotated_heads(
    qkv: Tensor,
    norm: HeadNorm,
    cos_T1H: Tensor,
    sin_T1H: Tensor,
    slots_T: Tensor,
    k_cache_KSH: Tensor,
    v_cache_KSH: Tensor,
) -> Tensor:
    """The same with a cache: keys and values go to their slots, queries T x N x H are returned. No gradient.

    On CUDA a slot of -1 stores nothing: such a token is padding.
    """
    num_kv_heads, _, head_dim = k_cache_KSH.shape
    if has_kernels(qkv) and head_dim in HEAD_SIZES:
        return kernels("norm_rope").qk_norm_rope_store(
            qkv, norm.q_weight_H, norm.k_weight_H, norm.eps, cos_T1H, sin_T1H, slots_T, k_cache_KSH, v_cache_KSH
        )
    q_TNH, k_TKH, v_TKH = rotated_heads(qkv, num_kv_heads, head_dim, norm, cos_T1H, sin_T1H)
    store_kv(k_TKH, v_TKH, k_cache_KSH, v_cache_KSH, slots_T)
    return q_TNH
