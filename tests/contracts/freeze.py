"""The flags and public names of Miles as text. A change of either is a decision: it shows up in a diff of these files.

`python -m tests.contracts.freeze` writes both files anew, and the pages of `docs/` that list flags and metrics.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from miles.config.flags import FLAGS
from miles.report import reference

FOLDER = Path(__file__).parent
PUBLIC_MODULES = ("miles.types", "miles.errors", "miles.cli.main")


def flag_lines() -> list[str]:
    """One line per flag: spelling, type, default and what may be chosen."""
    lines = []
    for flag in FLAGS.values():
        kind = flag.kind.__name__ + ("..." if flag.many else "") + ("?" if flag.optional else "")
        choices = "  {" + ",".join(str(choice) for choice in flag.choices) + "}" if flag.choices else ""
        lines.append(f"{flag.spelling}  {kind}  {flag.default!r}{choices}")
    return sorted(lines)


def public_name_lines() -> list[str]:
    """One line per public name: classes, their fields, members and methods, and functions."""
    return sorted(line for name in PUBLIC_MODULES for line in names_of(importlib.import_module(name)))


def names_of(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if value.__module__ == module.__name__:
            yield f"{module.__name__}.{name}"
            if inspect.isclass(value):
                yield from (f"{module.__name__}.{name}.{member}" for member in sorted(_members(value)))


def _members(cls: type) -> set[str]:
    own = {name for name in vars(cls) if not name.startswith("_")}
    if dataclasses.is_dataclass(cls):
        own |= {field.name for field in dataclasses.fields(cls)}
    if issubclass(cls, enum.Enum):
        own |= set(cls.__members__)
    return own


FROZEN = {"flags.txt": flag_lines, "public_names.txt": public_name_lines}


def main() -> None:
    for file, lines in FROZEN.items():
        (FOLDER / file).write_text("\n".join(lines()) + "\n", encoding="utf-8")
    for page, text in reference.PAGES.items():
        (FOLDER.parents[1] / "docs" / page).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
