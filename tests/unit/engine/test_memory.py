"""How large the cache becomes, and what it says when that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from miles.config.sections import EngineConfig
from miles.engine import memory
from miles.engine.memory import KvCache, available_bytes, cache_tokens
from miles.errors import EngineError
from miles.plan.memory import token_bytes
from tests.unit.engine.tiny import SPEC

CPU = torch.device("cpu")


def tokens(config: EngineConfig, num_rows: int = 4) -> int:
    return cache_tokens(SPEC, config, num_rows=num_rows, dtype=torch.float32, device=CPU)


def test_a_token_takes_keys_and_values_of_all_layers() -> None:
    cache = KvCache(SPEC, num_blocks=3, page_size=4, dtype=torch.bfloat16, device=CPU)
    assert cache.num_bytes == 12 * token_bytes(SPEC, 2)
    assert token_bytes(SPEC, 4) == 2 * 2 * 2 * 8 * 4
    assert [tuple(k.shape) for k in cache.k_caches] == [(2, 12, 8)] * 2


def test_default_holds_what_the_rows_can_use() -> None:
    assert tokens(EngineConfig()) == 4 * 96


def test_default_takes_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000 * token_bytes(SPEC, 4))
    assert tokens(EngineConfig(), num_rows=1000) == 192  # a fifth, in whole blocks of 16


def test_the_flag_is_obeyed_in_whole_blocks() -> None:
    assert tokens(EngineConfig(engine_max_total_tokens=100)) == 96


def test_too_small_names_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"would hold 16 tokens.*at least 32.*--engine-max-total-tokens"):
        tokens(EngineConfig(engine_max_total_tokens=31))
    monkeypatch.setattr(memory, "available_bytes", lambda device: 0)
    with pytest.raises(EngineError, match="would hold 0 tokens"):
        tokens(EngineConfig())


def test_too_large_names_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 100 * token_bytes(SPEC, 4))
    with pytest.raises(EngineError, match=r"--engine-max-total-tokens: 112 tokens .*at most 100 tokens fit"):
        tokens(EngineConfig(engine_max_total_tokens=112))


def test_a_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text("5000\n")
    (tmp_path / "current").write_text("3000\n")
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", tmp_path / "max")
    monkeypatch.setattr(memory, "_CGROUP_USAGE", tmp_path / "current")
    assert available_bytes(CPU) == 2000
    (tmp_path / "max").write_text("max\n")
    assert available_bytes(CPU) > 2000


def test_copies_read_every_source_before_they_write() -> None:
    cache = KvCache(SPEC, num_blocks=4, page_size=2, dtype=torch.float32, device=CPU)
    for block in range(4):
        cache.k_caches[1][:, 2 * block : 2 * block + 2] = block
    cache.copy_blocks(torch.tensor([[1, 2], [2, 3]]))
    assert cache.k_caches[1][0, :, 0].tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    cache.clear_blocks([2])
    assert cache.k_caches[1][1, :, 5].tolist() == [0, 0, 1, 1, 0, 0, 2, 2]
