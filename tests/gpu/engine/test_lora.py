"""Adapters on a GPU: under CUDA graphs, in bfloat16, read live, and trained where they are."""

from __future__ import annotations

import random

import pytest
import torch

from miles.config.flags import with_values
from miles.config.lora_section import LoraConfig
from miles.config.sections import EngineConfig, RunConfig
from miles.engine.core import EngineCore
from miles.model.context import packed_context
from miles.model.decoder import Decoder
from miles.model.lora import add_lora
from miles.ops.logprob import token_log_probs
from miles.trainer.trainer import LocalTrainer
from miles.types import GenerationResult, TrainSample
from tests.unit.engine.test_lora import merged
from tests.unit.engine.tiny import make_model, reference_answer, request, run_all

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPE = {
    "vocab_size": 5000, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "head_dim": 64,
    "max_position_embeddings": 512,
}  # fmt: skip
LORA = LoraConfig(lora_rank=2, lora_alpha=3.0)  # what `merged` multiplies with


def on_gpu(dtype: torch.dtype) -> Decoder:
    cpu = make_model(**SHAPE)
    model = Decoder(cpu.spec, dtype=dtype, device=CUDA)
    model.load_state_dict(cpu.state_dict())
    with torch.no_grad():
        model.embedding.weight *= 0.5
    add_lora(model, LORA, seed=0)
    return model


@torch.no_grad()
def update_small(model: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora." in name:
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def on_cpu(model: Decoder) -> Decoder:
    """A float32 copy without adapters, which are in its weights."""
    copy = Decoder(model.spec, dtype=torch.float32, device="cpu")
    add_lora(copy, LORA, seed=0)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            parameter.copy_(theirs[name])
    return merged(copy)


def engine(model: Decoder) -> EngineCore:
    config = EngineConfig(engine_max_total_tokens=20_000, engine_max_running_requests=40)
    return EngineCore(model, tokenizer=None, config=config, device=CUDA)


def answers(core: EngineCore) -> dict[int, GenerationResult]:
    rng = random.Random(0)
    core.add([request(i, [rng.randrange(2, 5000) for _ in range(9)], 24, ignore_eos=True) for i in range(6)])
    return run_all(core)


def test_graphs_compute_with_the_adapters_of_now_without_a_new_capture() -> None:
    model = on_gpu(torch.float32)
    core = engine(model)
    before = answers(core)
    graphs = dict(core.runner._graphs._graphs)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    for version in (1, 2):
        update_small(model, seed=version)
        core.set_version(version)
        found = answers(core)
        expected = on_cpu(model)
        rng = random.Random(0)
        for i in range(6):
            wanted = request(i, [rng.randrange(2, 5000) for _ in range(9)], 24, ignore_eos=True)
            tokens, log_probs, _ = reference_answer(expected, wanted)
            assert found[i].output_ids == tokens
            assert found[i].log_probs == pytest.approx(log_probs, abs=2e-4)
            assert set(found[i].weight_versions) == {version}
        assert any(found[i].log_probs != before[i].log_probs for i in found)
        before = found
    assert core.runner._graphs._graphs == graphs and graphs, "the same graphs"
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_bfloat16_trainer_and_engine_agree_and_an_update_is_in_the_next_answer() -> None:
    model = on_gpu(torch.bfloat16)
    update_small(model, seed=1)
    config = with_values(RunConfig(), {"lora_rank": 2, "lora_alpha": 3.0, "lr": 1e-2, "max_logprob_gap": 0.0})
    trainer = LocalTrainer(model, None, config, total_steps=3)
    core = engine(model)
    for version in range(3):
        core.set_version(version)
        found = answers(core)
        rng = random.Random(0)
        samples, gaps = [], []
        for i in range(6):
            ids = [*(rng.randrange(2, 5000) for _ in range(9)), *found[i].output_ids]
            with torch.no_grad():
                hidden = model(torch.tensor(ids, device=CUDA), packed_context([len(ids)], device=CUDA))
            targets = torch.tensor(ids[9:], device=CUDA)
            log_probs, _ = token_log_probs(hidden[8:-1], model.head_weight, targets)
            gaps.append((log_probs.cpu() - torch.tensor(found[i].log_probs)).abs())
            samples.append(
                TrainSample(
                    tokens=ids,
                    response_length=24,
                    loss_mask=[1] * 24,
                    reward=float(i % 2),
                    raw_reward=float(i % 2),
                    group_index=0,
                    index=i,
                    rollout_log_probs=list(found[i].log_probs),
                    weight_versions=[version] * 24,
                )
            )
        assert torch.cat(gaps).mean() < 0.02
        blocks = model.layers[0].attention.qkv.lora.blocks.clone()
        frozen = model.layers[0].attention.qkv.weight.clone()
        trainer.train(samples, rollout_id=version, weight_version=version)
        assert not torch.equal(model.layers[0].attention.qkv.lora.blocks, blocks), "what the engine reads has changed"
        assert torch.equal(model.layers[0].attention.qkv.weight, frozen)
        again = answers(core)
        assert any(again[i].log_probs != found[i].log_probs for i in found)


def test_training_gradients_are_near_those_of_float32_on_a_cpu() -> None:
    gradients = []
    for model in (on_gpu(torch.bfloat16), on_gpu(torch.float32)):
        update_small(model, seed=1)
        ids = torch.randint(2, 5000, (64,), generator=torch.Generator().manual_seed(0)).to(CUDA)
        hidden = model(ids[:-1], packed_context([63], device=CUDA))
        log_probs, _ = token_log_probs(hidden, model.head_weight, ids[1:])
        log_probs.sum().backward()
        assert all((p.grad is not None) == (".lora." in name) for name, p in model.named_parameters())
        gradients.append({n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None})
    for name, exact in gradients[1].items():
        error = (gradients[0][name] - exact).norm() / exact.norm()
        assert error < 0.1, (name, float(error))
