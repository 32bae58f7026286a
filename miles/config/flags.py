"""All flags as one flat table, and the flat views of a `RunConfig` that parsing, printing and hooks share."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from miles.config.fields import Bounds
from miles.config.sections import RunConfig


@dataclass(frozen=True)
class Flag:
    """One field of one section. `kind` is the type of a single value: bool, int, float, str or dict."""

    name: str
    section: str
    section_title: str
    kind: type
    value_kind: type | None  # of the values of a dict that has one type of them
    many: bool  # the field is a tuple of `kind`
    optional: bool  # the field can be None
    default: Any
    help: str
    unit: str
    choices: tuple[Any, ...]
    bounds: Bounds | None
    effect: str
    resume: bool

    @property
    def spelling(self) -> str:
        return "--" + self.name.replace("_", "-")

    def problem_of(self, number: float) -> str:
        """What a value must be and this number is not, or nothing."""
        if not math.isfinite(number):
            return "a finite number"
        return self.bounds.text if self.bounds and not self.bounds.holds(number) else ""


def _flags_of(section: str, section_type: type) -> Iterator[Flag]:
    hints = typing.get_type_hints(section_type)
    default_section = section_type()
    for field in dataclasses.fields(section_type):
        parts = [part for part in typing.get_args(hints[field.name]) if part is not type(None)]
        optional = type(None) in typing.get_args(hints[field.name])
        hint = parts[0] if optional else hints[field.name]
        origin = typing.get_origin(hint)
        many = origin is tuple
        kind = typing.get_args(hint)[0] if many else origin or hint
        assert kind in (bool, int, float, str, dict), f"{field.name}: no flag can be made of {hint}"
        value_kind = typing.get_args(hint)[1] if kind is dict else None
        yield Flag(
            name=field.name,
            section=section,
            section_title=(section_type.__doc__ or "").strip(),
            kind=kind,
            value_kind=None if value_kind is Any else value_kind,
            many=many,
            optional=optional,
            default=getattr(default_section, field.name),
            **field.metadata,
        )


def _all_flags() -> dict[str, Flag]:
    flags: dict[str, Flag] = {}
    for section, section_type in typing.get_type_hints(RunConfig).items():
        for flag in _flags_of(section, section_type):
            assert flag.name not in flags, f"{flag.name} is a field of two sections"
            flags[flag.name] = flag
    return flags


FLAGS = _all_flags()


def spelling(name: str) -> str:
    """`rollout_batch_size` -> `--rollout-batch-size`; a name that is no field is a mistake of this code."""
    return FLAGS[name].spelling


def closest(word: str, known: Iterable[str]) -> str:
    """ " (did you mean X?)", or nothing when no known word is near."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def flatten(config: RunConfig) -> dict[str, Any]:
    """Field name -> value, in the order of the sections."""
    return {name: getattr(getattr(config, flag.section), name) for name, flag in FLAGS.items()}


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A copy of `config` with these fields set, whatever section they are in."""
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(FLAGS[name].section, {})[name] = value
    sections = {
        section: dataclasses.replace(getattr(config, section), **fields) for section, fields in by_section.items()
    }
    return dataclasses.replace(config, **sections)


class Args:
    """The flat, read-only view of the settings that hooks get as `args`: `args.rollout_batch_size`."""

    __slots__ = ("_values",)

    def __init__(self, config: RunConfig) -> None:
        object.__setattr__(self, "_values", flatten(config))

    def __getattr__(self, name: str) -> Any:
        values = object.__getattribute__(self, "_values")
        if name not in values:
            raise AttributeError(f"args has no setting {name!r}{closest(name, values)}")
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args is read-only; {name} is set with a flag")

    def __reduce__(self) -> tuple[Any, ...]:
        return _args_from, (object.__getattribute__(self, "_values"),)


def _args_from(values: dict[str, Any]) -> Args:
    return Args(with_values(RunConfig(), values))
