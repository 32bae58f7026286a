"""`miles quickstart`: train the embedded tiny model on the embedded task and show what it learned."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from miles.cli.train import start
from miles.config.parse import parse_train
from miles.config.sections import RunConfig
from miles.errors import StorageError
from miles.quickstart.show import Outcome, read_outcome, show
from miles.quickstart.task import write_task

MODEL = Path(__file__).parents[1] / "quickstart" / "model"
NUM_HELD_OUT = 256
NUM_ROLLOUT = 40


def run(argv: list[str]) -> int:
    started = time.monotonic()
    own, flags = _own_parser().parse_known_args(argv)
    if own.help:
        _own_parser().print_help()
        return 0
    training, held_out = _write_data(Path(own.runs_dir))
    if own.json is not None:
        _check_writable(Path(own.json))
    preset = _preset(training, held_out, seed=own.seed, runs_dir=Path(own.runs_dir))
    parsed = parse_train(flags, command="quickstart", preset=preset, preset_name="quickstart")
    # With its name, the command resumes this run instead of starting another.
    exit_code = start(parsed, command=["miles", "quickstart", *argv, "--run-name", _folder(parsed.config).name])
    if exit_code or parsed.explain:
        return exit_code
    folder = _folder(parsed.config)
    outcome = read_outcome(folder, seconds=time.monotonic() - started, seed=own.seed)
    show(outcome, folder, Console())
    if own.json is not None:
        _write_json(Path(own.json), outcome)
    return 0


def _own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miles quickstart",
        description="Train a tiny model with GRPO on this machine in under three minutes. Every flag of `miles train` "
        "is accepted too and wins over the quickstart's own setting, for example --rm-type random or --lr 0.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--help", "-h", action="store_true", help="show this text")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default 0)")
    parser.add_argument("--json", metavar="FILE", help="also write the outcome and the held-out answers as JSON")
    parser.add_argument("--runs-dir", default="runs", help="folder that holds the run folders (default runs)")
    return parser


def _write_data(runs_dir: Path) -> tuple[Path, Path]:
    data = runs_dir / "quickstart-data"
    try:
        data.mkdir(parents=True, exist_ok=True)
        return write_task(data, num_held_out=NUM_HELD_OUT)
    except OSError as error:
        raise StorageError(
            f"--runs-dir {runs_dir}: cannot write {data}: {error.strerror}; make room or get the rights there, or "
            "choose another folder"
        ) from error


def _check_writable(path: Path) -> None:
    """The outcome is written when the run has ended: too late to find out that it cannot be."""
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise StorageError(f"--json {path}: cannot be written: {error.strerror}; choose another file") from error


def _free_name(runs_dir: Path) -> str:
    """A run folder that does not exist yet: every quickstart is a new run."""
    names = ("quickstart" if number == 1 else f"quickstart-{number}" for number in itertools.count(1))
    return next(name for name in names if not (runs_dir / name).exists())


def _preset(training: Path, held_out: Path, *, seed: int, runs_dir: Path) -> list[str]:
    """The calibrated setting: 16 prompts of 8 answers, 40 steps, clip 0.2/0.28, token mean, no KL."""
    settings = {
        "--hf-checkpoint": MODEL,
        "--prompt-data": training,
        "--input-key": "question",
        "--label-key": "answer",
        "--rm-type": "math",
        "--num-rollout": NUM_ROLLOUT,
        "--rollout-batch-size": 16,
        "--n-samples-per-prompt": 8,
        "--rollout-max-response-len": 28,
        "--lr": 2e-4,
        "--min-lr": 1e-5,
        "--lr-decay-style": "linear",
        "--lr-warmup-iters": 5,
        "--adam-beta2": 0.99,
        "--eps-clip-high": 0.28,
        "--eval-interval": 10,
        "--eval-temperature": 0,
        "--seed": seed,
        "--rollout-seed": seed,
        "--runs-dir": runs_dir,
        "--run-name": _free_name(runs_dir),
        "--device": "cpu",
    }
    flags = [token for flag, value in settings.items() for token in (flag, str(value))]
    switches = ["--apply-chat-template", "--rollout-shuffle", "--calculate-per-token-loss"]
    return [*flags, *switches, "--eval-prompt-data", "held_out", str(held_out)]


def _folder(config: RunConfig) -> Path:
    assert config.run_dir.run_name is not None, "resolve.py sets run_name"
    return Path(config.run_dir.runs_dir) / config.run_dir.run_name


def _write_json(path: Path, outcome: Outcome) -> None:
    path.write_text(json.dumps(outcome.as_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"outcome written to {path}", file=sys.stderr)
