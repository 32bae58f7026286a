"""Does a real model learn? Two seeds and a control whose reward is random, trained at the same time on one GPU.

    python benchmarks/learning.py MODEL TRAIN.jsonl HELD_OUT.jsonl [--also NAME=FILE] [--steps 60] [--modes MODE ...]

Each run is `miles train` as a user starts it: 16 prompts x 8 answers of up to 300 tokens, GRPO, one optimizer step a
rollout, evaluation on all held-out items (and `--also` sets) before, between and after. These answers are graded here
from the saved samples, by the last number, so the control is judged like the others. Intervals are Wilson's at 95 %.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import record
from miles.observe.metrics import read_records
from miles.observe.samples import read_samples
from miles.report.capture import wilson
from miles.report.svg import Line, line_chart
from recipes.last_number import last_number

MODES = {"fast": [], "deterministic": ["--deterministic-mode"], "true_on_policy": ["--true-on-policy-mode"]}
LEARNS = ["--custom-rm-path", "recipes.last_number.reward"]
KNOWS_NOTHING = ["--rm-type", "random"]
HUES = ("blue", "violet", "green", "amber", "teal", "rose", "grey")
COLOURS = ("#2b62c4", "#7650c8", "#23845a", "#b97a06", "#0e8388", "#cb3157", "#79828f")
GAP = "train/train_rollout_logprob_abs_diff"
CURVES = (
    "rollout/raw_reward",
    "rollout/response_lengths",
    "rollout/truncated",
    "train/entropy_loss",
    "train/grad_norm",
    GAP,
    f"{GAP}_max",
    "perf/step_time",
    "perf/rollout_time",
    "perf/actor_train_time",
)


def command(arguments: argparse.Namespace, runs: Path, name: str, seed: int, reward: list[str]) -> list[str]:
    sets = ["held_out", str(arguments.held_out)]
    for entry in arguments.also:
        sets += entry.split("=", 1)
    settings = {
        "--hf-checkpoint": arguments.model,
        "--prompt-data": arguments.train,
        "--input-key": "question",
        "--label-key": "answer",
        "--num-rollout": arguments.steps,
        "--rollout-batch-size": 16,
        "--n-samples-per-prompt": 8,
        "--rollout-max-response-len": 300,
        "--lr": arguments.lr,
        "--lr-warmup-iters": 5,
        "--eps-clip-high": 0.28,
        "--eval-interval": arguments.eval_interval,
        "--eval-temperature": 0,
        "--seed": seed,
        "--rollout-seed": seed,
        "--runs-dir": runs,
        "--run-name": name,
        "--device": arguments.device,
        "--engine-max-total-tokens": 200_000,
        "--progress": "plain",
    }
    flags = [token for flag, value in settings.items() for token in (flag, str(value))]
    switches = ["--apply-chat-template", "--rollout-shuffle", "--calculate-per-token-loss"]
    return [sys.executable, "-m", "miles", "train", *flags, *switches, *reward, "--eval-prompt-data", *sets]


def read_run(folder: Path) -> dict[str, Any]:
    records = read_records(folder / "metrics.jsonl")
    steps = [entry for entry in records if entry["kind"] == "step"]
    evaluated = [entry["step"] for entry in records if entry["kind"] == "eval"]
    accuracy: dict[str, list[dict[str, Any]]] = {}
    for step in evaluated:
        rows = read_samples(folder / "samples" / f"eval_{step}.parquet")
        for name in sorted({row["set"] for row in rows}):
            right = [last_number(row["response"]) == last_number(row["label"]) for row in rows if row["set"] == name]
            low, high = wilson(sum(right), len(right))
            point = {"step": step, "accuracy": sum(right) / len(right), "low": low, "high": high, "items": len(right)}
            accuracy.setdefault(name, []).append(point)
    return {"accuracy": accuracy, "curves": {name: [entry[name] for entry in steps] for name in CURVES}}


def plot(path: Path, outcomes: dict[str, dict[str, Any]]) -> None:
    """Reward and largest gap of every run by step, as one SVG picture."""
    parts = []
    for place, name in enumerate(("rollout/raw_reward", f"{GAP}_max")):
        lines = [
            Line(run, list(enumerate(outcome["curves"][name])), HUES[number % len(HUES)], smooth="reward" in name)
            for number, (run, outcome) in enumerate(outcomes.items())
        ]
        chart = re.sub(r' data-chart="[^"]*"', "", line_chart(lines, title=name, width=760, height=240))
        top = 40 + 270 * place
        parts += [f'<text x="46" y="{top - 6}">{name}</text>', chart.replace("<svg", f'<svg y="{top}" height="240"', 1)]
    for number, run in enumerate(outcomes):
        parts.append(f'<text x="{46 + 180 * number}" y="14" style="fill:{COLOURS[number % len(HUES)]}">{run}</text>')
    style = "text{font:12px sans-serif;fill:#555}path{fill:none;stroke-width:1.6}.faint{opacity:.2}line{stroke:#ddd}"
    style += "".join(f".s-{hue}{{stroke:{colour}}}" for hue, colour in zip(HUES, COLOURS, strict=True))
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="560"><style>{style}</style>'
    path.write_text(f'{picture}<rect width="760" height="560" fill="#fff"/>{"".join(parts)}</svg>\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-interval", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, help="every seed in each of these, and no control")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plot", type=Path, help="SVG picture of reward and gap by step")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch)
        plans = {f"seed_{seed}": (seed, LEARNS) for seed in range(arguments.seeds)}
        plans["random_reward"] = (0, KNOWS_NOTHING)
        if arguments.modes:
            seeds = range(arguments.seeds)
            plans = {f"{mode}_seed_{n}": (n, [*LEARNS, *MODES[mode]]) for mode in arguments.modes for n in seeds}
        start = time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
        started = {
            name: subprocess.Popen(command(arguments, runs, name, seed, reward), env=environment)
            for name, (seed, reward) in plans.items()
        }
        failed = [name for name, process in started.items() if process.wait() != 0]
        seconds = time.perf_counter() - start
        assert not failed, f"these runs failed: {failed}"
        outcomes = {name: read_run(runs / name) for name in started}
    for name, outcome in outcomes.items():
        for evaluated, points in outcome["accuracy"].items():
            shown = [f"{p['step']}: {p['accuracy']:.3f} [{p['low']:.3f}, {p['high']:.3f}]" for p in points]
            print(f"{name} on {evaluated}: {'  '.join(shown)}")
    if arguments.plot is not None:
        plot(arguments.plot, outcomes)
    result = {
        "name": f"learning_{arguments.train.stem}" + ("_modes" if arguments.modes else ""),
        "seconds": seconds,
        "model": arguments.model.name,
        "steps": arguments.steps,
        "lr": arguments.lr,
        "runs": outcomes,
        "peers": {},
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
