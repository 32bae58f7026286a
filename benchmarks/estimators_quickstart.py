"""Each estimator, objective, correction and penalty trains the quickstart task, with two seeds.

    python benchmarks/estimators_quickstart.py [--seeds 2] [--parallel 2] [--only grpo ppo] [--write FOLDER]

Runs `miles quickstart` as a user does, with the flags of one setting, and ends with one JSON line. A setting has
learned when held-out accuracy goes from under 0.4 to above 0.9. Objectives make two optimizer steps per rollout, so
that their ratio is not always 1. The distillation settings have a random reward, which alone teaches nothing, and the
model of a GRPO run as teacher. `soak` is a learning rate of 0 for 200 steps: the gap between engine and trainer must
stay flat.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import record

PER_ANSWER = "--no-calculate-per-token-loss"
TWO_STEPS = "--num-steps-per-rollout 2"
DISTIL = "--rm-type random --use-opd --opd-teacher-load TEACHER"
GAP = "train/train_rollout_logprob_abs_diff"
SETTINGS = {
    "grpo": "",
    "grpo per answer": PER_ANSWER,
    "gspo": f"--advantage-estimator gspo {PER_ANSWER} {TWO_STEPS} --eps-clip 3e-4 --eps-clip-high 4e-4 --lr 4e-4",
    "dr_grpo": f"--advantage-estimator dr_grpo {PER_ANSWER}",
    "rloo": "--advantage-estimator rloo",
    "max_rl": "--advantage-estimator max_rl",
    "reinforce_plus_plus": "--advantage-estimator reinforce_plus_plus --normalize-advantages",
    "reinforce_plus_plus_baseline": "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
    "ppo": "--advantage-estimator ppo --normalize-advantages --critic-lr 1e-3 --num-critic-only-steps 2 --lambd 0.95",
    "cispo": f"--policy-objective cispo {TWO_STEPS}",
    "sapo": f"--policy-objective sapo {TWO_STEPS}",
    "dual clip": f"--eps-clip-c 3 {TWO_STEPS}",
    "kl in the loss": "--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k3 --use-unbiased-kl",
    "kl in the reward": "--kl-coef 0.001 --kl-loss-type k1",
    "entropy bonus": "--entropy-coef 0.001",
    "overlong penalty": "--overlong-buffer-len 4",
    "opd drawn token": DISTIL,
    "opd top-k": f"{DISTIL} --opd-log-prob-top-k 8",
    "tis": f"--use-tis {TWO_STEPS}",
    "sequence_tis": f"--off-policy-correction sequence_tis {TWO_STEPS}",
    "icepop": f"--off-policy-correction icepop {TWO_STEPS}",
    "masked_is": f"--off-policy-correction masked_is {TWO_STEPS}",
    "sequence_masked_is": f"--off-policy-correction sequence_masked_is {TWO_STEPS}",
    "geometric": f"--off-policy-correction geometric {TWO_STEPS}",
    "decoupled": f"--off-policy-correction decoupled {TWO_STEPS}",
    "opsm and veto": f"--use-opsm --veto-threshold 1e-4 --use-tis {TWO_STEPS}",
    "score centering": "--use-score-centering --score-centering-top-k 16",
    "bypass": f"--use-rollout-logprobs {TWO_STEPS}",
    "sampling replay": "--rollout-top-p 0.95 --rollout-top-k 20",
}
SOAK = "--lr 0 --num-rollout 200 --eval-interval 100"


def quickstart(flags: str, *, seed: int, teacher: Path | None = None) -> dict[str, Any]:
    """Outcome of one run, and the largest mean gap between engine and trainer in its first and last tenth."""
    with tempfile.TemporaryDirectory() as scratch:
        outcome = Path(scratch) / "outcome.json"
        command = [sys.executable, "-m", "miles", "quickstart", "--runs-dir", scratch, "--json", str(outcome)]
        command += ["--seed", str(seed), *flags.replace("TEACHER", str(teacher)).split()]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            return {"seed": seed, "failed": done.stderr[-500:]}
        result = json.loads(outcome.read_text())
        lines = next(Path(scratch).glob("*/metrics.jsonl")).read_text().splitlines()
        records = [json.loads(line) for line in lines]
        gaps = [values[GAP] for values in records if GAP in values]
    tenth = max(len(gaps) // 10, 1)
    return {
        "seed": seed,
        "before": result["held_out_before"],
        "after": result["held_out_after"],
        "seconds": result["seconds"],
        "gap_first": max(gaps[:tenth]),
        "gap_last": max(gaps[-tenth:]),
    }


def train_teacher(folder: Path) -> Path:
    target = folder / "teacher"
    command = [sys.executable, "-m", "miles", "quickstart", "--runs-dir", str(folder), "--save-hf", str(target)]
    subprocess.run([*command, "--seed", "100"], stdout=subprocess.DEVNULL, check=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=[*SETTINGS, "soak"])
    parser.add_argument("--merge", type=Path, help="result of an earlier run, for the settings that are not run now")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    wanted = arguments.only or [*SETTINGS, "soak"]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.parallel) as pool:
        needs_teacher = any("TEACHER" in SETTINGS.get(name, "") for name in wanted)
        teacher = train_teacher(Path(scratch)) if needs_teacher else None
        seeds = range(arguments.seeds)
        futures = {
            name: [pool.submit(quickstart, SETTINGS[name], seed=seed, teacher=teacher) for seed in seeds]
            for name in wanted
            if name in SETTINGS
        }
        soak = pool.submit(quickstart, SOAK, seed=0) if "soak" in wanted else None
        runs: dict[str, list[dict[str, Any]]] = {}
        for name, of_setting in futures.items():
            runs[name] = [future.result() for future in of_setting]
            print(f"{name}: {runs[name]}", flush=True)
        soaked = soak.result() if soak else None
    if arguments.merge is not None:
        earlier = json.loads(arguments.merge.read_text())
        runs, soaked = {**earlier["runs"], **runs}, soaked or earlier["soak"]
    learned = {
        name: all(run.get("before", 1.0) < 0.4 and run.get("after", 0.0) > 0.9 for run in of_setting)
        for name, of_setting in runs.items()
    }
    result = {
        "name": "estimators_quickstart",
        "seconds": time.perf_counter() - started,
        "limit_seconds": None,
        "share_of_limit": None,
        "num_learned": sum(learned.values()),
        "num_settings": len(learned),
        "learned": learned,
        "flags": {name: SETTINGS[name] for name in runs},
        "runs": runs,
        "soak": soaked,
        "peers": {},
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
