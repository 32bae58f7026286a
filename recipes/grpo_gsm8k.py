"""GRPO on GSM8K on one GPU: fetch model and data, build the command, run it.

    MILES_NUM_ROLLOUT=12 MILES_RUN=plain python recipes/grpo_gsm8k.py

Settings come from the environment:

    MILES_NUM_ROLLOUT     steps of the loop (12)
    MILES_RUN             name of the run folder below runs/ (plain)
    MILES_SEED            seed of the trainer and of the rollout (their defaults)
    MILES_MODEL           a Qwen model name that is downloaded, or a model folder (Qwen3-0.6B)
    MILES_EXTRA_ARGS      more flags; they win over the flags below
    MILES_TRUE_ON_POLICY  1: gap of exactly zero; its flags win over MILES_EXTRA_ARGS
    MILES_SGLANG_ATTENTION, MILES_FSDP_ATTENTION  attention backends, in true on-policy mode only
    MILES_LAB             folder of models/, datasets/ and runs/ (the current folder)

`--print` shows the command and stops.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from miles.observe.environment import hide_secrets

DATASET = "zhuzilin/gsm8k"


def build_command(environment: Mapping[str, str], *, model: Path, data: Path, runs: Path) -> list[str]:
    """The full `miles train` command for these settings. Raises `ValueError` for a value that cannot be used."""
    num_rollout = environment.get("MILES_NUM_ROLLOUT", "12")
    if not num_rollout.isdigit() or int(num_rollout) < 1:
        raise ValueError(f"MILES_NUM_ROLLOUT must be a whole number of at least 1, not {num_rollout!r}")
    run_name = environment.get("MILES_RUN", "plain")
    command = ["miles", "train", *_model_and_data(model, data), *_recipe(num_rollout), *_one_gpu()]
    command += ["--runs-dir", str(runs), "--run-name", run_name]
    if seed := environment.get("MILES_SEED"):
        command += ["--seed", seed, "--rollout-seed", seed]
    command += shlex.split(environment.get("MILES_EXTRA_ARGS", ""))
    if environment.get("MILES_TRUE_ON_POLICY", "0") == "1":
        command += _true_on_policy(environment)
    return command


def _model_and_data(model: Path, data: Path) -> list[str]:
    return [
        "--hf-checkpoint", str(model),
        "--prompt-data", str(data / "train.parquet"),
        "--input-key", "messages",
        "--label-key", "label",
        "--apply-chat-template",
        "--rollout-shuffle",
    ]  # fmt: skip


def _recipe(num_rollout: str) -> list[str]:
    return [
        "--rm-type", "math",
        "--num-rollout", num_rollout,
        "--rollout-batch-size", "32",
        "--n-samples-per-prompt", "8",
        "--global-batch-size", "256",
        "--rollout-max-response-len", "1024",
        "--rollout-temperature", "1",
        "--advantage-estimator", "grpo",
        "--entropy-coef", "0.0",
        "--kl-coef", "0.0",
        "--eps-clip", "0.2",
        "--eps-clip-high", "0.28",
        "--optimizer", "adam",
        "--lr", "1e-6",
        "--lr-decay-style", "constant",
        "--weight-decay", "0.1",
        "--adam-beta1", "0.9",
        "--adam-beta2", "0.98",
    ]  # fmt: skip


def _one_gpu() -> list[str]:
    return [
        "--colocate",
        "--train-backend", "fsdp",
        "--actor-num-nodes", "1",
        "--actor-num-gpus-per-node", "1",
        "--num-gpus-per-node", "1",
        "--rollout-num-gpus-per-engine", "1",
        "--sglang-mem-fraction-static", "0.4",
        "--use-dynamic-batch-size",
        "--max-tokens-per-gpu", "9216",
        "--balance-data",
        "--update-weight-buffer-size", "536870912",
        "--update-weights-interval", "1",
    ]  # fmt: skip


def _true_on_policy(environment: Mapping[str, str]) -> list[str]:
    return [
        "--sglang-enable-deterministic-inference",
        "--sglang-attention-backend", environment.get("MILES_SGLANG_ATTENTION", "fa3"),
        "--attn-implementation", environment.get("MILES_FSDP_ATTENTION", "flash_attention_3"),
        "--deterministic-mode",
        "--true-on-policy-mode",
        "--recompute-logprobs-via-prefill",
    ]  # fmt: skip


def fetch(kind: str, repository: str, target: Path) -> Path:
    """Download a model or dataset into `target` unless it is there. Exits with one sentence when that fails."""
    if target.is_dir() and any(target.iterdir()):
        return target
    try:
        snapshot_download(repository, repo_type=kind, local_dir=target)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        sys.exit(f"cannot download the {kind} {repository} ({reason}); go online once, or put it into {target}")
    return target


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", dest="only_print", help="show the command and stop")
    only_print = parser.parse_args(arguments).only_print  # any other flag is an error: it belongs into MILES_EXTRA_ARGS
    lab = Path(os.environ.get("MILES_LAB", "."))
    name = os.environ.get("MILES_MODEL", "Qwen3-0.6B")
    model = Path(name) if Path(name).is_dir() else lab / "models" / name
    data = lab / "datasets" / "gsm8k"
    if not only_print:
        fetch("model", f"Qwen/{name}", model)
        fetch("dataset", DATASET, data)
    try:
        command = build_command(os.environ, model=model, data=data, runs=lab / "runs")
    except ValueError as error:
        sys.exit(str(error))
    print(f"EXEC: {hide_secrets(command)}", flush=True)
    return 0 if only_print else subprocess.call([sys.executable, "-m", *command])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
