"""`--eval-config`: evaluation sets with settings of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from miles.config.flags import closest
from miles.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SetSettings:
    """One set; None is what the `--eval-...` flags say."""

    name: str
    path: str
    rm_type: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)


def _list_of(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: tuple(kind(item) for item in (value if isinstance(value, list) else [value]))


_KINDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("name", "path", "rm_type", "input_key", "label_key", "tool_key", "metadata_key"), str),
    **dict.fromkeys(("n_samples_per_eval_prompt", "top_k", "max_response_len"), int),
    **dict.fromkeys(("temperature", "top_p"), float),
    "custom_generate_function_path": str,
    "stop": _list_of(str),
    "stop_token_ids": _list_of(int),
    "metadata_overrides": dict,
}


def read_eval_config(path: str) -> list[SetSettings]:
    """The sets of the file: a mapping, or its `eval`, with `datasets` (a list with names, or a mapping by name) and
    `defaults`. Raises `ConfigError` with everything that is wrong."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--eval-config {path}: cannot be read as YAML ({error})") from error
    root = content.get("eval", content) if isinstance(content, dict) else None
    if not isinstance(root, dict) or not root.get("datasets"):
        raise ConfigError(f"--eval-config {path}: needs a mapping with datasets, a list of name and path")
    errors = [f"--eval-config {path}: unknown key {key!r}" for key in root if key not in ("defaults", "datasets")]
    datasets, defaults = root["datasets"], root.get("defaults") or {}
    entries = [{"name": n, **e} for n, e in datasets.items()] if isinstance(datasets, dict) else datasets
    sets = [_read_set({**defaults, **entry}, path, errors) for entry in entries]
    names = [one.name for one in sets if one is not None]
    errors += [f"--eval-config {path}: two sets are named {n!r}" for n in sorted(set(names)) if names.count(n) > 1]
    if errors:
        raise ConfigError(*errors)
    return [one for one in sets if one is not None]


def _read_set(entry: dict[str, Any], path: str, errors: list[str]) -> SetSettings | None:
    where = f"--eval-config {path}, set {entry.get('name', '?')}"
    before = len(errors)
    errors += [f"{where}: {key} is missing" for key in ("name", "path") if key not in entry]
    values: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in _KINDS:
            errors.append(f"{where}: unknown key {key!r}{closest(key, _KINDS)}")
            continue
        try:
            values[key] = _KINDS[key](value)
        except (TypeError, ValueError):
            errors.append(f"{where}: {key} cannot be {value!r}")
    return SetSettings(**values) if len(errors) == before else None
