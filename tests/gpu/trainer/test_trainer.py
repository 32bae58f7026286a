"""The trainer on a GPU: bf16 against float32 on the CPU, and parameters that stay where they are."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from miles.config.sections import AlgorithmConfig, BatchConfig, OptimConfig, RunConfig
from miles.model.decoder import Decoder
from miles.trainer.step import Learner
from miles.trainer.trainer import LocalTrainer
from miles.types import TrainSample
from tests.unit.engine.tiny import make_model

pytestmark = pytest.mark.gpu
SHAPE = {
    "vocab_size": 5000, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "head_dim": 64,
    "max_position_embeddings": 512,
}  # fmt: skip


def samples() -> list[TrainSample]:
    rng = random.Random(1)
    made = []
    for i in range(16):
        length = rng.choice([5, 60, 130])
        tokens = [rng.randrange(5000) for _ in range(20 + length)]
        reward = float(rng.random() < 0.5)
        made.append(TrainSample(tokens, length, [1] * length, reward, reward, i // 4, i))
    return made


def trainer_of(model: Decoder, dtype: torch.dtype, device: str) -> LocalTrainer:
    copy = Decoder(model.spec, dtype=dtype, device=device)
    copy.load_state_dict(model.state_dict())
    config = RunConfig(
        algorithm=AlgorithmConfig(entropy_coef=0.01),
        optim=OptimConfig(lr=1e-3, clip_grad=0.0),
        batch=BatchConfig(global_batch_size=16, max_tokens_per_gpu=700),
    )
    return LocalTrainer(copy, None, config, total_steps=4)


def test_loss_and_gradients_equal_float32_on_the_cpu() -> None:
    """bf16: weights and activations have 8 bits, three layers deep; a wrong gradient would be off by its own size."""
    model = make_model(**SHAPE).bfloat16()  # weights that both dtypes can hold
    reference = trainer_of(model, torch.float32, "cpu")
    expected = reference.train(samples(), rollout_id=0, weight_version=0).steps[0]
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        trainer = trainer_of(model, dtype, "cuda")
        record = trainer.train(samples(), rollout_id=0, weight_version=0).steps[0]
        assert record["train/loss"] == pytest.approx(expected["train/loss"], rel=tolerance, abs=1e-5)
        assert record["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=tolerance)
        for name, parameter in reference.optimizer.parameters.items():
            gradient = trainer.optimizer.parameters[name].grad
            assert gradient.dtype == torch.float32
            error = (gradient.cpu() - parameter.grad).norm() / parameter.grad.norm()
            assert error < tolerance, (name, float(error))


def test_sharing_prompts_changes_loss_and_gradient_by_rounding_only() -> None:
    """Float32: 1e-5, sums in another order. bf16: as far as the parameters' gradients are from float32 anyway."""
    model, made = make_model(**SHAPE).bfloat16(), samples()
    for sample in made:
        sample.tokens = [(7 * place + sample.group_index) % 5000 for place in range(70)] + sample.tokens
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        outcomes = []
        for share in (False, True, True):
            trainer = trainer_of(model, dtype, "cuda")
            batch = dataclasses.replace(trainer.config.batch, share_prompts_in_training=share)
            trainer.config = dataclasses.replace(trainer.config, batch=batch)
            record = trainer.train(made, rollout_id=0, weight_version=0).steps[0]
            flat = torch.cat([parameter.grad.flatten() for parameter in trainer.optimizer.parameters.values()])
            outcomes.append((record["train/loss"], flat))
        (loss, plain), (shared_loss, shared), (_, again) = outcomes
        assert shared_loss == pytest.approx(loss, rel=tolerance, abs=1e-5)
        assert float((shared - plain).norm() / plain.norm()) < tolerance
        assert torch.equal(shared, again)


def test_parameters_never_move() -> None:
    trainer = trainer_of(make_model(**SHAPE), torch.bfloat16, "cuda")
    addresses = [parameter.data_ptr() for parameter in trainer.model.parameters()]
    before = trainer.model.layers[0].mlp.down.weight.clone()
    trainer.train(samples(), rollout_id=0, weight_version=0)
    assert not torch.equal(trainer.model.layers[0].mlp.down.weight, before)
    tensors, state = trainer.save()
    saved = {stem: {name: tensor.clone() for name, tensor in group.items()} for stem, group in tensors.items()}
    weight = trainer.model.layers[0].mlp.down.weight.clone()
    trainer.train(samples(), rollout_id=1, weight_version=1)
    trainer.load(saved, state)
    assert torch.equal(trainer.model.layers[0].mlp.down.weight, weight)
    assert [parameter.data_ptr() for parameter in trainer.model.parameters()] == addresses


def test_a_micro_batch_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(make_model(**SHAPE), torch.bfloat16, "cuda")
    trainer.train(samples(), rollout_id=0, weight_version=0)  # compiles
    accumulate = Learner.accumulate

    def watched(*args: Any) -> dict[str, torch.Tensor]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return accumulate(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Learner, "accumulate", watched)
    record = trainer.train(samples(), rollout_id=1, weight_version=1).steps[0]
    assert record["train/num_micro_batches"] > 1
