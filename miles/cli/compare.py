"""`miles compare A B ...`: did a change help? The first run's setup is the baseline; runs that differ only in their
seeds count as one setup."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from miles.cli.report import open_console
from miles.errors import ConfigError
from miles.report.compare import Arm, Comparison, arm, compare, make_arms
from miles.report.ranges import build_ranges, save_ranges
from miles.report.runs import open_run
from miles.report.signals import BY_KEY
from miles.report.spread import REAL
from miles.report.summary import number


def run(argv: Sequence[str]) -> int:
    """`miles compare ...`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="miles compare", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders or logs, the baseline first")
    parser.add_argument(
        "--against", type=Path, nargs="+", default=[], metavar="RUN",
        help="runs of the change: then all RUNs before are the baseline, whatever their settings",
    )  # fmt: skip
    parser.add_argument(
        "--ranges", type=Path, metavar="FILE", help="write the healthy ranges of all RUNs, seeds of one setup, to FILE"
    )
    parser.add_argument("--pauses", type=Path, metavar="FILE", help="log of a heat guard, for times on clean steps")
    arguments = parser.parse_args(argv)
    runs = [open_run(path, pauses=arguments.pauses) for path in arguments.runs]
    if arguments.ranges is not None:
        if len(make_arms([run for run in runs if run.settings])) > 1:
            raise ConfigError("--ranges takes seeds of one setup, but the settings of these runs differ")
        ranges = build_ranges(runs)
        save_ranges(arguments.ranges, ranges)
        for key, (low, high) in ranges.every.items():
            print(f"{BY_KEY[key].title}: {number(low)} to {number(high)}")
        print(f"healthy ranges of {len(runs)} runs: {arguments.ranges}")
        return 0
    if arguments.against:
        changed = [open_run(path, pauses=arguments.pauses) for path in arguments.against]
        baseline, changes = arm(runs), [arm(changed)]
    else:
        baseline, *changes = make_arms(runs)
    if not changes:
        raise ConfigError(
            "these runs have the same settings: seeds of one setup. --ranges FILE makes healthy ranges of them, "
            "--against RUN ... compares them with other runs"
        )
    console = open_console()
    for change in changes:
        print_comparison(console, compare(baseline, change))
    return 0


def print_comparison(console: Console, result: Comparison) -> None:
    """Numbers with verdicts, times on common clean steps, and what differs."""
    console.print(Text.assemble(("baseline  ", "bright_black"), _names(result.baseline)))
    console.print(Text.assemble(("change    ", "bright_black"), _names(result.change)))
    console.print(_verdict_table(result))
    if any(row.baseline_s is not None for row in result.times):
        console.print(_time_table(result))
    for title, rows in (("settings that differ", result.settings), ("environment that differs", result.environment)):
        if rows:
            table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
            for name in ("", "baseline", "change"):
                table.add_column(name, overflow="fold")
            for row in rows:
                table.add_row(*row)
            console.print(table)
    for warning in result.warnings:
        console.print(Text(f"note: {warning}", "yellow"))


def _names(side: Arm) -> str:
    return ", ".join(run.name for run in side.runs)


def _verdict_table(result: Comparison) -> Table:
    title = f"means of steps {result.window[0]} to {result.window[-1]}, which all runs have"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("", "baseline", "change", "difference", "95 % interval", "seed spread", "verdict"):
        table.add_column(name, justify="left" if name in ("", "verdict") else "right", no_wrap=True)
    for row in result.rows:
        verdict = row.verdict
        colour = "green" if verdict.word == REAL else "bright_black"
        table.add_row(
            row.title,
            number(verdict.baseline),
            number(verdict.change),
            f"{verdict.difference:+.3g}",
            f"{verdict.low:+.3g} to {verdict.high:+.3g}",
            number(verdict.spread),
            Text(verdict.text, colour),
        )
    return table


def _time_table(result: Comparison) -> Table:
    table = Table(
        title="median seconds on the steps that are clean in all runs",
        title_justify="left", title_style="bold", box=None, pad_edge=False,
    )  # fmt: skip
    for name in ("", "baseline", "change", "ratio", "steps"):
        table.add_column(name, justify="left" if not name else "right")
    for row in result.times:
        ratio = row.change_s / row.baseline_s if row.baseline_s and row.change_s is not None else None
        table.add_row(row.title, number(row.baseline_s), number(row.change_s), number(ratio), str(row.num_steps))
    return table
