"""What the flags about recompute say together."""

from __future__ import annotations

import pytest

from miles.config.memory_section import MemoryConfig, memory_violations
from miles.config.rules import rule_violations
from miles.config.sections import EngineConfig, RunConfig
from miles.model.activations import Recompute
from miles.plan.memory import fixed_recompute


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"recompute_granularity": "full"}, Recompute(num_layers=6)),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            Recompute(num_layers=6),
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
            Recompute(num_layers=2),
        ),
        ({"recompute_num_layers": 9}, Recompute(num_layers=6)),
        ({"recompute_num_layers": 0}, Recompute()),
        ({"recompute_granularity": "selective"}, Recompute(selective=True)),
    ],
    ids=str,
)
def test_what_is_computed_again(flags, expected) -> None:
    memory = MemoryConfig(**flags)
    assert list(memory_violations(memory, adam_state="float32")) == []
    assert fixed_recompute(memory, 6) == expected


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"recompute_granularity": "selective", "recompute_num_layers": 0}, "need --recompute-granularity full"),
        ({"recompute_method": "block"}, "needs --recompute-num-layers"),
        ({"recompute_method": "uniform"}, "needs --recompute-granularity full"),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 0},
            "--recompute-method uniform --recompute-num-layers 0",
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4},
            "one at a time",
        ),
    ],
    ids=str,
)
def test_wishes_that_contradict_each_other(flags, named) -> None:
    (violation,) = memory_violations(MemoryConfig(**flags), adam_state="float32")
    assert named in violation


def test_8_bit_states_need_their_library(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (violation,) = memory_violations(MemoryConfig(), adam_state="8bit")
    assert "bitsandbytes" in violation and "--adam-state 8bit" in violation


def test_the_trainer_leaves_its_memory_only_to_a_cache_that_gives_it_back() -> None:
    def violations(*level: str, **engine: bool) -> list[str]:
        config = RunConfig(
            engine=EngineConfig(offload_rollout_level=level, **engine), memory=MemoryConfig(offload_train=True)
        )
        return [violation for violation in rule_violations(config) if "--offload-train" in violation]

    assert violations(offload_rollout=True) == violations("kv_cache", "weight") == []
    for found in (violations(), violations("weight"), violations(offload_rollout=False)):
        assert len(found) == 1 and "needs --offload-rollout" in found[0]
