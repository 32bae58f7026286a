"""Write keys and values of new tokens into the KV cache.

Shapes: T packed tokens, K key/value heads, H head size, S cache slots. A cache is K x S x H: the slots of one head lie
together, so that attention gathers whole blocks and gets them ready for a batched product.
"""

from __future__ import annotations

from torch import Tensor


def store_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    """Write token t's key and value to slot `slots_T[t]` (int64) of both caches, in place. No slot occurs twice."""
    k_cache.index_copy_(1, slots_T, k_TKH.transpose(0, 1))
    v_cache.index_copy_(1, slots_T, v_TKH.transpose(0, 1))
