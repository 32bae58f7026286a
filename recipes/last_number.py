"""A custom reward: the last number of the answer must equal the label as a value.

--custom-rm-path recipes.last_number.reward
"""

from __future__ import annotations

import re
from typing import Any

from miles.types import Sample

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def reward(args: Any, sample: Sample) -> float:
    answer, label = last_number(sample.response), last_number(str(sample.label))
    return float(answer is not None and answer == label)
