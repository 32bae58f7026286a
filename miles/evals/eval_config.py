"""`--eval-config`: evaluation sets with settings of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from miles.config.flags import FLAGS, closest
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


_KEYS = [one.name for one in fields(SetSettings)]
_KINDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("name", "path"), str),
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
    try:
        entries = [{"name": n, **e} for n, e in datasets.items()] if isinstance(datasets, dict) else datasets
        entries = [{**defaults, **entry} for entry in entries]
    except TypeError as error:
        raise ConfigError(f"--eval-config {path}: defaults and each set must be a mapping ({error})") from error
    sets = [_read_set(entry, path, errors) for entry in entries]
    if errors:
        raise ConfigError(*errors)
    return [one for one in sets if one is not None]


def _read_set(entry: dict[str, Any], path: str, errors: list[str]) -> SetSettings | None:
    where = f"--eval-config {path}, set {entry.get('name', '?')}"
    before = len(errors)
    entry = {key: value for key, value in entry.items() if value is not None}
    errors += [f"{where}: {key} is missing" for key in ("name", "path") if key not in entry]
    values: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in _KEYS:
            errors.append(f"{where}: unknown key {key!r}{closest(str(key), _KEYS)}")
            continue
        try:
            values[key] = _KINDS[key](value) if key in _KINDS else _as_its_flag(key, value)
        except (TypeError, ValueError) as error:
            errors.append(f"{where}: {key} cannot be {value!r} ({error})")
    return SetSettings(**values) if len(errors) == before else None


def _as_its_flag(key: str, value: Any) -> Any:
    """The value as the flag of the same meaning takes it."""
    flag = FLAGS.get(f"eval_{key}") or FLAGS[key]
    typed = flag.kind(str(value))
    if flag.kind is not str and (problem := flag.problem_of(typed)):
        raise ValueError(f"must be {problem}")
    return typed
