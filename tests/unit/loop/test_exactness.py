"""Engine and trainer agree bit for bit on every family, with everything that could change a bit going on, and the
comparison notices when one operation is another."""

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F

from miles.config.flags import with_values
from miles.config.lora_section import LoraConfig
from miles.config.sections import RunConfig
from miles.loop import exactness
from miles.loop.exactness import compare
from miles.model.lora import add_lora
from miles.ops import activation, attention, sampling
from tests.unit.engine.tiny import make_model

FAMILIES = {
    "llama": {"qk_norm": False, "num_heads": 3, "num_kv_heads": 1, "head_dim": 32, "hidden_size": 96},
    "llama with biases": {"qk_norm": False, "output_bias": True, "qkv_bias": True, "mlp_bias": True, "head_dim": 12},
    "qwen2": {"qk_norm": False, "qkv_bias": True, "num_heads": 7, "num_kv_heads": 1, "tied_head": False},
    "qwen3": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 16, "vocab_size": 511, "intermediate_size": 100},
}
SAMPLINGS = [
    {"rollout_temperature": 1.3, "rollout_top_p": 0.9},
    {"rollout_top_k": 5},
    {"rollout_temperature": 0.7, "rollout_min_p": 0.05},
]


@pytest.fixture(autouse=True)
def longer(monkeypatch):
    monkeypatch.setitem(exactness.SIZES, "cpu", ((150, 40, 5), 24))


def config(**values):
    return with_values(RunConfig(), {"true_on_policy_mode": True, **values})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(family):
    model = make_model(max_position_embeddings=260, **FAMILIES[family])
    found = compare(model, config(rollout_temperature=0.9))
    assert (found.max_gap, found.num_differ) == (0.0, 0)
    assert found.num_tokens > 150 and found.num_retracted >= 6 and found.num_cached_tokens > 400


def test_adapters_are_exact():
    model = make_model(max_position_embeddings=260, qk_norm=False, num_heads=3, num_kv_heads=1)
    add_lora(model, LoraConfig(lora_rank=8), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(0))
    found = compare(model, config(rollout_top_k=9))
    assert (found.max_gap, found.num_differ) == (0.0, 0)


@pytest.mark.parametrize("values", SAMPLINGS, ids=str)
def test_every_way_to_sample_is_exact(values):
    model = make_model(max_position_embeddings=260, vocab_size=300)
    found = compare(model, config(engine_page_size=32, **values))
    assert (found.max_gap, found.num_differ) == (0.0, 0)


def library_softmax(logits_RV, ids_RK, *, temperature=1.0):
    return (logits_RV / temperature).softmax(-1).gather(1, ids_RK).log()


FAULTS = {
    "the trainer's attention": (attention._InOrder, "apply", attention._library_attention),
    "the engine's log-probs": (sampling, "row_log_probs", library_softmax),
    "the trainer's activation": (activation, "_silu", lambda gate: F.silu(gate) * (1 + gate.requires_grad * 1e-7)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_operation_that_is_another_is_noticed(fault, monkeypatch):
    place, name, other = FAULTS[fault]
    monkeypatch.setattr(place, name, other)
    monkeypatch.setattr("miles.engine.core.require_invariance", lambda model, flag: None)  # it can notice earlier
    model = make_model(max_position_embeddings=260, num_heads=8, num_kv_heads=1, head_dim=16, vocab_size=511)
    assert compare(model, config()).num_differ > 0


@pytest.mark.slow
def test_random_shapes_are_exact(monkeypatch):
    rng = random.Random(1)
    threads = torch.get_num_threads()
    try:
        for seed in range(12):
            num_kv_heads, size = rng.choice([1, 2, 3, 4]), rng.choice([8, 16, 32, 64])
            shape = {
                "num_kv_heads": num_kv_heads, "num_heads": num_kv_heads * rng.choice([1, 2, 3, 8]), "head_dim": size,
                "vocab_size": rng.choice([300, 301, 512, 5000]), "hidden_size": rng.choice([64, 128, 192, 576]),
                "intermediate_size": rng.choice([130, 384, 500]), "num_layers": rng.choice([2, 3]),
                "max_position_embeddings": 1500, "qk_norm": rng.random() < 0.5, "qkv_bias": rng.random() < 0.5,
            }  # fmt: skip
            torch.set_num_threads(rng.choice([1, 2, 4]))
            monkeypatch.setitem(exactness.SIZES, "cpu", ((rng.randrange(200, 900), 90, 17, 3), rng.randrange(20, 300)))
            found = compare(make_model(seed=seed, **shape), config(rollout_temperature=rng.choice([1.0, 0.8])))
            assert found.num_differ == 0, (shape, dataclasses.asdict(found))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_model_is_exact(smollm2_dir, monkeypatch):
    monkeypatch.setitem(exactness.SIZES, "cpu", ((50, 23, 5), 16))
    verdict = exactness.check_exactness(config(hf_checkpoint=str(smollm2_dir), device="cpu", rollout_top_k=50))
    assert (verdict.status, verdict.data["max_gap"]) == ("ok", 0.0)
