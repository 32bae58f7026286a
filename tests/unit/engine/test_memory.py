"""How large the cache becomes, and what it says when that cannot work."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from miles.config.sections import EngineConfig
from miles.engine import memory
from miles.engine.memory import KvCache, available_bytes, cache_tokens
from miles.errors import ConfigError, EngineError
from miles.observe import gpu as gpu_module
from miles.plan.memory import token_bytes
from tests.conftest import REPOSITORY
from tests.unit.engine.tiny import SPEC

CPU = torch.device("cpu")
PER_TOKEN = token_bytes(SPEC, 4)


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
    with pytest.raises(ConfigError, match=r"would hold 16 tokens.*at least 32.*--engine-max-total-tokens"):
        tokens(EngineConfig(engine_max_total_tokens=31))
    monkeypatch.setattr(memory, "available_bytes", lambda device: 0)
    with pytest.raises(ConfigError, match="would hold 0 tokens"):
        tokens(EngineConfig())


def test_too_large_names_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 100 * token_bytes(SPEC, 4))
    with pytest.raises(ConfigError, match=r"--engine-max-total-tokens: 112 tokens .*at most 100 tokens fit"):
        tokens(EngineConfig(engine_max_total_tokens=112))


def test_what_a_small_cache_means_is_said_in_tokens_of_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    assert tokens(EngineConfig(engine_max_total_tokens=64)) == 64
    assert "holds only 64 tokens, 16 for each of the 4 answers" in caplog.text


@dataclass
class Gpu:
    """What a driver says of a GPU with as many bytes for each token as `SPEC` needs."""

    free: int
    total: int
    is_integrated: bool = False

    def says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def mem_get_info(device: torch.device) -> tuple[int, int]:
            if self.total < 0:
                raise RuntimeError("CUDA error: operation not supported")
            return self.free * PER_TOKEN, self.total * PER_TOKEN

        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: self)

    def tokens(self, config: EngineConfig, num_rows: int = 10_000) -> int:
        return cache_tokens(SPEC, config, num_rows=num_rows, dtype=torch.float32, device=torch.device("cuda"))


def host_has(monkeypatch: pytest.MonkeyPatch, *, free: int, total: int) -> None:
    found = SimpleNamespace(available=free * PER_TOKEN, total=total * PER_TOKEN)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(gpu_module, "_CGROUP_LIMIT", Path("/there/is/none"))


@pytest.mark.parametrize("gpu", [Gpu(0, 0), Gpu(0, -1), Gpu(10_000, 100_000, is_integrated=True)])
def test_unified_memory_counts_as_the_hosts(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that reports nothing, or that answers "not supported", or whose own count leaves out what the page cache
    would give back."""
    gpu.says(monkeypatch)
    host_has(monkeypatch, free=80_000, total=100_000)
    assert gpu.tokens(EngineConfig()) == 45_000 // 16 * 16  # 35 % stay free
    weights = SPEC.num_parameters * 4 / PER_TOKEN
    assert gpu.tokens(EngineConfig(engine_mem_fraction_static=0.5)) == int(50_000 - weights) // 16 * 16


def test_a_gpu_with_memory_of_its_own_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(80_000, 100_000)
    gpu.says(monkeypatch)
    host_has(monkeypatch, free=1000, total=1000)
    assert gpu.tokens(EngineConfig()) == 45_000 // 16 * 16
    assert gpu.tokens(EngineConfig(offload_rollout=True)) == 70_000 // 16 * 16  # the trainer gets the cache's memory
    assert gpu.tokens(EngineConfig(offload_rollout=True, offload_rollout_level=("weight",))) == 45_000 // 16 * 16


def test_too_large_a_fraction_is_an_error_or_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu(90_000, 100_000)
    gpu.says(monkeypatch)
    assert gpu.tokens(EngineConfig(engine_mem_fraction_static=0.6), num_rows=10) and not caplog.text
    fits = gpu.tokens(EngineConfig(engine_mem_fraction_static=0.85), num_rows=10)
    left = (90_000 - fits) * PER_TOKEN / 2**20
    assert f"{fits} tokens leaves {left:.0f} MiB" in caplog.text and "--engine-mem-fraction-static 0.85" in caplog.text
    with pytest.raises(ConfigError, match="--engine-mem-fraction-static 0.99 .*at most 90000 tokens fit"):
        gpu.tokens(EngineConfig(engine_mem_fraction_static=0.99))
    with pytest.raises(ConfigError, match="would hold 0 tokens.*raise --engine-mem-fraction-static 0.001"):
        gpu.tokens(EngineConfig(engine_mem_fraction_static=0.001))


def test_the_fraction_is_obeyed_on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    host_has(monkeypatch, free=80_000, total=100_000)
    weights = SPEC.num_parameters * 4 / PER_TOKEN
    assert tokens(EngineConfig(engine_mem_fraction_static=0.25)) == int(25_000 - weights) // 16 * 16


def test_a_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text("5000\n")
    (tmp_path / "current").write_text("3000\n")
    monkeypatch.setattr(gpu_module, "_CGROUP_LIMIT", tmp_path / "max")
    monkeypatch.setattr(gpu_module, "_CGROUP_USAGE", tmp_path / "current")
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


# In a process of its own: in the heap of another the cache may lie where the allocator keeps what was free before.
FREED = """
import psutil
from tests.unit.engine.test_memory import big_cache

cache, memory = big_cache(), psutil.Process().memory_info
cache.k_caches[0][:] = 1
cache.v_caches[1][:] = 1
before = memory().rss
cache.release()
print(before - memory().rss)
"""


def big_cache() -> KvCache:
    return KvCache(SPEC, num_blocks=50_000, page_size=4, dtype=torch.float32, device=CPU)


def test_a_released_cache_takes_no_memory_and_comes_back_as_zeros() -> None:
    expected = 200_000 * token_bytes(SPEC, 4)
    freed = subprocess.run(
        [sys.executable, "-c", FREED], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    assert int(freed) > 0.4 * expected  # half of it was written to
    cache = big_cache()
    cache.k_caches[0][:] = 1
    cache.v_caches[1][:] = 1
    assert cache.release() == expected
    assert cache.num_bytes == 0 and cache.release() == 0
    cache.allocate()
    assert cache.num_bytes == expected and [tuple(v.shape) for v in cache.v_caches] == [(2, 200_000, 8)] * 2
    assert not any(half.any() for half in (*cache.k_caches, *cache.v_caches))


def test_memory_that_is_gone_names_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KvCache(SPEC, num_blocks=3, page_size=4, dtype=torch.float32, device=CPU)

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(cache, "_make", fail)
    with pytest.raises(EngineError, match=r"not there any more \(CUDA out of memory\): lower --engine-mem-fraction"):
        cache.allocate()
