"""Does a model learn to use a tool? The runs of `recipes/retool.py`, one for each seed.

    python benchmarks/retool.py FOLDER [--seeds 2] [--steps 30] [--tool calculator] [--model FOLDER] [--write FOLDER]
        [--device cuda] [--together]

A seed whose run is in FOLDER already is read and not run again. With `--together` all seeds run at the same time, on
one GPU that they share; each writes what it says to `run.log` of its folder. Accuracy is of held-out products, with
Wilson's interval at 95 %.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import record
from miles.observe.metrics import read_records
from miles.report.capture import wilson
from recipes.retool import NUM_HELD_OUT

ENGINE_SHARE = 0.2  # of the GPU's memory, for the engines of seeds that run at the same time


def read_run(folder: Path) -> dict[str, Any]:
    records = read_records(folder / "runs" / "learned" / "metrics.jsonl")
    accuracy = []
    for entry in (one for one in records if one["kind"] == "eval"):
        share = entry["eval/products"]
        low, high = wilson(round(share * NUM_HELD_OUT), NUM_HELD_OUT)
        accuracy.append({"step": entry["step"], "accuracy": share, "low": low, "high": high, "items": NUM_HELD_OUT})
    steps = [entry for entry in records if entry["kind"] == "step"]
    names = ("rollout/raw_reward", "rollout/num_turns", "rollout/tool_token_ratio", "rollout/response_lengths")
    return {"accuracy": accuracy, "curves": {name: [entry[name] for entry in steps] for name in names}}


def run_all(folders: list[Path], arguments: argparse.Namespace) -> None:
    """Run these seeds at the same time; the others are stopped when one fails."""
    running = []
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        seed = folder.name.removeprefix("seed_")
        command = [sys.executable, "recipes/retool.py", folder, "--seed", seed, "--steps", arguments.steps]
        command += ["--tool", arguments.tool, *(("--model", arguments.model) if arguments.model else ())]
        command += ["--device", arguments.device]
        if arguments.together:
            command += ["--share", ENGINE_SHARE / arguments.seeds]
        with open(folder / "run.log", "w") as log:
            out = log if arguments.together else None
            command = list(map(str, command))
            running.append(subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True))
    try:
        while any(process.poll() is None for process in running):
            check(running, folders)
            time.sleep(0.2)
        check(running, folders)
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # with the run of `miles train` that it waits for


def check(running: list[subprocess.Popen], folders: list[Path]) -> None:
    for process, folder in zip(running, folders, strict=True):
        if process.returncode:
            raise SystemExit(f"{folder} ended with {process.returncode}:\n{(folder / 'run.log').read_text()[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tool", default="calculator")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--together", action="store_true", help="run the seeds at the same time")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error("--seeds must be at least 1")
    start, runs = time.perf_counter(), {}
    folders = [arguments.folder / f"seed_{seed}" for seed in range(arguments.seeds)]
    waves = [folders] if arguments.together else [[folder] for folder in folders]
    for wave in waves:
        run_all([folder for folder in wave if not (folder / "learned").is_dir()], arguments)
    for seed, folder in enumerate(folders):
        runs[f"seed_{seed}"] = read_run(folder)
        for name, values in runs[f"seed_{seed}"]["curves"].items():
            print(f"seed {seed} {name}: {values[0]:.3f} -> {values[-1]:.3f}")
    result = {
        "name": "retool_" + (arguments.model.name if arguments.model else "tiny"),
        "seconds": time.perf_counter() - start,
        "tool": arguments.tool,
        "runs": runs,
        "peers": {},
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
