"""`miles reward test | check`: rewards on stored answers and labels, without a model."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from miles.config.parse import parse_flags
from miles.config.sections import RunConfig
from miles.errors import ConfigError
from miles.rollout.reward_lab import (
    RECORDED,
    Compared,
    LabelCheck,
    append_cases,
    check_labels,
    compare,
    config_of,
    page,
    read_stored,
)

NUM_SHOWN = 20
DEFAULT_REWARD = "math"


def run(argv: list[str]) -> int:
    """`miles reward ...`; returns the exit code."""
    own, flags = _parser().parse_known_args(argv)
    settings = parse_flags(flags).config
    if settings.reward.rm_type is None and settings.reward.custom_rm_path is None:
        settings = config_of(DEFAULT_REWARD, settings)
    return _test(own, settings) if own.action == "test" else _check(own, settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miles reward",
        description="Grade stored answers, or check the labels of a data set. Every reward flag of `miles train` is "
        f"accepted: --rm-type (default {DEFAULT_REWARD}), --custom-rm-path, --reward-key, --group-rm, --rm-timeout, "
        "--rm-url, ... Labels come from --label-key, else from the column label or answer.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="test | check")
    test = actions.add_parser("test", help="grade the answers of a file or of a run", allow_abbrev=False)
    test.add_argument("file", metavar="FILE", help="JSONL or parquet file, FILE@[a:b], or a run folder")
    test.add_argument(
        "--against", metavar="Y", help=f"another reward type or import path, or {RECORDED}: the rewards in the file"
    )
    test.add_argument("--response-key", default="response", help="column of the answer (default response)")
    test.add_argument("--html", metavar="PAGE", type=Path, help="also write all rows as one HTML page")
    test.add_argument("--cases", metavar="CASES", type=Path, help="JSONL file that the answers of --keep are added to")
    test.add_argument(
        "--keep", nargs="+", default=[], metavar="N=right", help="answers that become test cases: 3=right"
    )
    check = actions.add_parser("check", help="check that labels can be graded", allow_abbrev=False)
    check.add_argument("file", nargs="+", metavar="FILE", help="JSONL or parquet files of prompts")
    return parser


def _test(own: argparse.Namespace, settings: RunConfig) -> int:
    chosen = _chosen(own.keep)
    if bool(chosen) != (own.cases is not None):
        raise ConfigError("--keep and --cases go together: which answers become test cases, and in which file")
    data, reward = settings.data, settings.reward
    stored = read_stored(
        own.file, response_key=own.response_key, label_key=data.label_key, metadata_key=data.metadata_key
    )
    name = reward.custom_rm_path or reward.rm_type
    assert name is not None, "run asks for one"
    rows = compare(stored, config_of(name, settings), against=own.against)
    _show(rows, name, own.against, Console())
    if own.html is not None:
        own.html.write_text(page(rows, reward=name, against=own.against), encoding="utf-8")
        print(f"wrote {own.html}")
    if own.cases is not None:
        append_cases(own.cases, rows, chosen)
        print(f"added {len(chosen)} cases to {own.cases}")
    return 0


def _chosen(keep: Sequence[str]) -> dict[int, bool]:
    chosen = {}
    for text in keep:
        match = re.fullmatch(r"(\d+)=(right|wrong)", text)
        if match is None:
            raise ConfigError(f"--keep {text}: expected the number of an answer and its verdict, as in 3=right 7=wrong")
        chosen[int(match[1])] = match[2] == "right"
    return chosen


def _show(rows: Sequence[Compared], name: str, against: str | None, console: Console) -> None:
    rewards = [row.verdict.reward for row in rows if row.verdict.reward is not None]
    times = sorted(row.verdict.seconds * 1000 for row in rows)
    counts = Counter(rewards).most_common(8)
    num_silent = sum(row.verdict.answer is None for row in rows)
    mean = sum(rewards) / len(rewards) if rewards else float("nan")
    lines = [
        f"{len(rows)} answers graded by {name}: mean reward {mean:.4f}",
        f"rewards: {', '.join(f'{count} x {value:g}' for value, count in counts) or 'none'}",
        f"no answer found: {num_silent}; not graded: {len(rows) - len(rewards)}",
        f"time of an answer: median {times[len(times) // 2]:.2f} ms, p99 {times[int(len(times) * 0.99)]:.2f} ms, "
        f"max {times[-1]:.2f} ms",
    ]
    failed = [row for row in rows if row.verdict.problem][:3]
    lines += [f"not graded: answer {row.number}: {row.verdict.problem}" for row in failed]
    if against is not None:
        num_apart = sum(row.disagrees for row in rows)
        lines.append(f"disagreements with {against}: {num_apart} ({num_apart / len(rows):.2%})")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if any(row.disagrees for row in rows):
        console.print(_disagreements(rows, name, str(against)))


def _disagreements(rows: Sequence[Compared], name: str, against: str) -> Table:
    apart = [row for row in rows if row.disagrees]
    table = Table("#", "label", "answer read", name, against, "response ends with", show_lines=True)
    for row in apart[:NUM_SHOWN]:
        values = [row.number, row.stored.sample.label, row.verdict.answer, row.verdict.reward, row.other]
        shown = ["-" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        table.add_row(*(_plain(text) for text in shown), _plain(row.stored.sample.response[-200:]))
    if len(apart) > NUM_SHOWN:
        table.caption = f"{len(apart) - NUM_SHOWN} more; --html PAGE shows all"
    return table


def _plain(text: str) -> str:
    return text[:200].replace("[", "\\[")


def _check(own: argparse.Namespace, settings: RunConfig) -> int:
    if settings.reward.custom_rm_path is not None:
        raise ConfigError("--custom-rm-path: only built-in rewards can write an answer from a label; use --rm-type")
    data = settings.data
    checked = check_labels(own.file, settings, label_key=data.label_key, metadata_key=data.metadata_key)
    _show_check(checked, str(settings.reward.rm_type))
    return 0 if checked.is_good else 1


def _show_check(checked: LabelCheck, name: str) -> None:
    num_read = checked.num_labels - len(checked.unreadable)
    print(f"{checked.num_labels} labels for {name}: {num_read} can be read")
    if not checked.num_tried:
        print("no label tells a right answer, so equality was not tried")
    else:
        print(f"{checked.num_tried - len(checked.unequal)} of {checked.num_tried} are equal to themselves")
        print(f"{checked.num_tried - len(checked.blind)} of {checked.num_tried} differ from a changed one")
    for title, rows in (
        ("cannot be read", checked.unreadable),
        ("not equal to themselves", checked.unequal),
        ("equal to a changed one", checked.blind),
    ):
        for place, text in rows[:NUM_SHOWN]:
            print(f"  {title}: {place}: {text}")
        if len(rows) > NUM_SHOWN:
            print(f"  and {len(rows) - NUM_SHOWN} more that are {title}")
