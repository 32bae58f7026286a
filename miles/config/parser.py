"""The argparse parser, built from the dataclass fields: types, choices, groups, and the text of `--help`."""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from miles.config.fields import SATISFIED
from miles.config.flags import FLAGS, Flag, closest


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AssertionError(f"argparse met a case that should have been handled before it: {message}")


@functools.cache
def build_parser(prog: str) -> argparse.ArgumentParser:
    """A parser that knows every flag; it raises `argparse.ArgumentError` and never exits."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--config FILE] [--flag value ...]",
        description="Every setting is one flag. The last value wins; a YAML file gives defaults.",
        epilog="Every --engine-X is also accepted as --sglang-X.",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=34),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        exit_on_error=False,
    )
    command = parser.add_argument_group("Command")
    command.add_argument("--config", metavar="FILE", help="YAML file of settings, such as `rollout_batch_size: 32`")
    command.add_argument("--explain", action="store_true", help="print every final setting and its source, and stop")
    command.add_argument("--help", "-h", action="store_true", help="print this text")
    groups: dict[str, Any] = {}
    for flag in FLAGS.values():
        group = groups.get(flag.section) or parser.add_argument_group(flag.section_title)
        groups[flag.section] = group
        _add(group, flag)
    return parser


def _add(group: Any, flag: Flag) -> None:
    text = describe(flag).replace("%", "%%")
    if flag.kind is bool:
        group.add_argument(flag.spelling, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = {int: "N", float: "X", str: "TEXT", dict: "JSON"}[flag.kind]
    if flag.choices:
        metavar = "{" + ",".join(str(choice) for choice in flag.choices) + "}"
    extra = {"nargs": "+", "action": "extend"} if flag.many else {}
    group.add_argument(flag.spelling, type=_converter(flag), metavar=metavar, help=text, **extra)


def describe(flag: Flag) -> str:
    """Help with unit, bounds and default, as `--help` and `docs` show it."""
    details = [text for text in (flag.unit, flag.bounds.text if flag.bounds else "") if text]
    if flag.default not in (None, (), {}):
        shown = {True: "on", False: "off"}[flag.default] if flag.kind is bool else flag.default
        details.append(f"default {shown}")
    if flag.effect == SATISFIED:
        details.append(SATISFIED)
    return f"{flag.help} ({'; '.join(details)})" if details else flag.help


def _converter(flag: Flag) -> Callable[[str], Any]:
    """Text -> value of the flag's type and choices; what is wrong becomes the message of an ArgumentTypeError."""
    converters: dict[type, Callable[[str], Any]] = {
        int: _whole_number,
        float: _number,
        str: str,
        dict: functools.partial(_mapping, kind=flag.value_kind),
    }
    convert = converters[flag.kind]

    def checked(text: str) -> Any:
        if text == "auto" and flag.optional and flag.kind is int:
            return None
        value = convert(text)
        if flag.choices and value not in flag.choices:
            allowed = [str(choice) for choice in flag.choices]
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(allowed)}{closest(text, allowed)}")
        return value

    return checked


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _mapping(text: str, *, kind: type | None) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON mapping such as {{"name": 1}}')
    if kind is float:
        for key, entry in value.items():
            if isinstance(entry, bool) or not isinstance(entry, (int, float)):
                raise argparse.ArgumentTypeError(f"{key!r}: {entry!r} is not a number")
            value[key] = float(entry)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")
