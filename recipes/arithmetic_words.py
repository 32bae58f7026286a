"""Easy arithmetic in words for a small chat model: three families, each with held-out items.

    python recipes/arithmetic_words.py FOLDER

Writes FOLDER/<family>_{train,held_out}.jsonl with the columns `question` and `answer`. A family has every pair of its
operands in several wordings, so that there are enough items to hold some out; the split is by unordered pair, so no
held-out sum is ever seen in training, in any order or wording.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.25
SEED = 20260101


@dataclass(frozen=True)
class Family:
    operands: tuple[range, range]
    result: Callable[[int, int], int]
    wordings: tuple[str, ...]


SUM_WORDINGS = (
    "What is {a} + {b}? Reply with only the number.",
    "What is {a} plus {b}? Reply with only the number.",
    "Add {a} and {b}. Reply with only the number.",
    "{a} + {b} = ? Reply with only the number.",
    "I have {a} apples and get {b} more. How many apples do I have? Reply with only the number.",
    "Compute the sum of {a} and {b}. Reply with only the number.",
)
PRODUCT_WORDINGS = (
    "What is {a} x {b}? Reply with only the number.",
    "What is {a} times {b}? Reply with only the number.",
    "Multiply {a} by {b}. Reply with only the number.",
    "{a} * {b} = ? Reply with only the number.",
    "There are {a} boxes with {b} eggs each. How many eggs are there? Reply with only the number.",
    "Compute the product of {a} and {b}. Reply with only the number.",
)
FAMILIES = {
    "sums": Family((range(1, 10), range(1, 10)), lambda a, b: a + b, SUM_WORDINGS),
    "products": Family((range(2, 10), range(2, 10)), lambda a, b: a * b, PRODUCT_WORDINGS),
    "two_digit_sums": Family((range(10, 100, 3), range(1, 10)), lambda a, b: a + b, SUM_WORDINGS),
}


def items(family: Family) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All items of a family as (training, held out), shuffled."""
    pairs = sorted({(a, b) for a in family.operands[0] for b in family.operands[1]})
    unordered = sorted({(min(pair), max(pair)) for pair in pairs})
    rng = random.Random(SEED)
    rng.shuffle(unordered)
    held_out = set(unordered[: round(len(unordered) * HELD_OUT_SHARE)])
    split: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
    for a, b in pairs:
        rows = [{"question": text.format(a=a, b=b), "answer": str(family.result(a, b))} for text in family.wordings]
        split[(min(a, b), max(a, b)) in held_out].extend(rows)
    for part in split:
        rng.shuffle(part)
    return split


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, family in FAMILIES.items():
        for part, rows in zip(("train", "held_out"), items(family), strict=True):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}_{part}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
