"""Does a model learn as well with each option that saves memory of the trainer?

    python benchmarks/memory_options.py MODEL TRAIN.jsonl HELD_OUT.jsonl [--steps 100] [--write FOLDER]

Runs of `miles train` as in `learning.py`: several seeds without an option, and one with each. The mean reward over all
steps, and the accuracy on the held-out items at the end, must lie where one more seed without an option would lie with
a probability of 95 percent (Student's prediction interval from the seeds).
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.learning import LEARNS, command, read_run
from benchmarks.machine import record
from miles.observe.metrics import read_records

OPTIONS = {
    "selective": ["--recompute-granularity", "selective"],
    "recompute": ["--recompute-granularity", "full"],
    "adam_bfloat16": ["--adam-state", "bfloat16"],
    "adam_8bit": ["--adam-state", "8bit"],
    "moments_on_host": ["--optimizer-cpu-offload"],
    "offload_train": ["--offload-train", "--offload-rollout"],
}
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}  # Student's t by degrees of freedom


def interval(values: list[float]) -> tuple[float, float]:
    """Where one more value of the same kind lies with a probability of 95 percent."""
    half = T_975[len(values) - 1] * stdev(values) * math.sqrt(1 + 1 / len(values))
    return fmean(values) - half, fmean(values) + half


def numbers(folder: Path) -> dict[str, Any]:
    outcome = read_run(folder)
    rewards = outcome["curves"]["rollout/raw_reward"]
    steps = [entry for entry in read_records(folder / "metrics.jsonl") if entry["kind"] == "step"]
    return {
        "reward": fmean(rewards),
        "accuracy": outcome["accuracy"]["held_out"][-1]["accuracy"],
        "rewards": rewards,
        "step_seconds": fmean(step["perf/step_time"] for step in steps[1:] or steps),
        "train_seconds": fmean(step["perf/actor_train_time"] for step in steps[1:] or steps),
        "peak_gb": max(step.get("perf/peak_memory_gb", 0.0) for step in steps),
        "offloaded_gb": steps[-1]["perf/offloaded_gb"],
    }


def run_all(arguments: argparse.Namespace, plans: dict[str, tuple[int, list[str]]]) -> dict[str, dict[str, Any]]:
    """Outcome of each plan, a seed and flags; several at one time."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    limit = ["--max-tokens-per-gpu", str(arguments.max_tokens)]  # they share the device
    waiting, running, outcomes = dict(plans), {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < arguments.at_once:
                name = next(iter(waiting))
                seed, flags = waiting.pop(name)
                line = [*command(arguments, Path(scratch), name, seed, LEARNS), *limit, *flags]
                running[name] = subprocess.Popen(line, env=environment)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                assert running.pop(name).returncode == 0, f"{name} failed"
                outcomes[name] = numbers(Path(scratch) / name)
            time.sleep(0.2)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=4, choices=range(2, 7))
    parser.add_argument("--options", nargs="*", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    arguments.eval_interval, arguments.also = arguments.steps, []
    start = time.perf_counter()
    plans: dict[str, tuple[int, list[str]]] = {f"seed_{seed}": (seed, []) for seed in range(arguments.seeds)}
    plans |= {name: (0, OPTIONS[name]) for name in arguments.options}
    outcomes = run_all(arguments, plans)
    baseline = [outcomes[name] for name in outcomes if name.startswith("seed_")]
    spreads = {name: interval([outcome[name] for outcome in baseline]) for name in ("reward", "accuracy")}
    for name in arguments.options:
        inside = {key: low <= outcomes[name][key] <= high for key, (low, high) in spreads.items()}
        outcomes[name] |= {
            "inside": inside,
            "same_as_seed_0": outcomes[name]["rewards"] == outcomes["seed_0"]["rewards"],
        }
    result = {
        "name": "memory_options",
        "seconds": time.perf_counter() - start,
        "model": arguments.model.name,
        "steps": arguments.steps,
        "lr": arguments.lr,
        "spreads": spreads,
        "all_inside": all(all(outcomes[name]["inside"].values()) for name in arguments.options),
        "runs": outcomes,
        "peers": {},
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
