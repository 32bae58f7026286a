"""`config.yaml` of a run folder: the resolved settings, readable as `--config` and read back exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from miles.config.flags import FLAGS, flatten
from miles.config.parse import parse_flags
from miles.config.sections import RunConfig


def dump_config(config: RunConfig) -> str:
    """YAML text with one block per section."""
    lines: list[str] = []
    section = ""
    for name, value in flatten(config).items():
        if FLAGS[name].section != section:
            section = FLAGS[name].section
            lines.append(f"\n# {FLAGS[name].section_title}\n")
        lines.append(f"{name}: {_yaml_value(value)}\n")
    return "".join(lines).lstrip("\n")


def load_config(path: Path) -> RunConfig:
    """The settings of a `config.yaml`. Raises `ConfigError` with file, line and key when it was damaged."""
    return parse_flags(["--config", str(path)]).config


def _yaml_value(value: Any) -> str:
    # JSON is YAML with every text quoted: what a mapping of free keys needs to be read back with its types.
    if isinstance(value, dict):
        return json.dumps(value)
    plain = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").rstrip("\n")
