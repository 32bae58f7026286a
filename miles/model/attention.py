"""Self-attention with grouped queries, over the packed batch.

Shapes: T packed tokens, D hidden, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from miles.model.context import ForwardContext
from miles.model.layers import Linear, RmsNorm
from miles.model.spec import ModelSpec
from miles.ops.attention import packed_attention, uses_buckets
from miles.ops.heads import HeadNorm, rotated_heads, store_rotated_heads
from miles.ops.paged_attention import paged_attention
from miles.ops.remake import made_again


class Attention(nn.Module):
    """Fused query, key and value projection, rotary embedding, attention, output projection."""

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.layer = layer
        self.num_kv_heads, self.head_dim = spec.num_kv_heads, spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.qkv = Linear(spec.hidden_size, spec.qkv_size, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.output = Linear(
            spec.num_heads * spec.head_dim, spec.hidden_size, bias=spec.output_bias, dtype=dtype, device=device
        )
        self.q_norm = RmsNorm(spec.head_dim, spec.norm_eps, dtype=dtype, device=device) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, spec.norm_eps, dtype=dtype, device=device) if spec.qk_norm else None

    def forward(
        self, x_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, context: ForwardContext, make_x: Callable[[], Tensor]
    ) -> Tensor:
        """`make_x` computes `x` again."""
        qkv, norm, cache = self.qkv(x_TD, context, make_x), self._norm(), context.cache
        if cache is None:
            make = partial(rotated_heads, qkv, self.num_kv_heads, self.head_dim, norm, cos_T1H, sin_T1H)
            heads = make()
            buckets = context.buckets if uses_buckets(heads[0]) else None  # with them padded copies are kept instead
            bounds = (context.cu_seqlens, context.max_seqlen)
            with made_again(make if context.remakes and buckets is None else None, *heads):
                out_TNH = packed_attention(*heads, *bounds, self.scale, buckets, context.groups_B2)
        else:
            k_cache, v_cache = cache.k_caches[self.layer], cache.v_caches[self.layer]
            q_TNH = store_rotated_heads(qkv, norm, cos_T1H, sin_T1H, cache.slots_T, k_cache, v_cache)
            out_TNH = paged_attention(q_TNH, k_cache, v_cache, cache, self.scale)
        return self.output(out_TNH.flatten(1), context)

    def _norm(self) -> HeadNorm:
        if self.q_norm is None or self.k_norm is None:
            return HeadNorm(None, None, 0.0)
        return HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
