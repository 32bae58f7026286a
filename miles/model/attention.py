"""Self-attention with grouped queries, over the packed batch.

Shapes: T packed tokens, D hidden, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miles.model.context import ForwardContext
from miles.model.layers import Linear, RmsNorm
from miles.model.spec import ModelSpec
from miles.ops.attention import packed_attention, uses_buckets
from miles.ops.kv_store import store_kv
from miles.ops.paged_attention import paged_attention
from miles.ops.rope import apply_rope


class Attention(nn.Module):
    """Fused query, key and value projection, rotary embedding, attention, output projection."""

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.qkv = Linear(spec.hidden_size, spec.qkv_size, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.output = Linear(
            spec.num_heads * spec.head_dim, spec.hidden_size, bias=spec.output_bias, dtype=dtype, device=device
        )
        self.q_norm = RmsNorm(spec.head_dim, spec.norm_eps, dtype=dtype, device=device) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, spec.norm_eps, dtype=dtype, device=device) if spec.qk_norm else None

    def forward(self, x_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, context: ForwardContext) -> Tensor:
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x_TD).view(x_TD.shape[0], num_heads + 2 * num_kv_heads, self.head_dim)
        if self.q_norm is None or self.k_norm is None:
            qk, v_TKH = qkv.split((num_heads + num_kv_heads, num_kv_heads), 1)
            q_TNH, k_TKH = apply_rope(qk, cos_T1H, sin_T1H).split((num_heads, num_kv_heads), 1)
        else:
            q, k, v_TKH = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
            q_TNH = apply_rope(self.q_norm(q), cos_T1H, sin_T1H)
            k_TKH = apply_rope(self.k_norm(k), cos_T1H, sin_T1H)
        return self.output(self._attend(q_TNH, k_TKH, v_TKH, context).flatten(1))

    def _attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, context: ForwardContext) -> Tensor:
        cache = context.cache
        if cache is None:
            buckets = context.buckets if uses_buckets(q_TNH) else None
            return packed_attention(q_TNH, k_TKH, v_TKH, context.cu_seqlens, context.max_seqlen, self.scale, buckets)
        k_cache, v_cache = cache.k_caches[self.layer], cache.v_caches[self.layer]
        store_kv(k_TKH, v_TKH, k_cache, v_cache, cache.slots_T)
        return paged_attention(q_TNH, k_cache, v_cache, cache, self.scale)
