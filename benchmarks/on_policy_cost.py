"""Seconds of a whole GRPO step in each mode of numerics, and the largest gap of a log-prob, in one run.

    python benchmarks/on_policy_cost.py [--shape 0.6b] [--repetitions 3] [--device cuda] [--write FOLDER]

The step is that of `grpo_step.py`: the recipe's 32 prompts x 8 answers of fixed lengths. Modes take turns, so that all
see the same machine; each has the same start weights, a model, an engine and a trainer of its own, one after the other
in memory. The first step of each warms up. On a CPU: `--shape tiny --share 0.02 --device cpu`.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.grpo_step import PHASES, one_step
from benchmarks.machine import record
from benchmarks.recipe import random_model
from miles.config.flags import with_values
from miles.config.sections import RunConfig
from miles.engine.local import LocalEngine
from miles.trainer.trainer import LocalTrainer

MODES: dict[str, dict[str, bool]] = {
    "fast": {},
    "deterministic": {"deterministic_mode": True, "engine_enable_deterministic_inference": True},
    "true_on_policy": {
        "deterministic_mode": True, "engine_enable_deterministic_inference": True, "true_on_policy_mode": True,
    },
}  # fmt: skip
GOAL_SECONDS, GOAL_RATIO = 8.4, 1.25


def steps_of(mode: str, arguments: argparse.Namespace) -> list[dict[str, float]]:
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    recipe = {"eps_clip_high": 0.28, "lr": 1e-6, "weight_decay": 0.1, "adam_beta2": 0.98, "global_batch_size": 256}
    cache = {"engine_max_total_tokens": arguments.cache_tokens, "max_tokens_per_gpu": arguments.max_tokens}
    config = with_values(RunConfig(), {**recipe, **cache, **MODES[mode]})
    model = random_model(arguments.shape, dtype=dtype, device=arguments.device)
    trainer = LocalTrainer(model, None, config, total_steps=arguments.repetitions + 1)
    engine = LocalEngine(model, None, config.engine, device=arguments.device)
    steps = [one_step(engine, trainer, number, arguments.share) for number in range(arguments.repetitions + 1)]
    engine.close()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="turns of each mode")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--share", type=float, default=1.0, help="shorten every answer, to try the script out")
    parser.add_argument("--max-tokens", type=int, help="--max-tokens-per-gpu")
    parser.add_argument("--cache-tokens", type=int, default=400_000, help="--engine-max-total-tokens")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    steps: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(arguments.rounds):
        for mode, done in steps.items():
            new = steps_of(mode, arguments)[1:]
            done.extend(new)
            gc.collect()
            torch.cuda.empty_cache()
            for step in new:
                print(f"{mode}: " + "  ".join(f"{name} {value:.4g}" for name, value in step.items()), flush=True)
    modes: dict[str, dict[str, Any]] = {
        mode: {
            "seconds": median(step["seconds"] for step in done),
            "phases": {name: median(step[name] for step in done) for name in PHASES},
            "mean_gap": max(step["gap"] for step in done),
            "max_gap": max(step["max_gap"] for step in done),
        }
        for mode, done in steps.items()
    }
    seconds = {mode: found["seconds"] for mode, found in modes.items()}
    result = {
        "name": f"on_policy_cost_{arguments.shape}",
        "seconds": seconds["true_on_policy"],
        "limit_seconds": seconds["fast"],
        "share_of_limit": seconds["fast"] / seconds["true_on_policy"],
        "true_on_policy_over_fast": seconds["true_on_policy"] / seconds["fast"],
        "deterministic_over_fast": seconds["deterministic"] / seconds["fast"],
        "max_gap": modes["true_on_policy"]["max_gap"],
        "goal": {"seconds": GOAL_SECONDS, "true_on_policy_over_fast": GOAL_RATIO, "max_gap": 0.0},
        "modes": modes,
        "peers": {},
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if arguments.device == "cuda" else None,
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
