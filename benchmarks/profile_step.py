"""Where the time of a decode step and of a training micro-batch goes on a GPU, kernel by kernel.

    python benchmarks/profile_step.py [--shape 0.6b] [--rows 256] [--context 600] [--answers 8] [--write FOLDER]

With `--answers` above 1, so many rows have a prompt of `--prompt` tokens in common; the rest of the context is
theirs. Writes a table of each and one JSON line: milliseconds of each step by the
clock and of host work, and of the device.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import record
from benchmarks.recipe import random_model, spec_of
from miles.config.sections import AlgorithmConfig, BatchConfig, EngineConfig, RunConfig
from miles.engine import sampler
from miles.engine.core import EngineCore
from miles.model.flops import forward_flops
from miles.observe.gpu import synchronize
from miles.trainer.trainer import LocalTrainer
from miles.types import GenerationRequest, SamplingParams, TrainSample

NUM_STEPS, NUM_TIMED = 20, 100  # with and without the profiler
PARTS = {  # by what the names of kernels say; the first that fits
    "attention": "attend|attention|_merge_kernel|flash",
    "drawing": "_race|_finish|sampl",
    "matrix products": "nvjet|gemm|gemv|cutlass|cublas|splitk",
    "norms, rope, cache writes, activation": "norm|rope|silu|store",
    "copies": "memcpy|memset|copy",
}


def table_of(profiler: Any, *, rows: int = 25) -> str:
    return profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=rows, max_name_column_width=70)


def device_ms(profiler: Any) -> float:
    return sum(seconds for _, seconds in kernel_seconds(profiler)) * 1e3


def kernel_seconds(profiler: Any) -> list[tuple[str, float]]:
    """What ran on the device; the operators that launched it, which have its time too, are left out."""
    events = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
    return [(event.key, event.self_device_time_total / 1e6) for event in events]


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to, by its name; the name itself when no part is known."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, kernel, re.IGNORECASE)), kernel[:60])


@contextmanager
def timed_waits(times: dict[str, float]) -> Iterator[None]:
    """Add the seconds that the engine's host waits for the device to `times["waited"]`."""
    wait = sampler.OnTheWay.wait

    def timed_wait(self: sampler.OnTheWay) -> sampler.Drawn:
        start = time.perf_counter()
        drawn = wait(self)
        times["waited"] = times.get("waited", 0.0) + time.perf_counter() - start
        return drawn

    sampler.OnTheWay.wait = timed_wait
    try:
        yield
    finally:
        sampler.OnTheWay.wait = wait


def rollout_parts(
    model: Any, runs: list[list[GenerationRequest]], *, every: int = 64, window: int = 4
) -> dict[str, Any]:
    """Seconds of the device per part of a whole rollout, and of the host's work, which happens meanwhile.

    The first run captures the graphs. Of the second the first 16 steps are profiled, then `window` steps of `every`,
    which stand for all of them.
    """
    device = model.head_weight.device
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    needed = max(sum(len(one.prompt_ids) + one.sampling.max_new_tokens + 32 for one in run) for run in runs)
    core = EngineCore(model, tokenizer=None, config=EngineConfig(engine_max_total_tokens=needed), device=device)
    core.add(runs[0])
    while core.has_work:
        core.step()
    core.add(runs[1])
    seconds: dict[str, float] = defaultdict(float)
    num_steps, num_timed, timed, waits = 0, 0, 0.0, {"waited": 0.0}
    with timed_waits(waits):
        while core.has_work:
            size, weight = (16, 1.0) if num_steps == 0 else (window, every / window)
            if num_steps == 0 or num_steps % every == 0:
                with profile(activities=[activity]) as profiler:
                    num_steps += steps(core, size)
                    synchronize(device)
                for kernel, spent in kernel_seconds(profiler):
                    seconds[part_of(kernel)] += spent * weight
            else:
                before, start = waits["waited"], time.perf_counter()
                done = steps(core, every - num_steps % every)
                timed += time.perf_counter() - start - (waits["waited"] - before)
                num_timed += done
                num_steps += done
    small = {part: spent for part, spent in seconds.items() if part not in PARTS}
    known = {part: seconds[part] for part in PARTS if part in seconds}
    return {
        **known,
        "other": sum(small.values()),
        "largest_others": dict(sorted(small.items(), key=lambda item: -item[1])[:4]),
        "host_work": timed / max(num_timed, 1) * num_steps,
        "engine_steps": num_steps,
    }


