"""How a dataclass field becomes a flag: `flag()` records help, unit, choices, bounds and what the flag means here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

# What a flag does in this implementation, shown by `--help` and `--explain`:
ACTIVE = "active"  # it is obeyed
SATISFIED = "no effect here"  # accepted: the design already gives what it asks for


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Range of a number; an open end does not belong to it, nor does a `gap`."""

    text: str
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    gap: float | None = None

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and value != self.gap


AT_LEAST_ONE = Bounds("at least 1", low=1)
# The table of running answers is as long as this, and a row takes memory whether it is used or not.
TABLE_ROWS = Bounds("from 1 to 16,384", low=1, high=16_384)
NOT_NEGATIVE = Bounds("at least 0", low=0)
ABOVE_ONE = Bounds("above 1", low=1, low_open=True)
ABOVE_ZERO = Bounds("above 0", low=0, low_open=True)
FRACTION = Bounds("from 0 to 1", low=0, high=1)
FRACTION_BELOW_ONE = Bounds("from 0 to below 1", low=0, high=1, high_open=True)
FRACTION_ABOVE_ZERO = Bounds("above 0, up to 1", low=0, high=1, low_open=True)


def flag(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[Any, ...] = (),
    bounds: Bounds | None = None,
    effect: str = ACTIVE,
    resume: bool = False,
) -> Any:
    """A config field that is one flag.

    `resume=True` marks a value that may differ when a run is resumed (it is left out of the run's identity).
    `bounds` holds for a number, and for every number of a list or of a JSON mapping.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "choices": choices,
        "bounds": bounds,
        "effect": effect,
        "resume": resume,
    }
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
