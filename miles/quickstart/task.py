"""Two-digit addition: the prompts and their right answers.

The warm-up of the shipped model (`recipes/quickstart_warmup.py`) taught it two styles: the terse one states the sum at
once (`#### 85`), which so small a model mostly gets wrong, the worked one adds column by column first. Both were right
in its data; reinforcement learning finds out which one pays.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

HELD_OUT_SHARE = 0.12
SPLIT_SEED = 20260101  # fixed: the shipped model was warmed up on the same training pairs


def question(a: int, b: int) -> str:
    return f"{a}+{b}=?"


def split_pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All ordered pairs of two-digit numbers, as (training, held out).

    The split is by unordered pair: when 47+38 is held out, 38+47 is too.
    """
    unordered = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(SPLIT_SEED).shuffle(unordered)
    num_held_out = round(len(unordered) * HELD_OUT_SHARE)
    return _both_orders(unordered[num_held_out:]), _both_orders(unordered[:num_held_out])


def _both_orders(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted({order for a, b in pairs for order in ((a, b), (b, a))})


def write_task(folder: Path, *, num_held_out: int) -> tuple[Path, Path]:
    """Write `train.jsonl` and `held_out.jsonl` with the columns `question` and `answer`; returns their paths."""
    training, held_out = split_pairs()
    chosen = random.Random(SPLIT_SEED).sample(held_out, num_held_out)
    return _write_rows(folder / "train.jsonl", training), _write_rows(folder / "held_out.jsonl", chosen)


def _write_rows(path: Path, pairs: Iterable[tuple[int, int]]) -> Path:
    lines = [json.dumps({"question": question(a, b), "answer": str(a + b)}) for a, b in pairs]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
