"""Writes the reference pages that follow from the code: `docs/flags.md` and `docs/metrics.md`.

python -m miles.report.reference [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from miles.config.fields import SATISFIED
from miles.config.flags import FLAGS, Flag
from miles.observe.names import METRICS

GROUPS = {
    "rollout": "Samples",
    "passrate": "Pass rates",
    "train": "Training",
    "perf": "Time, speed and memory",
    "eval": "Evaluation",
}


def flags_page() -> str:
    """Every flag by concern, with its values, default, unit and meaning."""
    lines = [
        "# Flags",
        "",
        "Made from `miles/config/` by `python -m miles.report.reference`; `miles train --help` says the same, and",
        "`miles train ... --explain` shows every final value and where it came from. The last value wins; a YAML file",
        "given with `--config` holds defaults. `--engine-X` may also be written `--sglang-X`.",
        "",
        "A flag marked *no effect here* is accepted because the design already gives what it asks for.",
    ]
    section = ""
    for flag in FLAGS.values():
        if flag.section != section:
            section = flag.section
            lines += ["", f"## {flag.section_title}", "", "| Flag | Value | Default | Meaning |", "|---|---|---|---|"]
        lines.append(
            f"| `{flag.spelling}` | {_cell(_value(flag))} | {_cell(_default(flag))} | {_cell(_meaning(flag))} |"
        )
    return "\n".join(lines) + "\n"


def _value(flag: Flag) -> str:
    if flag.kind is bool:
        return "switch"
    if flag.choices:
        return ", ".join(str(choice) for choice in flag.choices)
    word = {int: "whole number", float: "number", str: "text", dict: "JSON"}[flag.kind]
    details = ", ".join(part for part in (flag.unit, flag.bounds.text if flag.bounds else "") if part)
    return (f"{word}: {details}" if details else word) + (", several" if flag.many else "")


def _default(flag: Flag) -> str:
    if flag.kind is bool:
        return "on" if flag.default else "off"
    return "" if flag.default in (None, (), {}) else str(flag.default)


def _meaning(flag: Flag) -> str:
    return flag.help + (" (*no effect here*)" if flag.effect == SATISFIED else "")


def metrics_page() -> str:
    """Every number that a run logs, with unit and meaning."""
    lines = [
        "# Metrics",
        "",
        "Made from `miles/observe/names.py` by `python -m miles.report.reference`. A run writes them to",
        "`metrics.jsonl` (one record per step and per evaluation) and to `log.txt`; trackers mirror them. `<...>`",
        "stands for a part that varies. A rollout of several optimizer steps has the means of their `train/...`, the",
        "lowest `_min`, the highest `_max` and sums of what was skipped; `log.txt` has each.",
    ]
    for prefix, title in GROUPS.items():
        found = [(name, metric) for name, metric in METRICS.items() if name.split("/")[0] == prefix]
        lines += ["", f"## {title}", "", "| Metric | Unit | Meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {_cell(metric.unit)} | {_cell(metric.meaning)} |" for name, metric in found]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """As Markdown shows it: a bar would end the cell, `<` would begin a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


PAGES = {"flags.md": flags_page, "metrics.md": metrics_page}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs")
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
