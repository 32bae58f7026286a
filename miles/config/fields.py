"""How a dataclass field becomes a flag: `flag()` records help, unit, choices and what the flag means here."""

from __future__ import annotations

import dataclasses
from typing import Any

# What a flag does in this implementation, shown by `--help` and `--explain`:
ACTIVE = "active"  # it is obeyed
SATISFIED = "no effect here"  # accepted: the design already gives what it asks for


def flag(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[Any, ...] = (),
    effect: str = ACTIVE,
    resume: bool = False,
) -> Any:
    """A config field that is one flag.

    `resume=True` marks a value that may differ when a run is resumed (it is left out of the run's identity).
    """
    metadata = {"help": help, "unit": unit, "choices": choices, "effect": effect, "resume": resume}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