def steps(core: EngineCore, most: int) -> int:
    """Up to so many engine steps; how many there were."""
    done = 0
    while done < most and core.has_work:
        core.step()
        done += 1
    return done


def profile_decode(model: Any, rows: int, context: int, answers: int, num_prompt: int) -> tuple[dict[str, Any], str]:
    config = EngineConfig(engine_max_total_tokens=rows * (context + 400), engine_max_running_requests=rows)
    core = EngineCore(model, tokenizer=None, config=config, device=torch.device("cuda"))
    if answers == 1:
        num_prompt = context
    ids = torch.randint(1000, 100_000, (-(-rows // answers), num_prompt)).repeat_interleave(answers, 0)[:rows].tolist()
    sampling = SamplingParams(max_new_tokens=context - num_prompt + 350, ignore_eos=True)
    core.add(GenerationRequest(i, prompt, sampling, i) for i, prompt in enumerate(ids))
    while core.table.waits.any() or core.scheduler.waiting or (core.table.length[:rows] < context + 20).any():
        core.step()
    torch.cuda.synchronize()
    clock_ms, host_ms, waits = [], [], {"waited": 0.0}
    with timed_waits(waits):
        torch.cuda.synchronize()
        for step in range(NUM_TIMED):  # the host waits for the step before, so it keeps the time of the device
            start, before = time.perf_counter(), waits["waited"]
            core.step()
            if step == NUM_TIMED - 1:
                torch.cuda.synchronize()
            spent = time.perf_counter() - start
            clock_ms.append(round(spent * 1e3, 4))
            host_ms.append(round((spent - waits["waited"] + before) * 1e3, 4))
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        steps(core, NUM_STEPS)
        torch.cuda.synchronize()
    times = {
        "clock_ms": clock_ms,
        "mean_clock_ms": fmean(clock_ms),
        "host_ms": host_ms,
        "mean_host_ms": fmean(host_ms),
        "device_ms": device_ms(profiler) / NUM_STEPS,
    }
    return times, table_of(profiler)


def profile_training(model: Any, shape: str, num_tokens: int) -> tuple[dict[str, Any], str]:
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
    clock_ms, update_ms = [], []
    for step in range(1, 6):
        start = time.perf_counter()
        outcome = trainer.train(samples, rollout_id=step, weight_version=0)
        torch.cuda.synchronize()
        clock_ms.append((time.perf_counter() - start) * 1e3)
        update_ms.append(outcome.seconds["actor_train"] * 1e3)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        trainer.train(samples, rollout_id=6, weight_version=0)
        torch.cuda.synchronize()
    flops = 3 * forward_flops(spec_of(shape), [100 + length for length in lengths], num_head_tokens=sum(lengths))
    times = {
        "clock_ms": clock_ms,
        "median_clock_ms": median(clock_ms),
        "update_ms": update_ms,
        "median_update_ms": median(update_ms),
        "device_ms": device_ms(profiler),
        "num_tokens": sum(lengths) + 100 * len(lengths),
        "num_micro_batches": outcome.steps[0]["train/num_micro_batches"],
        "tflops": flops / median(update_ms) / 1e9,
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30,
    }
    return times, table_of(profiler, rows=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--answers", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--decode-only", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=22_000)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    model = random_model(arguments.shape, dtype=torch.bfloat16, device="cuda")
    decode, decode_table = profile_decode(model, arguments.rows, arguments.context, arguments.answers, arguments.prompt)
    if arguments.decode_only:
        print(decode_table, decode)
        return
    training, training_table = profile_training(model, arguments.shape, arguments.max_tokens)
    if arguments.write is not None:
        arguments.write.mkdir(parents=True, exist_ok=True)
        (arguments.write / "decode_step.txt").write_text(decode_table, encoding="utf-8")
        (arguments.write / "training_micro_batch.txt").write_text(training_table, encoding="utf-8")
    result = {"name": f"profile_step_{arguments.shape}", "decode_step": decode, "training_micro_batch": training}
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
