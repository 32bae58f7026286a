"""Answers graded a second, by the rewards as a run uses them, on two worker processes.

`gsm8k`: worked solutions of 600 characters that end in `#### n`, half of them wrong. `math`: a mix of kinds of answers
(`MIX`: their shares are a guess after the labels of the MATH data set), half of them wrong, eight answers to a label;
and each kind alone. `step`: the time that grading the 256 answers of a recipe step takes. The peer is math-verify in
one process, parsing the label once for its eight answers. The limit of gsm8k is one search for the line and one
comparison; that of math is the same for its answers.

    python benchmarks/rewards.py [--answers 4000] [--write FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import logging
import random
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from benchmarks.machine import record
from miles.config.sections import DataConfig, RewardConfig, RunConfig
from miles.rollout.rewards import RewardRunner
from miles.types import Sample

GROUP, STEP = 8, 256
WORK = "Tom has 12 apples and gives 3 of them to each of his 2 friends. 3*2=6, so he keeps 12-6=6 apples. " * 6
LINE = re.compile(r"#### (-?[\d,]+)|\\boxed\{(.*)\}\$")

# kind: share of the mix, and for a number the right answer in two spellings and a wrong one
Spellings = Callable[[int], tuple[str, str, str]]
MIX: dict[str, tuple[float, Spellings]] = {
    "integer": (0.56, lambda n: (f"{n}", f"{n:,}", f"{n + 1}")),
    "fraction": (0.15, lambda n: (rf"\frac{{{n}}}{{7}}", f"{n}/7", rf"\frac{{{n + 1}}}{{7}}")),
    "decimal": (0.07, lambda n: (f"{n}.5", rf"{n}\frac{{1}}{{2}}", f"{n}.25")),
    "tuple": (0.06, lambda n: (f"({n}, 2)", rf"\left({n},2\right)", f"(2, {n})")),
    "text": (0.05, lambda n: (rf"\text{{Group {chr(65 + n % 26)}x}}", f"Group {chr(65 + n % 26)}x", "none of them")),
    "interval": (0.03, lambda n: (f"[{n},\\infty)", f"[{n}, +\\infty)", f"({n},\\infty)")),
    "surd": (0.05, lambda n: (rf"{n}\sqrt{{2}}", rf"\sqrt{{{2 * n * n}}}", rf"{n}\sqrt{{3}}")),
    "polynomial": (0.03, lambda n: (f"x^2-{n * n}", f"(x-{n})(x+{n})", f"x^2+{n * n}")),
}


def math_samples(kinds: dict[str, float], count: int) -> list[Sample]:
    rng = random.Random(0)
    samples = []
    while len(samples) < count:
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        label, other, wrong = MIX[kind][1](rng.randrange(2, 5000))
        for place in range(GROUP):
            answer = wrong if place % 2 else (label, other)[place // 2 % 2]
            samples.append(sample(label, rf"{WORK} The answer is $\boxed{{{answer}}}$.", len(samples)))
    return samples[:count]


def gsm8k_samples(count: int) -> list[Sample]:
    rng = random.Random(1)
    numbers = [rng.randrange(10**5) for _ in range(count // GROUP + 1)]
    return [sample(f"{numbers[i // GROUP]}", f"{WORK}\n#### {numbers[i // GROUP] + i % 2:,}", i) for i in range(count)]


def sample(label: str, response: str, index: int) -> Sample:
    return Sample(label=label, response=response, group_index=index // GROUP, index=index)


def make_runner(rm_type: str) -> RewardRunner:
    runner = RewardRunner(RunConfig(data=DataConfig(label_key="label"), reward=RewardConfig(rm_type=rm_type)))
    runner.start()
    assert runner.check_label is not None
    runner.check_label("x^2+1" if rm_type == "math" else "1", {})  # waits for the processes
    return runner


def grade(runner: RewardRunner, samples: list[Sample]) -> float:
    """Seconds to grade all samples group by group, all groups at one time, as at the end of a rollout."""
    groups = [samples[i : i + GROUP] for i in range(0, len(samples), GROUP)]

    async def run() -> None:
        await asyncio.gather(*(runner.score_group(group) for group in groups))

    start = time.perf_counter()
    asyncio.run(run())
    seconds = time.perf_counter() - start
    wrong = [s for s in samples if s.reward != (s.index + 1) % 2]
    assert not wrong, f"{len(wrong)} verdicts are wrong, first {wrong[0].label} for {wrong[0].response[-40:]}"
    return seconds


def grade_by_peer(samples: list[Sample]) -> tuple[float, int]:
    """Seconds of math-verify in this process, and its wrong verdicts."""
    start, num_wrong = time.perf_counter(), 0
    for i in range(0, len(samples), GROUP):
        gold = parse(f"${samples[i].label}$", parsing_timeout=None)
        for answer in samples[i : i + GROUP]:
            verdict = verify(gold, parse(answer.response, parsing_timeout=None), timeout_seconds=None)
            num_wrong += verdict != ((answer.index + 1) % 2 == 1)
    return time.perf_counter() - start, num_wrong


def limit(samples: list[Sample]) -> float:
    start = time.perf_counter()
    for answer in samples:
        found = LINE.search(answer.response)
        assert found is not None
        _ = (found[1] or found[2]) == answer.label
    return time.perf_counter() - start


def measure(count: int) -> dict[str, Any]:
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    gsm8k, math = gsm8k_samples(count), math_samples({kind: share for kind, (share, _) in MIX.items()}, count)
    fast, full = make_runner("gsm8k"), make_runner("math")
    gsm8k_s = min(grade(fast, gsm8k) for _ in range(3))
    math_s = grade(full, math)
    step_s = {"gsm8k": grade(fast, gsm8k[:STEP]), "math": grade(full, math_samples({"integer": 1.0}, STEP))}
    kinds = {kind: grade(full, math_samples({kind: 1.0}, 240)) for kind in MIX}
    peer_count = min(count, 400)
    peer_s, peer_wrong = grade_by_peer(math[:peer_count])
    full.close()
    fast.close()
    limit_s = limit(gsm8k) + limit(math)
    return {
        "name": "rewards",
        "seconds": round(gsm8k_s + math_s, 3),
        "limit_seconds": round(limit_s, 4),
        "share_of_limit": round(limit_s / (gsm8k_s + math_s), 4),
        "peers": {
            "math-verify, one process, math mix": {
                "seconds": round(peer_s * count / peer_count, 3),
                "version": importlib.metadata.version("math-verify"),
                "answers_per_second": round(peer_count / peer_s),
                "wrong_verdicts": peer_wrong,
                "answers": peer_count,
            }
        },
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "answers": count,
        "answers_per_second": {
            "gsm8k": round(count / gsm8k_s),
            "math": round(count / math_s),
            **{f"math, only {kind}": round(240 / seconds) for kind, seconds in kinds.items()},
        },
        "step_of_256_answers_seconds": {name: round(seconds, 4) for name, seconds in step_s.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=4000)
    parser.add_argument("--write", type=Path, help="folder that gets the JSON line as a file")
    args = parser.parse_args()
    result = measure(args.answers)
    for name, rate in result["answers_per_second"].items():
        print(f"{name:28} {rate:8,} answers/s")
    record(result, write=args.write)


if __name__ == "__main__":
    main()
