"""Sums that a small model learns slowly, for `memory_options.py`: after 100 steps no run has reached the top yet, so
that runs can still differ. `recipes/arithmetic_words.py` has easier ones.

    python benchmarks/sums.py FOLDER [--train 2000] [--held-out 114]

Two numbers of two or three digits each; writes FOLDER/sums_train.jsonl and FOLDER/sums_held_out.jsonl, no sum in both.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

MOST = 100_000  # far fewer than there are, so that no pair is looked for in vain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=114)
    arguments = parser.parse_args()
    if not (arguments.train > 0 < arguments.held_out and arguments.train + arguments.held_out <= MOST):
        parser.error(f"--train and --held-out must be above 0, and together at most {MOST}")
    rng = random.Random(0)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < arguments.train + arguments.held_out:
        left, right = (rng.randrange(10, rng.choice((100, 1000))) for _ in range(2))
        pairs[min(left, right), max(left, right)] = None
    rows = [json.dumps({"question": f"What is {one} + {two}?", "answer": str(one + two)}) for one, two in pairs]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("held_out", rows[: arguments.held_out]), ("train", rows[arguments.held_out :])):
        (arguments.folder / f"sums_{name}.jsonl").write_text("\n".join(part) + "\n")


if __name__ == "__main__":
    main()
