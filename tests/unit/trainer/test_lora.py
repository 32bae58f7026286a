"""LocalTrainer when only adapters are trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from miles.config.lora_section import LoraConfig
from miles.model.decoder import Decoder
from miles.model.lora import add_lora
from miles.plan.memory import num_adapter_parameters
from miles.trainer.forward import Scorer
from miles.trainer.trainer import LocalTrainer

RANK = 3


@pytest.fixture
def make_lora_trainer(make_model, make_config) -> Callable[..., LocalTrainer]:
    def make(*, dtype: torch.dtype = torch.float32, dropout: float = 0.0, reference: Any = None, **flags: Any):
        model = make_model(dtype=dtype)
        flags = {"lora_rank": RANK, "lora_dropout": dropout, "lr": 1e-2, **flags}
        config = make_config(**flags)
        add_lora(model, config.lora, seed=1)
        return LocalTrainer(model, model if reference == "policy" else reference, config, total_steps=4)

    return make


def snapshot(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_only_adapters_have_gradients_masters_and_moments_and_only_they_change(make_lora_trainer, make_samples) -> None:
    trainer = make_lora_trainer()
    before = snapshot(trainer.model)
    addresses = {name: p.data_ptr() for name, p in trainer.model.named_parameters()}
    for i in range(2):  # B is 0 at first, and with it the gradient of A
        result = trainer.train(make_samples(seed=i), rollout_id=i, weight_version=i)
    assert result.steps[0]["train/grad_norm"] > 0
    for name, parameter in trainer.model.named_parameters():
        is_adapter = ".lora." in name
        assert (parameter.grad is not None) == is_adapter == (name in trainer.optimizer.masters)
        assert torch.equal(parameter, before[name]) != is_adapter, name
    assert {name: p.data_ptr() for name, p in trainer.model.named_parameters()} == addresses
    for module in trainer.model.modules():  # what the engine reads is what was updated
        if hasattr(module, "blocks"):
            assert torch.equal(module.blocks.count_nonzero(), sum(b.count_nonzero() for b in module.b.values()))


def test_a_step_is_that_of_adam_on_the_adapters_alone(make_lora_trainer, make_samples) -> None:
    """The first update of Adam is lr times the sign of the gradient, also where a parameter is a view."""
    trainer = make_lora_trainer(clip_grad=0.0, adam_eps=1e-30)
    before = snapshot(trainer.model)
    trainer.train(make_samples(), rollout_id=0, weight_version=0)
    for name, parameter in trainer.model.named_parameters():
        if ".lora.b." in name:
            torch.testing.assert_close(parameter - before[name], -1e-2 * parameter.grad.sign(), rtol=1e-4, atol=1e-6)


def test_bfloat16_adapters_take_18_bytes_a_parameter_and_the_model_2(make_lora_trainer) -> None:
    trainer = make_lora_trainer(dtype=torch.bfloat16)
    optimizer, spec = trainer.optimizer, trainer.model.spec
    kept = [*optimizer.parameters.values(), *optimizer.masters.values()]
    kept += [p.grad for p in optimizer.parameters.values()]
    kept += optimizer.moments(lambda tensors: tensors).values()
    num = num_adapter_parameters(spec, trainer.config.lora)
    assert sum(tensor.numel() * tensor.element_size() for tensor in kept) == 18 * num
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    assert sum(p.numel() * p.element_size() for p in frozen) == 2 * spec.num_parameters
    assert all(p.grad is None for p in frozen)


def test_the_reference_is_the_policy_without_adapters(make_lora_trainer, make_model, make_samples) -> None:
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.1, "max_tokens_per_gpu": 50}
    shared, apart = (make_lora_trainer(reference=r, **flags) for r in ("policy", make_model().requires_grad_(False)))
    for i in range(3):
        results = [t.train(make_samples(seed=i), rollout_id=i, weight_version=i) for t in (shared, apart)]
        assert (results[0].rollout, results[0].steps) == (results[1].rollout, results[1].steps)
    assert results[0].steps[0]["train/kl_loss"] != 0


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_resumed_trainer_makes_the_same_steps(make_lora_trainer, make_samples, dropout: float) -> None:
    flags = {"dropout": dropout, "global_batch_size": 6, "max_tokens_per_gpu": 30}
    rollouts = [make_samples(seed=i) for i in range(3)]
    straight = make_lora_trainer(**flags)
    expected = [straight.train(rollouts[i], rollout_id=i, weight_version=i) for i in range(3)]

    first = make_lora_trainer(**flags)
    first.train(rollouts[0], rollout_id=0, weight_version=0)
    tensors, state = copy.deepcopy(first.save())
    assert set(tensors) == {"adapter", "optimizer"}
    torch.manual_seed(99)
    resumed = make_lora_trainer(**flags)
    resumed.load(tensors, state)
    results = [resumed.train(rollouts[i], rollout_id=i, weight_version=i) for i in (1, 2)]
    for ours, theirs in zip(results, expected[1:], strict=True):
        assert (ours.rollout, ours.steps) == (theirs.rollout, theirs.steps)
    ends = [trainer.save()[0] for trainer in (resumed, straight)]
    for stem in ends[0]:
        assert all(torch.equal(tensor, ends[1][stem][name]) for name, tensor in ends[0][stem].items())


def test_layers_that_are_computed_again_drop_the_same(make_lora_trainer, make_samples) -> None:
    records = []
    for granularity in (None, "selective", "full"):
        trainer = make_lora_trainer(dropout=0.3, recompute_granularity=granularity)
        trainer.train(make_samples(), rollout_id=0, weight_version=0)
        trainer.train(make_samples(seed=1), rollout_id=1, weight_version=1)
        records.append(trainer.save()[0]["adapter"])
    for record in records[1:]:
        assert all(torch.equal(tensor, record[name]) for name, tensor in records[0].items())


def test_dropout_is_on_in_training_passes_only(make_lora_trainer, make_samples, monkeypatch) -> None:
    seeds: list[tuple[bool, int | None]] = []
    score = Scorer.score

    def watched(self: Scorer, *args: Any, **named: Any) -> Any:
        seeds.append((torch.is_grad_enabled(), named.get("dropout_seed")))
        return score(self, *args, **named)

    monkeypatch.setattr(Scorer, "score", watched)
    flags = {"kl_coef": 0.1, "global_batch_size": 6, "max_tokens_per_gpu": 40}
    trainer = make_lora_trainer(dropout=0.2, reference="policy", **flags)
    trainer.train(make_samples(), rollout_id=0, weight_version=0)
    assert {learns for learns, _ in seeds} == {True, False}
    assert all((seed is not None) == learns for learns, seed in seeds)
    drawn = [seed for _, seed in seeds if seed is not None]
    assert len(set(drawn)) == len(drawn) > 1
    assert LoraConfig().lora_dropout == 0.0  # off unless asked for
