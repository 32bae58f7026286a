"""Proves on a device that engine and trainer agree bit for bit: the engine writes random answers while everything that
could change a bit goes on, and the trainer scores them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from miles.config.sections import RunConfig
from miles.engine.core import EngineCore
from miles.loop.placement import place
from miles.loop.preflight import FAIL, OK, Verdict
from miles.model.decoder import Decoder
from miles.model.load import load_model, resolve_model
from miles.model.spec import load_spec
from miles.rollout.producer import rollout_sampling
from miles.trainer.batch import in_flat_order, micro_batches, token_batch
from miles.trainer.forward import Scorer
from miles.trainer.packing import canonical_order
from miles.types import GenerationRequest, GenerationResult, TrainSample

ANSWERS_PER_PROMPT = 4
# Prompt lengths, and the longest answer: a mixed batch that a laptop writes in some ten seconds.
SIZES = {"cpu": ((50, 23, 5), 16), "cuda": ((1500, 700, 300, 129, 64, 33, 17, 5, 1, 900, 450, 256), 160)}


@dataclass(frozen=True, slots=True)
class Exactness:
    """What was compared, and what the engine did meanwhile."""

    num_tokens: int
    num_differ: int
    max_gap: float  # nat
    num_retracted: int
    num_cached_tokens: int
    num_steps: int


def compare(model: Decoder, config: RunConfig) -> Exactness:
    """Write and score. The settings of sampling, page size and graphs are those of `config`. Half of the requests come
    later, prompts are read in chunks, and at one moment all that run are retracted. Raises `ConfigError` for a model
    that cannot be exact."""
    device, spec = model.head_weight.device, model.spec
    lengths, longest = SIZES[device.type]
    fits = spec.max_position_embeddings - longest
    requests = _requests(config, [min(length, fits) for length in lengths], longest, spec.vocab_size)
    core = _engine(model, config, requests)
    results: dict[int, GenerationResult] = {}
    half = len(requests) // 2
    for sent, num_steps in ((requests[:half], 4), (requests[half:], longest // 3)):
        core.add(sent)
        for _ in range(num_steps):
            results |= {result.request_id: result for result in core.step()}
    core.pause("retract")  # all that run begin again, with what they have
    while core.has_work:
        results |= {result.request_id: result for result in core.step()}
    samples = [_sample(request, results[request.request_id], len(lengths)) for request in requests]
    batch = token_batch(canonical_order(samples), device)
    assert batch.rollout_log_probs_R is not None, "the engine gives log-probs"
    gap_R = torch.zeros(batch.num_tokens, device=device)
    for max_tokens in (3 * (max(lengths) + longest), 1):  # packed together with shared prompts, and one by one
        scored_R = _score(model, config, batch, max_tokens=max_tokens)
        gap_R = torch.maximum(gap_R, (scored_R - batch.rollout_log_probs_R).abs())
    stats = core.stats()
    cached = sum(result.cached_tokens for result in results.values())
    num_differ, max_gap = int((gap_R > 0).sum()), float(gap_R.max())
    return Exactness(batch.num_tokens, num_differ, max_gap, stats["retractions"], cached, stats["steps"])


def check_exactness(config: RunConfig) -> Verdict:
    """The model of `--hf-checkpoint` on its device, as one verdict. Raises `MilesError` when it cannot be loaded."""
    assert config.model.hf_checkpoint is not None, "the caller demands --hf-checkpoint"
    start = time.monotonic()
    folder = resolve_model(config.model.hf_checkpoint)
    placement = place(config.model, load_spec(folder))
    found = compare(load_model(folder, dtype=placement.dtype, device=placement.device), config)
    text = (
        f"{found.num_differ} of {found.num_tokens} log-probs differ, largest gap {found.max_gap:g} nat, on "
        f"{placement.device.type}; {found.num_steps} engine steps with prompt chunks, {found.num_cached_tokens} cached "
        f"prompt tokens, {found.num_retracted} retracted requests; {time.monotonic() - start:.1f} s"
    )
    data = {"max_gap": found.max_gap, "num_differ": found.num_differ, "num_tokens": found.num_tokens}
    return Verdict("exactness", FAIL if found.num_differ else OK, text, data=data)


def _requests(config: RunConfig, lengths: Sequence[int], longest: int, vocab_size: int) -> list[GenerationRequest]:
    """Answers of different lengths to a few prompts, those of a prompt not side by side."""
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    prompts[-1] = prompts[0][: len(prompts[0]) // 2] or prompts[-1]  # the beginning of another one
    sampling = rollout_sampling(config)
    return [
        GenerationRequest(
            number,
            prompts[number % len(prompts)],
            replace(sampling, max_new_tokens=rng.randrange(longest // 3, longest), ignore_eos=True, stop=()),
            noise_key=number,
        )
        for number in range(ANSWERS_PER_PROMPT * len(prompts))
    ]


def _engine(model: Decoder, config: RunConfig, requests: Sequence[GenerationRequest]) -> EngineCore:
    needed = [len(request.prompt_ids) + request.sampling.max_new_tokens for request in requests]
    page = config.engine.engine_page_size
    small: dict[str, Any] = {
        "engine_enable_deterministic_inference": True,
        "engine_max_total_tokens": (sum(needed) // page + 2 * len(requests)) * page,
        "engine_mem_fraction_static": None,
        "engine_max_running_requests": len(requests),
        "engine_chunked_prefill_size": max(needed) // 3,
    }
    return EngineCore(model, tokenizer=None, config=replace(config.engine, **small), device=model.head_weight.device)


def _sample(request: GenerationRequest, result: GenerationResult, num_prompts: int) -> TrainSample:
    assert result.error is None, result.error
    return TrainSample(
        tokens=[*request.prompt_ids, *result.output_ids],
        response_length=len(result.output_ids),
        loss_mask=[1] * len(result.output_ids),
        reward=0.0,
        raw_reward=0.0,
        group_index=request.request_id % num_prompts,
        index=request.request_id,
        rollout_log_probs=result.log_probs,
        kept_token_ids=result.kept_token_ids,
    )


def _score(model: Decoder, config: RunConfig, batch: Any, *, max_tokens: int) -> Tensor:
    """As in a training step, with a graph for the gradient."""
    scorer = Scorer(config.rollout.rollout_temperature, 1024, invariant=True)
    packed = micro_batches(batch, range(len(batch.samples)), max_tokens=max_tokens, learns=True, share=True)
    return in_flat_order(packed, [scorer.score(model, micro_batch)[0].detach() for micro_batch in packed])
