"""Storing keys and values, against plain indexing."""

from __future__ import annotations

import torch

from miles.ops.kv_store import store_kv


def test_each_token_goes_to_its_slot_and_nothing_else_changes() -> None:
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 12, 4), torch.randn(2, 12, 4)
    k_TKH, v_TKH = torch.randn(3, 5, 4)[:, 1:3], torch.randn(3, 5, 4)[:, 3:]  # views, as the decoder passes them
    slots = [7, 0, 11]
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for token, slot in enumerate(slots):
        for head in range(2):
            expected_k[head, slot] = k_TKH[token, head]
            expected_v[head, slot] = v_TKH[token, head]
    store_kv(k_TKH, v_TKH, k_cache, v_cache, torch.tensor(slots))
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)
