"""Options that save memory: what they must not change."""

from __future__ import annotations

import pytest
import torch

from miles.model.activations import Recompute
from miles.model.decoder import DecoderLayer
from miles.trainer.trainer import LocalTrainer


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_recompute_changes_no_bit_of_a_step(make_model, make_config, make_samples, monkeypatch, estimator) -> None:
    calls = 0
    forward = DecoderLayer.forward

    def counted(self, *args):
        nonlocal calls
        calls += torch.is_grad_enabled()
        return forward(self, *args)

    monkeypatch.setattr(DecoderLayer, "forward", counted)
    outcomes, counts = [], []
    whole = ({"recompute_granularity": "full"}, {"recompute_num_layers": 1})
    for flags in ({}, *whole, {"recompute_granularity": "selective"}):
        calls = 0
        config = make_config(advantage_estimator=estimator, lr=1e-2, max_tokens_per_gpu=40, **flags)
        critic = make_model(seed=2) if estimator == "ppo" else None
        trainer = LocalTrainer(make_model(), None, config, total_steps=2, critic=critic)
        results = [trainer.train(make_samples(seed=i), rollout_id=i, weight_version=i) for i in range(2)]
        outcomes.append(([(r.rollout, r.steps) for r in results], [p.clone() for p in trainer.model.parameters()]))
        counts.append(calls)
    for records, parameters in outcomes[1:]:
        assert records == outcomes[0][0]
        assert all(torch.equal(a, b) for a, b in zip(parameters, outcomes[0][1], strict=True))
    plain, full, one, selective = counts
    assert (full, one, selective) == (2 * plain, 1.5 * plain, plain)  # the model has two layers


def test_a_long_sample_alone_is_computed_again(make_model, make_config) -> None:
    trainer = LocalTrainer(make_model(), None, make_config(), total_steps=1)
    assert trainer.model.recompute_for(10) == Recompute()  # this machine has memory for ten tokens
    assert trainer.model.recompute_for(10**12) == Recompute(selective=True, num_layers=2)
