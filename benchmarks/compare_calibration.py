"""How often `miles compare` is wrong, on synthetic runs whose true difference is known.

    python -m benchmarks.compare_calibration [--pairs 1000] [--write FOLDER]

A run is the last 8 steps of 32 prompts with 8 answers each, as in the manual's recipe. Prompts differ in difficulty
so that about half of the groups are all right or all wrong; a seed moves the logit of every prompt by a common amount
(spread `seed_spread`, in mean reward); a change moves it so that the mean reward rises by 0.05. The manual's three
seeds ended between 0.736 and 0.766 on different prompts, which a seed spread of 0 to 0.015 gives.

Claims: with three seeds a side, fewer than 5 percent of 1,000 comparisons of equal settings are called real, and at
least 80 percent of 1,000 comparisons with a rise of 0.05 are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import record
from miles.report.spread import REAL, compare_units

NUM_STEPS, NUM_PROMPTS, NUM_ANSWERS = 8, 32, 8
MEAN, RISE = 0.70, 0.05
SPREAD_OF_ANSWERS = (MEAN * (1 - MEAN)) ** 0.5
DIFFICULTY = 2.6  # standard deviation of the logits: half of the groups are then all right or all wrong


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    rates: np.ndarray = 1 / (1 + np.exp(-logits))
    return rates


def _shift_for(mean: float, generator: np.random.Generator) -> float:
    """The common logit at which the mean reward is `mean`, by bisection."""
    spread = generator.normal(0, DIFFICULTY, 200_000)
    low, high = -10.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(spread + middle).mean() < mean else (low, middle)
    return (low + high) / 2


def _run(difficulty: np.ndarray, logit: float, generator: np.random.Generator, *, names: int) -> dict[Any, float]:
    right = generator.binomial(NUM_ANSWERS, _sigmoid(difficulty + logit)) / NUM_ANSWERS
    return {
        (step, f"{names}-{prompt}"): right[step, prompt] for step in range(NUM_STEPS) for prompt in range(NUM_PROMPTS)
    }


def share_called_real(
    num_comparisons: int, *, rise: float, seed_spread: float, num_seeds: int, paired: bool, seed: int
) -> tuple[float, float]:
    """Share of comparisons called real, and of intervals that hold the true difference."""
    generator = np.random.default_rng(seed)
    base = _shift_for(MEAN, generator)
    slope = _shift_for(MEAN + 0.01, generator) - base  # logits per 0.01 of reward
    lift = _shift_for(MEAN + rise, generator) - base if rise else 0.0
    real = held = 0
    for number in range(num_comparisons):
        arms: tuple[list[dict[Any, float]], list[dict[Any, float]]] = ([], [])
        for pair in range(num_seeds):
            difficulty = generator.normal(0, DIFFICULTY, (NUM_STEPS, NUM_PROMPTS))
            for side, arm in enumerate(arms):
                if side and not paired:
                    difficulty = generator.normal(0, DIFFICULTY, (NUM_STEPS, NUM_PROMPTS))
                logit = base + side * lift + generator.normal(0, seed_spread * 100 * slope)
                arm.append(_run(difficulty, logit, generator, names=pair if paired else 2 * pair + side))
        verdict = compare_units(*arms, scale=SPREAD_OF_ANSWERS, seed=number)
        real += verdict.word == REAL
        held += verdict.low <= rise <= verdict.high
    return real / num_comparisons, held / num_comparisons


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--write", type=Path, help="folder that gets the JSON line as a file")
    arguments = parser.parse_args(argv)
    begin = time.perf_counter()
    rows = []
    for num_seeds, paired, seed_spread, share in (
        (3, True, 0.01, 1.0), (3, True, 0.0, 0.5), (3, True, 0.015, 0.5), (3, True, 0.02, 0.5),
        (2, True, 0.01, 0.5), (5, True, 0.01, 0.25), (3, False, 0.01, 0.5),
    ):  # fmt: skip
        count = max(1, int(arguments.pairs * share))
        setting = {"num_seeds": num_seeds, "paired": paired, "seed_spread": seed_spread}
        false, held = share_called_real(count, rise=0.0, **setting, seed=1)
        found, held_rise = share_called_real(count, rise=RISE, **setting, seed=2)
        rows.append(
            setting
            | {"comparisons": count, "false_alarms": false, "found": found, "interval_holds": (held + held_rise) / 2}
        )
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "name": "compare-calibration",
        "rise": RISE,
        "settings": rows,
        "false_alarms": rows[0]["false_alarms"],
        "found": rows[0]["found"],
        "claims_hold": rows[0]["false_alarms"] < 0.05 and rows[0]["found"] >= 0.8,
        "seconds": time.perf_counter() - begin,
    }
    record(result, write=arguments.write, on_cpu=True)


if __name__ == "__main__":
    main()
