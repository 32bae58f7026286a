"""True on-policy mode on a GPU: the bits of a token do not depend on the batch, the trainer's are the engine's through
training steps with CUDA graphs, prefix hits, prompt chunks and retraction, and a run repeats."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.grpo_step import generate
from benchmarks.recipe import random_model, spec_of, to_train_samples
from miles.config.flags import with_values
from miles.config.sections import RunConfig
from miles.engine.local import LocalEngine
from miles.loop import exactness
from miles.loop.exactness import compare
from miles.model.decoder import Decoder
from miles.model.invariance import differing, require_invariance
from miles.model.load import load_model
from miles.ops import attention, sampling
from miles.rollout.producer import rollout_sampling
from miles.trainer.trainer import LocalTrainer
from miles.types import GenerationRequest

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
EXACT = {
    "true_on_policy_mode": True, "deterministic_mode": True, "engine_enable_deterministic_inference": True,
    "lr": 1e-5, "max_tokens_per_gpu": 6000, "engine_max_total_tokens": 60_000,
}  # fmt: skip
SAMPLINGS = [
    {},
    {"rollout_temperature": 0.7},
    {"rollout_top_k": 20},
    {"rollout_temperature": 1.3, "rollout_top_p": 0.9},
    {"rollout_min_p": 0.05, "engine_disable_cuda_graph": True, "engine_page_size": 32},
]


def settings(**values: Any) -> RunConfig:
    return with_values(RunConfig(), {**EXACT, **values})


def shallow(shape: str, num_layers: int = 4, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Decoder:
    """A model of this shape with fewer layers, whose logits are spread like those of a trained one."""
    spec = dataclasses.replace(spec_of(shape), num_layers=num_layers, max_position_embeddings=4096, **changes)
    model = Decoder(spec, dtype=dtype, device=CUDA)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.05, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return model


@pytest.mark.parametrize("shape", ["0.6b", "1.7b", "4b"])
def test_no_operation_depends_on_the_batch(shape: str) -> None:
    assert list(differing(shallow(shape, 1))) == []


@pytest.mark.parametrize("changes", [
    {"qk_norm": False, "qkv_bias": True, "num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "hidden_size": 896,
     "intermediate_size": 4864},
    {"qk_norm": False, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536,
     "vocab_size": 49152, "tied_head": True},
    {"qk_norm": False, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "hidden_size": 2048,
     "intermediate_size": 8192, "tied_head": False, "vocab_size": 128256},
], ids=["Qwen2.5-0.5B", "SmolLM2-135M", "Llama-3.2-1B"])  # fmt: skip
def test_families_are_exact(changes: dict[str, Any]) -> None:
    model = shallow("0.6b", 3, **changes)
    found = compare(model, settings(rollout_temperature=0.9))
    assert (found.num_differ, found.max_gap) == (0, 0.0)
    assert found.num_retracted > 10 and found.num_cached_tokens > 1000 and found.num_tokens > 3000


def test_float32_is_exact() -> None:
    found = compare(shallow("tiny", 2, torch.float32, vocab_size=5000), settings())
    assert (found.num_differ, found.max_gap) == (0, 0.0)


@pytest.mark.parametrize("values", SAMPLINGS, ids=str)
def test_every_way_to_sample_is_exact(values: dict[str, Any]) -> None:
    found = compare(shallow("0.6b"), settings(**values))
    assert (found.num_differ, found.max_gap) == (0, 0.0)


def library_softmax(logits_RV: torch.Tensor, ids_RK: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    return (logits_RV / temperature).softmax(-1).gather(1, ids_RK).log()


@pytest.mark.parametrize("fault", ["attention", "log-probs"])
def test_one_operation_that_is_another_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shallow("0.6b", 2)
    require_invariance(model, flag="--true-on-policy-mode")
    values = {}
    if fault == "attention":
        kernels = attention.kernels("attention")
        monkeypatch.setattr(kernels, "decode_forward", kernels.attention_forward)
    else:
        values = {"rollout_top_k": 50}  # rows without cuts are drawn by a kernel that scores them too
        monkeypatch.setattr(sampling, "row_log_probs", library_softmax)
    assert compare(model, settings(**values)).num_differ > 0


def batch_of(rollout_id: int, vocab_size: int, config: RunConfig, num_groups: int = 12) -> list[GenerationRequest]:
    rng = random.Random(rollout_id)
    made: list[GenerationRequest] = []
    for group in range(num_groups):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.choice([5, 40, 130, 300, 700]))]
        for member in range(8):
            sampling = dataclasses.replace(
                rollout_sampling(config), max_new_tokens=rng.randrange(20, 200), ignore_eos=True
            )
            index = group * 8 + member
            made.append(GenerationRequest(index, prompt, sampling, noise_key=rollout_id * 1000 + index))
    return made


def train(model: Decoder, config: RunConfig, num_steps: int) -> tuple[list[dict[str, float]], list[list[list[int]]]]:
    """Records of so many steps, and the tokens of each."""
    trainer = LocalTrainer(model, None, config, total_steps=num_steps)
    engine = LocalEngine(model, None, config.engine, device=CUDA)
    records, written = [], []
    for step in range(num_steps):
        sent = batch_of(step, model.spec.vocab_size, config)
        results = asyncio.run(generate(engine, sent))
        samples = to_train_samples(sent, results)
        for sample, request in zip(samples, sent, strict=True):
            sample.kept_token_ids = results[request.request_id].kept_token_ids
        outcome = trainer.train(samples, rollout_id=step, weight_version=engine.version)
        records.append(outcome.steps[0])
        written.append([sample.tokens for sample in samples])
        engine.set_version(engine.version + 1)
    engine.close()
    return records, written


def assert_exact(records: list[dict[str, float]]) -> None:
    for record in records:
        assert record["train/train_rollout_logprob_abs_diff"] == 0.0
        assert record["train/train_rollout_logprob_abs_diff_max"] == 0.0
        assert record["train/grad_norm"] > 0


@pytest.mark.parametrize("shape", ["0.6b", "1.7b"])
def test_ten_training_steps_are_exact(shape: str) -> None:
    model = random_model(shape, dtype=torch.bfloat16, device="cuda")
    config = settings(engine_max_running_requests=64, engine_chunked_prefill_size=512, engine_max_total_tokens=8000)
    assert_exact(train(model, config, 10)[0])


def test_ten_steps_of_a_real_model_are_exact(smollm2_dir: Path) -> None:
    model = load_model(smollm2_dir, dtype=torch.bfloat16, device=CUDA)
    assert_exact(train(model, settings(rollout_temperature=0.8, rollout_top_k=40, rollout_top_p=0.95), 10)[0])


@pytest.mark.parametrize("values", [
    {"true_on_policy_mode": False, "engine_enable_deterministic_inference": False},
    {"true_on_policy_mode": False, "deterministic_mode": False},
    {"true_on_policy_mode": False},
    {},
], ids=["trainer", "engine", "both", "true on-policy"])  # fmt: skip
def test_a_run_repeats_bit_for_bit_over_20_steps(values: dict[str, bool]) -> None:
    outcomes = []
    for _ in range(2):
        model = shallow("0.6b", 3)
        records, written = train(model, settings(**values), 20)
        losses = [(record["train/loss"], record["train/grad_norm"]) for record in records]
        outcomes.append((losses, written, [parameter.detach().cpu() for parameter in model.parameters()]))
    (losses, written, weights), (others, rewritten, other_weights) = outcomes
    assert written == rewritten
    assert losses == others
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def test_layers_that_are_computed_again_change_no_bit() -> None:
    outcomes = []
    for granularity in ("selective", "full"):
        model = shallow("0.6b", 3)
        records, _ = train(model, settings(recompute_granularity=granularity), 2)
        assert_exact(records)
        outcomes.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_the_check_of_a_model_takes_less_than_a_minute(smollm2_dir: Path) -> None:
    verdict = exactness.check_exactness(settings(hf_checkpoint=str(smollm2_dir)))
    assert verdict.status == "ok" and verdict.data["max_gap"] == 0.0
