"""A tiny decoder with random weights, and an engine without any cleverness to compare with: one request at a time, the
whole text through the model for every token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from miles.config.sections import EngineConfig
from miles.engine.core import EngineCore
from miles.model.context import packed_context
from miles.model.decoder import Decoder
from miles.model.spec import ModelSpec
from miles.ops.sampling import Cuts, row_seeds, sample
from miles.types import GenerationRequest, GenerationResult, SamplingParams

SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=96,
    tied_head=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
    eos_token_ids=(1,),
)


def make_model(*, seed: int = 0, **changes: Any) -> Decoder:
    model = Decoder(dataclasses.replace(SPEC, **changes), dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    return model


def make_core(model: Decoder, *, tokenizer: Any = None, overlaps: bool | None = None, **flags: Any) -> EngineCore:
    config = EngineConfig(**{"engine_page_size": 4, "engine_max_total_tokens": 400, **flags})
    return EngineCore(model, tokenizer=tokenizer, config=config, device=torch.device("cpu"), overlaps=overlaps)


def request(
    request_id: int, prompt: Sequence[int], max_new_tokens: int, *, noise_key: int | None = None, **sampling: Any
) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return GenerationRequest(request_id, prompt, params, request_id if noise_key is None else noise_key)


def run_all(core: EngineCore) -> dict[int, GenerationResult]:
    """Step until nothing is left; no request may end twice."""
    results: dict[int, GenerationResult] = {}
    for _ in range(10_000):
        if not core.has_work:
            return results
        for result in core.step():
            assert result.request_id not in results
            results[result.request_id] = result
    raise AssertionError("the engine does not come to an end")


def assert_all_free(core: EngineCore) -> None:
    stats = core.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["free_blocks"] == stats["usable_blocks"]
    assert not core.scheduler.pool.references.any()
    assert core.table.num_free_rows == core.table.num_rows


@torch.no_grad()
def full_logits(model: Decoder, ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position by one plain forward pass."""
    return model(torch.tensor(ids), packed_context([len(ids)], device="cpu")) @ model.head_weight.T


def reference_answer(model: Decoder, wanted: GenerationRequest) -> tuple[list[int], list[float], list[list[int]]]:
    """Tokens, log-probs and kept ids of an answer, without cache, batch, chunks or blocks."""
    sampling, ids = wanted.sampling, list(wanted.prompt_ids)
    stop = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(model.spec.eos_token_ids))
    log_probs, kept = [], []
    key = torch.from_numpy(np.array([wanted.noise_key], dtype=np.uint64).view(np.int64))
    greedy = sampling.temperature == 0.0
    cuts = Cuts(
        torch.tensor([0]),
        torch.tensor([sampling.top_k]),
        torch.tensor([sampling.top_p]),
        torch.tensor([sampling.min_p]),
        num_candidates=model.spec.vocab_size,
    )
    end = min(len(ids) + sampling.max_new_tokens, model.spec.max_position_embeddings)
    while len(ids) < end:
        logits = full_logits(model, ids)[-1:].clone()
        drawn = sample(
            logits,
            seeds_R2=None if greedy else row_seeds(key, torch.tensor([len(ids)])),
            temperature_R=None if greedy else torch.tensor([sampling.temperature]),
            cuts=None if greedy else cuts,
        )
        ids.append(int(drawn.tokens_R))
        log_probs.append(float(drawn.log_probs_R))
        kept.append(logits[0].isfinite().nonzero().flatten().tolist())
        if ids[-1] in stop:
            break
    return ids[len(wanted.prompt_ids) :], log_probs, kept
