"""Seconds of a whole GRPO step of the recipe, split into its phases, on one GPU.

    python benchmarks/grpo_step.py [--shape qwen3-0.6b] [--lora-rank 16] [--repetitions 3] [--write FOLDER]
        [--peer trl] [--peer-path trl=FOLDER[:FOLDER...]]

One step: write 256 answers with log-probs, score them (exact match of the last token: the reward is not what is
measured), one optimizer step with forward, backward, clip and AdamW, give the engine the new weights. The first
repetition warms up and is reported apart; the others give medians. The limit is the bytes decoding must read (weights
once per engine step, the KV cache once per token, prompts once per answer) at the measured copy rate, plus 6 N tokens
at the measured matrix rate. `--peer trl` runs whole steps of TRL with vLLM in the same process, on the same weights and
lengths, in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.apart import measure_apart, paths_by_name
from benchmarks.machine import record
from benchmarks.model_folder import model_for_peers
from benchmarks.recipe import random_model, recipe, requests, to_train_samples
from miles.config.lora_section import LoraConfig
from miles.config.sections import AlgorithmConfig, BatchConfig, EngineConfig, OptimConfig, RunConfig
from miles.engine.local import LocalEngine
from miles.model.flops import forward_flops
from miles.model.lora import add_lora
from miles.observe.gpu import measure_rates, synchronize
from miles.trainer.trainer import LocalTrainer
from miles.types import GenerationRequest, GenerationResult

PHASES = ("generate", "score", "log_probs", "update", "weight_update", "other")


async def generate(engine: LocalEngine, sent: list[GenerationRequest]) -> dict[int, GenerationResult]:
    engine.submit(sent)
    results: dict[int, GenerationResult] = {}
    while len(results) < len(sent):
        for result in await engine.results():
            assert result.error is None, result.error
            results[result.request_id] = result
    return results


def one_step(engine: LocalEngine, trainer: LocalTrainer, repetition: int, share: float) -> dict[str, float]:
    device = trainer.device
    synchronize(device)
    start = time.perf_counter()
    sent = requests(repetition, share=share)
    results = asyncio.run(generate(engine, sent))
    synchronize(device)
    written = time.perf_counter()
    samples = to_train_samples(sent, results)
    scored = time.perf_counter()
    outcome = trainer.train(samples, rollout_id=repetition, weight_version=engine.version)
    synchronize(device)
    trained = time.perf_counter()
    engine.set_version(engine.version + 1)
    end = time.perf_counter()
    seconds = {
        "generate": written - start,
        "score": scored - written,
        "log_probs": outcome.seconds["log_probs"],
        "update": outcome.seconds["actor_train"],
        "weight_update": end - trained,
    }
    whole = {"seconds": end - start, "other": end - start - sum(seconds.values())}
    gap = "train/train_rollout_logprob_abs_diff"
    return {**seconds, **whole, "gap": outcome.steps[0][gap], "max_gap": outcome.steps[0][f"{gap}_max"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.6b", type=lambda name: name.removeprefix("qwen3-"))
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters on all products, of this rank")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--share", type=float, default=1.0, help="shorten every answer, to try the script out")
    parser.add_argument("--max-tokens", type=int, help="--max-tokens-per-gpu")
    parser.add_argument("--peer", nargs="*", default=[], choices=("trl",))
    parser.add_argument("--peer-path", action="append", default=[], metavar="NAME=FOLDER[:FOLDER]", help="its packages")
    parser.add_argument("--peer-micro-batch", type=int, default=32, help="rows of TRL's micro-batches")
    parser.add_argument("--limit-seconds", type=float, default=240.0, help="for the peer")
    parser.add_argument("--logs", type=Path, help="keep what the peer prints")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    started = time.perf_counter()
    model = random_model(arguments.shape, dtype=dtype, device=arguments.device)
    config = RunConfig(
        algorithm=AlgorithmConfig(eps_clip_high=0.28),
        optim=OptimConfig(lr=1e-6, weight_decay=0.1, adam_beta2=0.98),
        batch=BatchConfig(global_batch_size=256, max_tokens_per_gpu=arguments.max_tokens),
        lora=LoraConfig(lora_rank=arguments.lora_rank),
    )
    if config.lora.is_on:
        add_lora(model, config.lora, seed=0)
    trainer = LocalTrainer(model, None, config, total_steps=arguments.repetitions + 1)
    engine = LocalEngine(model, None, EngineConfig(engine_max_total_tokens=400_000), device=arguments.device)
    start_up_s = time.perf_counter() - started
    steps = [one_step(engine, trainer, repetition, arguments.share) for repetition in range(arguments.repetitions + 1)]
    for number, step in enumerate(steps):
        print(f"step {number}: " + "  ".join(f"{name} {value:.4g}" for name, value in step.items()), flush=True)
    medians = {name: median(step[name] for step in steps[1:]) for name in steps[0]}
    limits = limit(model.spec, arguments.device, dtype, arguments.share)
    peak_gb = torch.cuda.max_memory_allocated() / 2**30 if arguments.device == "cuda" else None
    result = {
        "name": f"grpo_step_{arguments.shape}{'_lora' if config.lora.is_on else ''}",
        "lora_rank": arguments.lora_rank,
        "seconds": medians["seconds"],
        "phases": {name: medians[name] for name in PHASES},
        "first_step_seconds": steps[0]["seconds"],
        "start_up_seconds": start_up_s,
        "limit_seconds": limits["limit_seconds"],
        "share_of_limit": limits["limit_seconds"] / medians["seconds"],
        "limits": limits,
        "gap": medians["gap"],
        "peers": {},
        "peak_gb": peak_gb,
    }
    engine.close()
    print(json.dumps(result), flush=True)
    if arguments.peer:
        del model, trainer, engine
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        result["peers"] = {"trl": measure_trl(arguments, dtype)}
        if theirs := result["peers"]["trl"]["seconds"]:
            result["times_ours_trl"] = theirs / result["seconds"]
    record(result, write=arguments.write)


def measure_trl(arguments: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds of TRL's whole step: the median without the first."""
    with model_for_peers(arguments, dtype) as (folder, model):
        sequences = [
            {"prompt": list(request.prompt_ids), "answer": [0] * request.sampling.max_new_tokens}
            for request in requests(0, share=arguments.share)
        ]
        job = {
            "part": "trl-step",
            "model": str(model),
            "dtype": str(dtype).removeprefix("torch."),
            "device": arguments.device,
            "sequences": sequences,
            "repetitions": arguments.repetitions,
            "micro_batch": arguments.peer_micro_batch,
        }
        paths = paths_by_name(arguments.peer_path)
        findings, error = measure_apart(
            "training.py", job, folder=folder, paths=paths.get("trl", "."), limit_seconds=arguments.limit_seconds
        )
    found: dict[str, Any] = {"seconds": None}
    for finding in findings:
        found |= finding
    if steps := found.get("steps"):
        found["seconds"] = median(step["seconds"] for step in steps[1:] or steps)
    return found if error is None else found | {"error": error}


def limit(spec: Any, device: str, dtype: torch.dtype, share: float) -> dict[str, float]:
    """Seconds that the hardware needs at least: what decoding reads, and what training multiplies."""
    workload = recipe(share=share)
    lengths = workload.sequence_lengths()
    num_answer_tokens = workload.num_answer_tokens
    rates = measure_rates(torch.device(device), dtype)
    decode_s = workload.decode_bytes(spec, dtype)["prompts_per_answer"] / rates.copy_bytes_per_s
    train_s = 6 * spec.num_parameters * sum(lengths) / rates.matrix_flops_per_s
    forward = forward_flops(spec, lengths, num_head_tokens=num_answer_tokens)
    return {
        "copy_gb_per_s": rates.copy_bytes_per_s / 1e9,
        "matrix_tflops": rates.matrix_flops_per_s / 1e12,
        "decode_seconds": decode_s,
        "train_seconds": train_s,
        "limit_seconds": decode_s + train_s,
        "training_flops": 3.0 * forward,
        "forward_flops": float(forward),
    }


if __name__ == "__main__":
    main()
