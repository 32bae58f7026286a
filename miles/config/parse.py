"""From argv to a `RunConfig`: argparse built from the dataclass fields, fed one flag at a time.

One flag at a time, so that one mistake does not hide the next and the last value wins. Settings come, in this order,
from the command's presets, `--config FILE` and the command line; all three pass through the same types.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.config.flags import FLAGS, Flag, closest, with_values
from miles.config.parser import build_parser
from miles.config.resolve import resolve
from miles.config.rules import rule_violations
from miles.config.sections import RunConfig
from miles.config.yaml_file import Item, read_config_file
from miles.errors import ConfigError

DEFAULT, COMMAND_LINE, RESOLVED = "default", "command line", "resolved"


@dataclass(frozen=True)
class Parsed:
    """Settings and where each came from: `default`, `config FILE`, `command line`, `resolved` or a preset's name."""

    config: RunConfig
    sources: dict[str, str]
    explain: bool = False


@dataclass
class _Given:
    """What was set, what was wrong, and the flags that a mistake leaves in doubt."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    explain: bool = False
    config_file: str | None = None
    file_was_read: bool = True


def parse_train(
    argv: Sequence[str], *, command: str = "train", preset: Sequence[str] = (), preset_name: str = "preset"
) -> Parsed:
    """Settings of a training command: parsed, checked and resolved. `ConfigError` carries everything that is wrong.

    `preset` is a command's own defaults as flags; a config file and the command line override it. `--help` prints
    and raises SystemExit(0).
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(command), end="")
        raise SystemExit(0)
    given = _read(argv, preset, preset_name)
    config = with_values(RunConfig(), given.values)
    names_of_doubt = [re.escape(flag) + r"(?![\w-])" for flag in given.doubtful]
    # A rule about a flag that could not be read would speak of its default, not of what the user meant.
    violations = rule_violations(config) if given.file_was_read else []
    rules = [text for text in violations if not any(re.search(name, text) for name in names_of_doubt)]
    if given.errors or rules:
        raise ConfigError(*given.errors, *rules)
    resolved, names = resolve(config)
    sources = {name: RESOLVED if name in names else given.sources.get(name, DEFAULT) for name in FLAGS}
    return Parsed(resolved, sources, given.explain)


def parse_flags(argv: Sequence[str]) -> Parsed:
    """Settings as given: neither checked against the rules nor resolved."""
    given = _read(argv, (), "")
    if given.errors:
        raise ConfigError(*given.errors)
    sources = {name: given.sources.get(name, DEFAULT) for name in FLAGS}
    return Parsed(with_values(RunConfig(), given.values), sources, given.explain)


def help_text(command: str) -> str:
    """`--help` of a command: a group per section, with defaults and units."""
    return build_parser(f"miles {command}").format_help()


def _read(argv: Sequence[str], preset: Sequence[str], preset_name: str) -> _Given:
    given = _Given()
    on_command_line = [item for item in _split(argv, COMMAND_LINE, given) if not _control(item, given)]
    in_file: list[Item] = []
    if given.config_file is not None:
        in_file, errors = read_config_file(given.config_file)
        given.errors.extend(errors)
        given.file_was_read = bool(in_file) or not errors
        given.doubtful.update(re.findall(r"--[a-z0-9-]+", " ".join(_as_flags(error) for error in errors)))
    for item in [*_split(preset, preset_name, given), *in_file, *on_command_line]:
        _read_item(item, given)
    return given


def _as_flags(message: str) -> str:
    """Field names in a message as flags: `did you mean rollout_top_p` -> `did you mean --rollout-top-p`."""
    return re.sub(r"\b[a-z]\w*\b", lambda word: FLAGS[word[0]].spelling if word[0] in FLAGS else word[0], message)


def _split(argv: Sequence[str], source: str, given: _Given) -> list[Item]:
    """Cut argv before every token that begins with two hyphens."""
    items: list[Item] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token.partition("=")
            items.append(Item(name, (value,) if equals else (), source, name))
        elif items:
            items[-1] = Item(items[-1].flag, (*items[-1].values, token), source, items[-1].shown)
        else:
            given.errors.append(f"{token!r} stands before any flag; settings are given as --flag value")
    return items


def _control(item: Item, given: _Given) -> bool:
    """Take `--config FILE` and `--explain`, which are not settings."""
    if item.flag == "--explain":
        given.explain = True
        if item.values:
            given.errors.append(f"--explain takes no value, not {item.values[0]!r}")
    elif item.flag == "--config":
        if len(item.values) == 1:
            given.config_file = item.values[0]
        else:
            given.errors.append(f"--config needs one YAML file, got {len(item.values)}")
    return item.flag in ("--explain", "--config")


def _read_item(item: Item, given: _Given) -> None:
    flag, problem = _find(item)
    if flag is None:
        given.errors.append(problem)
        given.doubtful.update(re.findall(r"--[a-z0-9-]+", problem))
        return
    problem = problem or _count_problem(flag, item)
    if not problem:
        canonical = re.sub("^--(no-)?sglang-", r"--\1engine-", item.flag)
        tokens = [f"{canonical}={value}" for value in item.values] or [canonical]
        try:
            namespace, _ = build_parser("miles").parse_known_args(tokens)
        except argparse.ArgumentError as error:
            problem = error.message
        else:
            value = vars(namespace)[flag.name]
            given.values[flag.name] = tuple(value) if flag.many else value
            given.sources[flag.name] = item.source
            return
    given.errors.append(f"{item.shown}: {problem}")
    given.doubtful.add(flag.spelling)


def _find(item: Item) -> tuple[Flag | None, str]:
    """The flag that was typed, or the message that says what was probably meant."""
    known: dict[str, Flag] = {}
    for flag in FLAGS.values():
        typed = flag.spelling
        if item.flag.removeprefix("--no-").removeprefix("--").startswith("sglang-"):
            typed = re.sub("^--engine-", "--sglang-", typed)
        known[typed] = flag
        if flag.kind is bool:
            known["--no-" + typed.removeprefix("--")] = flag
    if item.flag in known:
        return known[item.flag], ""
    if item.flag.startswith("--no-") and "--" + item.flag.removeprefix("--no-") in known:
        positive = "--" + item.flag.removeprefix("--no-")
        return known[positive], f"{positive} is not a switch, so there is no {item.flag}"
    return None, f"unknown flag {item.flag}{closest(item.flag, [*known, '--config', '--explain'])}"


def _count_problem(flag: Flag, item: Item) -> str:
    if flag.kind is bool and item.values:
        return f"takes no value, not {item.values[0]!r}; --no-{item.flag.removeprefix('--')} switches it off"
    if flag.kind is bool:
        return ""
    if not item.values:
        return "needs at least one value" if flag.many else "needs a value"
    if len(item.values) > 1 and not flag.many:
        return f"takes one value, got {len(item.values)}: {' '.join(item.values)}"
    return ""
