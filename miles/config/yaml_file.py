"""Reads a YAML file of settings as flags with text values, so that the flags' own types decide what a value means.

YAML's types are not used: a YAML 1.1 reader takes `1e-5` for a text and `off` for a boolean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from miles.config.flags import FLAGS, Flag, closest
from miles.errors import ConfigError

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(frozen=True)
class Item:
    """One setting as it was given: the flag, its values as text, and how an error message calls it."""

    flag: str  # as typed, e.g. `--sglang-page-size`
    values: tuple[str, ...]
    source: str
    shown: str


def read_config_file(path: str) -> tuple[list[Item], list[str]]:
    """The settings of a YAML file in its order, and what is wrong with it; every message names file, line and key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except FileNotFoundError:
        return [], [f"--config {path}: there is no such file"]
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"--config {path}: cannot be read as a text file ({error})"]
    except yaml.YAMLError as error:
        return [], [f"--config {path}: is not valid YAML: {' '.join(str(error).split())}"]
    if root is None:
        return [], []
    if not isinstance(root, yaml.MappingNode):
        return [], [f"--config {path}: must be a mapping of settings, such as `rollout_batch_size: 32`"]
    items: list[Item] = []
    errors: list[str] = []
    seen: set[str] = set()
    for key_node, value_node in root.value:
        key = str(key_node.value)
        shown = f"{path}, line {key_node.start_mark.line + 1}: {key}"
        name = key.replace("-", "_")
        if name in seen:
            errors.append(f"{shown} is set twice")
        seen.add(name)
        try:
            items.extend(_items(name, value_node, source=f"config {path}", shown=shown))
        except ConfigError as error:
            errors.extend(error.violations)
    return items, errors


def _items(name: str, node: yaml.Node, *, source: str, shown: str) -> Iterator[Item]:
    field_name = "engine_" + name.removeprefix("sglang_") if name.startswith("sglang_") else name
    flag = FLAGS.get(field_name)
    if flag is None:
        raise ConfigError(f"{shown} is not a setting{closest(field_name, FLAGS)}")
    spelling = "--" + name.replace("_", "-")
    values = _values(flag, node, shown)
    if flag.kind is bool and values:
        word = values[0].lower()
        if word not in _TRUE + _FALSE:
            raise ConfigError(f"{shown}: expected true or false, not {values[0]!r}")
        yield Item(spelling if word in _TRUE else "--no-" + spelling.removeprefix("--"), (), source, shown)
    elif values:
        yield Item(spelling, values, source, shown)


def _values(flag: Flag, node: yaml.Node, shown: str) -> tuple[str, ...]:
    """Values of a flag as text; none for a null or an empty list, which leave the flag at its default."""
    if flag.kind is dict:
        plain = _plain(node, shown)
        return (plain if isinstance(plain, str) else json.dumps(plain),)
    if isinstance(node, yaml.ScalarNode):
        if node.tag != "tag:yaml.org,2002:null":
            return (node.value,)
        if flag.optional:
            return ()
        raise ConfigError(f"{shown}: needs a value")
    if not flag.many or not isinstance(node, yaml.SequenceNode):
        given = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        expected = "a list of values" if flag.many else "one value"
        raise ConfigError(f"{shown}: expected {expected}, not {given}")
    if not all(isinstance(entry, yaml.ScalarNode) for entry in node.value):
        raise ConfigError(f"{shown}: every entry of the list must be a plain value")
    if not node.value and flag.default:
        raise ConfigError(f"{shown}: the list is empty")
    return tuple(entry.value for entry in node.value)


def _plain(node: yaml.Node, shown: str) -> Any:
    """A node as JSON data. An unquoted scalar is what JSON reads it as, else a text."""
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(value, shown) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(entry, shown) for entry in node.value]
    assert isinstance(node, yaml.ScalarNode)
    if node.style is not None:
        return node.value
    try:
        return json.loads(node.value, parse_constant=str)
    except json.JSONDecodeError:
        return node.value
