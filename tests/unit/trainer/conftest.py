"""A tiny decoder with random weights and rollouts made of random tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from miles.config.sections import RunConfig
from miles.model.decoder import Decoder
from miles.model.spec import ModelSpec
from miles.types import TrainSample

SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=256,
    tied_head=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
)


@pytest.fixture
def make_model() -> Callable[..., Decoder]:
    def make(*, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
        model = Decoder(dataclasses.replace(SPEC, **changes), dtype=dtype, device="cpu")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                values = 0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1)
                parameter.copy_(values)
        return model

    return make


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    def make(**flags: Any) -> RunConfig:
        config = RunConfig()
        flags = {"max_logprob_gap": 0.0, **flags}  # the engine's log-probs of `make_samples` are made up
        for section in dataclasses.fields(config):
            values = getattr(config, section.name)
            mine = {f.name: flags.pop(f.name) for f in dataclasses.fields(values) if f.name in flags}
            config = dataclasses.replace(config, **{section.name: dataclasses.replace(values, **mine)})
        assert not flags, f"no such flags: {flags}"
        return config

    return make


@pytest.fixture
def make_samples() -> Callable[..., list[TrainSample]]:
    def make(
        *, num_groups: int = 3, group_size: int = 4, seed: int = 0, lengths: list[int] | None = None
    ) -> list[TrainSample]:
        draw = random.Random(seed)
        samples = []
        for index in range(num_groups * group_size):
            length = lengths[index] if lengths else draw.randint(1, 12)
            reward = float(draw.random() < 0.5)
            samples.append(
                TrainSample(
                    tokens=[draw.randrange(SPEC.vocab_size) for _ in range(draw.randint(2, 6) + length)],
                    response_length=length,
                    loss_mask=[1] * length,
                    reward=reward,
                    raw_reward=reward,
                    group_index=index // group_size,
                    index=index,
                    rollout_log_probs=[-3.0 + draw.random() for _ in range(length)],
                    weight_versions=[0] * length,
                )
            )
        return samples

    return make
