"""How far the engine's log-probs are from the trainer's forward pass, token by token.

The engine answers sums, eight answers to a prompt, of uneven lengths, drawn at temperature 1 in one batch, with shared
prompts, chunks and, on a GPU, CUDA graphs. The trainer scores the same tokens in packed micro-batches with the same
weights. What is left between them is rounding: in float32 at most 1e-4 for any token; in bfloat16 0.004 on average.

    python -m benchmarks.parity --model FOLDER --rounding [--sequences 24]
    python -m benchmarks.parity --model FOLDER [--dtype float32|bfloat16] [--sequences 256] [--write FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import record
from miles.config.sections import EngineConfig
from miles.engine.local import LocalEngine
from miles.model.decoder import Decoder
from miles.model.load import load_model
from miles.text.tokenizer import Tokenizer, load_tokenizer
from miles.trainer.batch import TokenBatch, micro_batches, token_batch
from miles.trainer.forward import Scorer
from miles.types import GenerationRequest, GenerationResult, SamplingParams, TrainSample

ANSWERS_PER_PROMPT = 8
GOALS = {"float32": ("max", 1e-4), "bfloat16": ("mean", 0.004)}


def make_requests(tokenizer: Tokenizer, num: int, most_tokens: int) -> list[GenerationRequest]:
    rng, made = random.Random(0), list[GenerationRequest]()
    while len(made) < num:
        question = f"{rng.randrange(100)}+{rng.randrange(100)}=?"
        prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": question}]))
        for _ in range(min(ANSWERS_PER_PROMPT, num - len(made))):
            sampling = SamplingParams(max_new_tokens=rng.randrange(1, most_tokens + 1), ignore_eos=True)
            made.append(GenerationRequest(len(made), prompt, sampling, noise_key=len(made)))
    return made


async def collect(engine: LocalEngine, num: int) -> dict[int, GenerationResult]:
    results: dict[int, GenerationResult] = {}
    while len(results) < num:
        for result in await engine.results():
            assert result.error is None, result.error
            results[result.request_id] = result
    return results


def answered(model: Decoder, requests: list[GenerationRequest], config: EngineConfig) -> TokenBatch:
    """The engine's answers, as the trainer gets them."""
    device = model.head_weight.device
    engine = LocalEngine(model, None, config, device=device)
    try:
        engine.submit(requests)
        results = asyncio.run(collect(engine, len(requests)))
    finally:
        engine.close()
    answers = [results[request.request_id] for request in requests]
    samples = [
        TrainSample(
            tokens=[*request.prompt_ids, *answer.output_ids],
            response_length=len(answer.output_ids),
            loss_mask=[1] * len(answer.output_ids),
            reward=0.0,
            raw_reward=0.0,
            group_index=request.request_id // ANSWERS_PER_PROMPT,
            index=request.request_id,
            rollout_log_probs=answer.log_probs,
        )
        for request, answer in zip(requests, answers, strict=True)
    ]
    return token_batch(samples, device)


def scored(model: Decoder, batch: TokenBatch) -> Tensor:
    """The trainer's log-prob of every answer token."""
    packed = micro_batches(batch, range(len(batch.samples)), max_tokens=4096)
    return Scorer(1.0, 1024).score_all(model, packed)[0]


def gaps(model: Decoder, requests: list[GenerationRequest], config: EngineConfig) -> Tensor:
    """Distance of the two log-probs of every answer token, float32."""
    batch = answered(model, requests, config)
    assert batch.rollout_log_probs_R is not None, "the engine gives log-probs"
    return (scored(model, batch) - batch.rollout_log_probs_R).abs().float().cpu()


def measure_rounding(folder: Path, *, device: str, num: int, most_tokens: int) -> dict[str, Any]:
    """How far the trainer's log-probs move when it computes in bfloat16 instead of float32."""
    begin, model = time.perf_counter(), load_model(folder, dtype=torch.float32, device=device)
    requests = make_requests(load_tokenizer(folder), num, most_tokens)
    batch = answered(model, requests, EngineConfig(engine_max_total_tokens=65536))
    rounded_R = scored(load_model(folder, dtype=torch.bfloat16, device=device), batch)
    return {
        "name": f"rounding_{folder.name}_bfloat16",
        "seconds": round(time.perf_counter() - begin, 1),
        "sequences": num,
        **statistics((scored(model, batch) - rounded_R).abs().float().cpu()),
    }


def statistics(gaps_R: Tensor) -> dict[str, float]:
    return {
        "mean": float(gaps_R.mean()),
        "p99": float(gaps_R.quantile(0.99)),
        "max": float(gaps_R.max()),
        "tokens": len(gaps_R),
    }


def measure(folder: Path, *, dtype: torch.dtype, device: str, num: int, most_tokens: int) -> dict[str, Any]:
    begin, tokenizer = time.perf_counter(), load_tokenizer(folder)
    model = load_model(folder, dtype=dtype, device=device)
    requests = make_requests(tokenizer, num, most_tokens)
    found = statistics(gaps(model, requests, EngineConfig(engine_max_total_tokens=65536)))
    name = str(dtype).removeprefix("torch.")
    which, limit = GOALS[name]
    return {
        "name": f"parity_{folder.parent.name if folder.name == 'model' else folder.name}_{name}",
        "seconds": round(time.perf_counter() - begin, 1),
        "sequences": num,
        **found,
        "goal": {which: limit},
        "meets_goal": found[which] < limit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", choices=tuple(GOALS), help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=64, help="of the longest answer")
    parser.add_argument("--write", type=Path, help="folder that gets the JSON line as a file")
    parser.add_argument("--rounding", action="store_true", help="the trainer in bfloat16 against itself in float32")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.rounding:
        found = measure_rounding(args.model, device=device, num=args.sequences, most_tokens=args.answer_tokens)
        record(found, write=args.write)
        return
    dtype = getattr(torch, args.dtype or ("bfloat16" if device == "cuda" else "float32"))
    found = measure(args.model, dtype=dtype, device=device, num=args.sequences, most_tokens=args.answer_tokens)
    record(found, write=args.write)


if __name__ == "__main__":
    main()
