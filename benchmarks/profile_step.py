"""Where the time of a decode step and of a training micro-batch goes on a GPU, kernel by kernel.

    python benchmarks/profile_step.py [--shape 0.6b] [--rows 256] [--context 600] [--write FOLDER]

Writes a table of each and one JSON line: milliseconds of a step by the clock, on the device, and of host work.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import record
from benchmarks.recipe import random_model, spec_of
from miles.config.sections import AlgorithmConfig, BatchConfig, EngineConfig, RunConfig
from miles.engine import sampler
from miles.engine.core import EngineCore
from miles.model.flops import training_flops
from miles.trainer.trainer import LocalTrainer
from miles.types import GenerationRequest, SamplingParams, TrainSample

NUM_STEPS = 20


def table_of(profiler: Any, *, rows: int = 25) -> str:
    return profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=rows, max_name_column_width=70)


def device_ms(profiler: Any) -> float:
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3


def profile_decode(model: Any, rows: int, context: int) -> tuple[dict[str, float], str]:
    config = EngineConfig(engine_max_total_tokens=rows * (context + 400), engine_max_running_requests=rows)
    core = EngineCore(model, tokenizer=None, config=config, device=torch.device("cuda"))
    ids = torch.randint(1000, 100_000, (rows, context)).tolist()
    sampling = SamplingParams(max_new_tokens=350, ignore_eos=True)
    core.add(GenerationRequest(i, prompt, sampling, i) for i, prompt in enumerate(ids))
    waited = 0.0
    wait = sampler.OnTheWay.wait

    def timed_wait(self: sampler.OnTheWay) -> sampler.Drawn:
        nonlocal waited
        start = time.perf_counter()
        drawn = wait(self)
        waited += time.perf_counter() - start
        return drawn

    while core.table.waits.any() or core.scheduler.waiting or (core.table.length[:rows] < context + 20).any():
        core.step()
    torch.cuda.synchronize()
    sampler.OnTheWay.wait = timed_wait
    start = time.perf_counter()
    for _ in range(100):
        core.step()
    torch.cuda.synchronize()
    clock_s = time.perf_counter() - start
    sampler.OnTheWay.wait = wait
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(NUM_STEPS):
            core.step()
        torch.cuda.synchronize()
    times = {
        "clock_ms": clock_s * 10,
        "host_ms": (clock_s - waited) * 10,
        "device_ms": device_ms(profiler) / NUM_STEPS,
    }
    return times, table_of(profiler)


def profile_training(model: Any, shape: str, num_tokens: int) -> tuple[dict[str, float], str]:
    config = RunConfig(
        algorithm=AlgorithmConfig(), batch=BatchConfig(global_batch_size=64, max_tokens_per_gpu=num_tokens)
    )
    trainer = LocalTrainer(model, None, config, total_steps=10)
    lengths = [300 + 97 * i % 700 for i in range(64)]
    lengths = [length for i, length in enumerate(lengths) if sum(lengths[: i + 1]) <= num_tokens]
    ids = [torch.randint(1000, 100_000, (100 + length,)).tolist() for length in lengths]
    samples = [
        TrainSample(tokens, length, [1] * length, float(i % 2), float(i % 2), i // 8, i)
        for i, (tokens, length) in enumerate(zip(ids, lengths, strict=True))
    ]
    trainer.train(samples, rollout_id=0, weight_version=0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    outcome = trainer.train(samples, rollout_id=1, weight_version=0)
    torch.cuda.synchronize()
    clock_s = time.perf_counter() - start
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        trainer.train(samples, rollout_id=2, weight_version=0)
        torch.cuda.synchronize()
    flops = training_flops(spec_of(shape), [100 + length for length in lengths], num_head_tokens=sum(lengths))
    times = {
        "clock_ms": clock_s * 1e3,
        "update_ms": outcome.seconds["actor_train"] * 1e3,
        "device_ms": device_ms(profiler),
        "num_tokens": sum(lengths) + 100 * len(lengths),
        "num_micro_batches": outcome.steps[0]["train/num_micro_batches"],
        "tflops": flops / outcome.seconds["actor_train"] / 1e12,
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30,
    }
    return times, table_of(profiler, rows=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--max-tokens", type=int, default=22_000)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    model = random_model(arguments.shape, dtype=torch.bfloat16, device="cuda")
    decode, decode_table = profile_decode(model, arguments.rows, arguments.context)
    training, training_table = profile_training(model, arguments.shape, arguments.max_tokens)
    if arguments.write is not None:
        arguments.write.mkdir(parents=True, exist_ok=True)
        (arguments.write / "decode_step.txt").write_text(decode_table, encoding="utf-8")
        (arguments.write / "training_micro_batch.txt").write_text(training_table, encoding="utf-8")
    result = {"name": f"profile_step_{arguments.shape}", "decode_step": decode, "training_micro_batch": training}
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
