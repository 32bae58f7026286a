"""What each option that saves memory of the trainer costs and saves: one optimizer step of 32 x 8 answers.

    python benchmarks/memory_step.py [--shape 4b] [--answer 1024] [--options NAME ...] [--write FOLDER]

Random weights, prompts of 100 tokens, every answer of full length, every group with a signal. For each option a short
step to warm up, then one whole step: seconds, peak memory of the device, token budget of a micro-batch, layers computed
again; without an option also seconds and bytes of moving the states to the host and back. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import record
from benchmarks.recipe import random_model
from miles.config.flags import with_values
from miles.config.sections import RunConfig
from miles.model.decoder import Decoder
from miles.trainer.trainer import LocalTrainer
from miles.types import TrainSample

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "selective": {"recompute_granularity": "selective"},
    "recompute": {"recompute_granularity": "full"},
    "no_recompute": {"recompute_num_layers": 0},
    "adam_bfloat16": {"adam_state": "bfloat16"},
    "adam_8bit": {"adam_state": "8bit"},
    "moments_on_host": {"optimizer_cpu_offload": True},
}
PROMPT = 100


def make_samples(num_groups: int, answer: int, vocab_size: int) -> list[TrainSample]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (8 * num_groups, PROMPT + answer), generator=generator).tolist()
    return [
        TrainSample(tokens, answer, [1] * answer, float(i % 2), float(i % 2), i // 8, i) for i, tokens in enumerate(ids)
    ]


def measure(model: Decoder, samples: list[TrainSample], flags: dict[str, Any]) -> dict[str, Any]:
    is_cuda = model.head_weight.is_cuda
    config = with_values(RunConfig(), {"lr": 1e-6, "max_logprob_gap": 0.0, "ci_disable_kl_checker": True, **flags})
    trainer = LocalTrainer(model, None, config, total_steps=4)

    def seconds_of(action: Any) -> float:
        start = time.perf_counter()
        action()
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def train(given: list[TrainSample]) -> None:
        records.append(trainer.train(given, rollout_id=0, weight_version=0).steps[0])

    records: list[dict[str, float]] = []
    train(samples[:16])
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    spent = seconds_of(lambda: train(samples))
    found = {
        "seconds": spent,
        "tflops": records[-1]["train/tflop"] / spent,
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0,
        "max_tokens": trainer.max_tokens,
        "recompute": asdict(model.recompute_for(trainer.max_tokens)),
        "num_micro_batches": records[-1]["train/num_micro_batches"],
        "update_seconds": seconds_of(trainer.optimizer.step),
    }
    if not flags:
        found |= {"offload_seconds": [], "onload_seconds": []}
    for _ in range(0 if flags else 2):  # the first also allocates on the host
        found["offload_seconds"].append(seconds_of(trainer.offload))
        found["offloaded_gb"] = trainer.offloaded_bytes / 2**30
        found["onload_seconds"].append(seconds_of(trainer.onload))
    for parameter in model.parameters():
        parameter.grad = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--answer", type=int, default=1024)
    parser.add_argument("--options", nargs="*", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    start = time.perf_counter()
    model = random_model(arguments.shape, dtype=torch.bfloat16, device=arguments.device)
    samples = make_samples(arguments.groups, arguments.answer, model.spec.vocab_size)
    runs = {}
    for name in arguments.options:
        runs[name] = measure(model, samples, OPTIONS[name])
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        print(name, runs[name], flush=True)
    result = {
        "name": f"memory_step_{arguments.shape}",
        "seconds": time.perf_counter() - start,
        "num_tokens": len(samples) * (PROMPT + arguments.answer),
        "num_parameters": model.spec.num_parameters,
        "runs": runs,
        "peers": {},
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
