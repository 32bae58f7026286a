"""Checks that run in every training run: what they measure, and that they stop a run that is wrong."""

from __future__ import annotations

import copy

import pytest
import torch

from miles.errors import TrainError
from miles.model.context import packed_context
from miles.model.decoder import Decoder
from miles.ops.attention import packed_attention
from miles.trainer.checks import check_rollout
from miles.trainer.trainer import LocalTrainer
from miles.types import TrainSample


def on_policy(model: Decoder, samples: list[TrainSample], offset: float = 0.0) -> list[TrainSample]:
    """With log-probs of an engine that computes like the trainer, `offset` apart."""
    for sample in samples:
        with torch.no_grad():
            hidden_TD = model(torch.tensor(sample.tokens), packed_context([len(sample.tokens)], device="cpu"))
            rows = torch.log_softmax(hidden_TD @ model.head_weight.T, -1)[-sample.response_length - 1 : -1]
        targets = torch.tensor(sample.tokens[-sample.response_length :])
        sample.rollout_log_probs = (rows.gather(1, targets[:, None]).squeeze(1) + offset).tolist()
    return samples


def leaking_attention(q_TNH, k_TKH, v_TKH, *others):
    """Packed answers see something of each other."""
    return packed_attention(q_TNH, k_TKH, v_TKH, *others) + 0.1 * v_TKH.mean()


def test_answers_are_rescored_alone_at_the_first_step_only(make_model, make_config, make_samples) -> None:
    trainer = LocalTrainer(make_model(), None, make_config(), total_steps=2)
    first, second = (trainer.train(make_samples(), rollout_id=i, weight_version=i).steps[0] for i in range(2))
    assert abs(first["train/check_ppo_kl"]) < 1e-6 and first["train/check_clipfrac"] == 0.0
    assert 0.0 < first["train/check_gap_max"] < 1e-5
    assert not any(name.startswith("train/check") for name in second)


def test_packing_that_mixes_answers_stops_the_run_before_an_update(
    make_model, make_config, make_samples, monkeypatch
) -> None:
    monkeypatch.setattr("miles.model.attention.packed_attention", leaking_attention)
    trainer = LocalTrainer(make_model(), None, make_config(lr=1.0), total_steps=1)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(TrainError, match="packed together and alone do not have the same log-probs: train/check_"):
        trainer.train(make_samples(), rollout_id=0, weight_version=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    unchecked = LocalTrainer(make_model(), None, make_config(ci_disable_kl_checker=True), total_steps=1)
    record = unchecked.train(make_samples(), rollout_id=0, weight_version=0).steps[0]
    assert "train/check_ppo_kl" not in record


def test_field_note_20_the_gap_is_measured_and_stops_a_run_that_drifts(make_model, make_config, make_samples) -> None:
    samples = on_policy(make_model(), make_samples(), offset=0.5)
    trainer = LocalTrainer(make_model(), None, make_config(max_logprob_gap=0.6), total_steps=1)
    record = trainer.train(samples, rollout_id=0, weight_version=0).steps[0]
    for name in ("", "_p99", "_max"):
        assert record[f"train/train_rollout_logprob_abs_diff{name}"] == pytest.approx(0.5, abs=1e-4)
    strict = LocalTrainer(make_model(), None, make_config(max_logprob_gap=0.4, lr=1.0), total_steps=1)
    before = copy.deepcopy(strict.model.state_dict())
    with pytest.raises(TrainError, match=r"differ by 0.5 nat per token on average, more than --max-logprob-gap 0.4"):
        strict.train(samples, rollout_id=0, weight_version=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in strict.model.state_dict().items())


@pytest.mark.parametrize("flags", [{}, {"use_rollout_logprobs": True}], ids=["own", "the engine's"])
def test_what_the_steps_of_a_rollout_change_is_no_gap(make_model, make_config, make_samples, flags) -> None:
    config = make_config(max_logprob_gap=0.01, lr=0.3, global_batch_size=6, **flags)
    trainer = LocalTrainer(make_model(), None, config, total_steps=4)
    first, *later = trainer.train(on_policy(trainer.model, make_samples()), rollout_id=0, weight_version=0).steps
    gap = "train/train_rollout_logprob_abs_diff"
    assert first[gap] < 1e-4 and later and all(step.get(gap, 0.0) < 1e-4 for step in later)
    assert max(abs(step["train/ppo_kl"]) for step in later) > 0.01, "the weights have moved by more than the limit"
    apart = on_policy(make_model(), make_samples(), offset=0.5)
    with pytest.raises(TrainError, match=r"more than --max-logprob-gap 0.01"):
        LocalTrainer(make_model(), None, config, total_steps=4).train(apart, rollout_id=0, weight_version=0)


def test_the_default_limit_catches_another_temperature(make_model, make_config, make_samples) -> None:
    """An engine that draws at temperature 0.25 while the trainer scores at 1."""
    cold = make_model()
    with torch.no_grad():
        cold.norm.weight.mul_(4.0)
    samples = on_policy(cold, make_samples())
    trainer = LocalTrainer(make_model(), None, make_config(max_logprob_gap=1.0), total_steps=1)
    with pytest.raises(TrainError, match="another temperature"):
        trainer.train(samples, rollout_id=0, weight_version=0)


def test_ci_test_accepts_a_right_run_with_one_and_with_several_steps(make_model, make_config, make_samples) -> None:
    for flags in ({}, {"global_batch_size": 6}, {"use_kl_loss": True, "kl_loss_coef": 0.1}):
        trainer = LocalTrainer(make_model(), make_model(seed=1), make_config(ci_test=True, **flags), total_steps=4)
        for rollout_id in range(2):
            trainer.train(on_policy(trainer.model, make_samples()), rollout_id=rollout_id, weight_version=rollout_id)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"train/ppo_kl": 1e-8, "train/pg_clipfrac": 0.0}, "train/ppo_kl is 1e-08, at most 1e-09"),
        ({"train/ppo_kl": 0.0, "train/pg_clipfrac": 0.01}, "train/pg_clipfrac is 0.01, at most 1e-10"),
        (
            {"train/ppo_kl": 0.0, "train/pg_clipfrac": 0.0, "train/train_rollout_logprob_abs_diff": 0.05},
            "train/train_rollout_logprob_abs_diff is 0.05, at most 0.03",
        ),
    ],
)
def test_ci_test_limits_of_public_miles(record: dict[str, float], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        check_rollout(record, detached=True, dtype=torch.float32)


def test_ci_test_stops_a_run_whose_engine_is_apart(make_model, make_config, make_samples) -> None:
    samples = on_policy(make_model(), make_samples(), offset=0.05)
    trainer = LocalTrainer(make_model(), None, make_config(ci_test=True), total_steps=1)
    with pytest.raises(TrainError, match="abs_diff is 0.05, at most 0.03"):
        trainer.train(samples, rollout_id=0, weight_version=0)
