"""`miles report RUN`: one look at a run, on the terminal and as one page that needs nothing from outside."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from miles.errors import ConfigError, StorageError
from miles.observe.atomic import write_atomically
from miles.report.capture import check_results, check_run
from miles.report.diagnose import diagnose
from miles.report.findings import Finding
from miles.report.html import headline, render_report
from miles.report.ranges import Ranges, load_ranges
from miles.report.runs import RunData, open_run
from miles.report.summary import duration, median_phases, number, signal_summaries, state, stored_summary, timings

COLOURS = {
    "blue": "blue", "violet": "magenta", "green": "green", "amber": "yellow",
    "teal": "cyan", "rose": "red", "grey": "bright_black",
}  # fmt: skip
RESULTS = Path("benchmarks/results")
PIPE_WIDTH = 140
_BLOCKS = "▁▂▃▄▅▆▇█"


def run(argv: Sequence[str]) -> int:
    """`miles report ...`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="miles report", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="run folder, or a log of this or of public Miles"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="page to write; default: in the run folder")
    parser.add_argument("--pauses", type=Path, metavar="FILE", help="log of a heat guard")
    parser.add_argument("--ranges", type=Path, metavar="FILE", help="healthy ranges of `miles compare --ranges`")
    parser.add_argument(
        "--check", action="store_true", help="follow every stored figure of the run from its raw data, and stop"
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="with --check: also of the benchmark results in this folder"
    )
    arguments = parser.parse_args(argv)
    if arguments.check:
        return print_checks(arguments)
    if arguments.run is None:
        raise ConfigError("miles report needs a run folder or a log")
    data = open_run(arguments.run, pauses=arguments.pauses)
    ranges = load_ranges(arguments.ranges) if arguments.ranges is not None else None
    print_report(data, ranges=ranges)
    page = arguments.html or (data.folder / "report.html" if data.folder else Path(f"{data.name}.report.html"))
    _write(page, render_report(data, ranges=ranges))
    if data.folder is not None:
        _write(data.folder / "summary.json", json.dumps(stored_summary(data), indent=2) + "\n")
    print(f"page: {page}")
    return 0


def print_checks(arguments: argparse.Namespace) -> int:
    """The capture kit; exit code 1 when a figure does not follow."""
    checks = []
    if arguments.run is not None:
        checks += check_run(open_run(arguments.run, pauses=arguments.pauses))
    folder = arguments.results or (RESULTS if RESULTS.is_dir() and arguments.run is None else None)
    if folder is not None:
        checks += check_results(folder)
    if not checks:
        raise ConfigError("there is nothing to check: name a run, or a folder of results with --results")
    for check in checks:
        word = {True: "ok", False: "WRONG", None: "no raw data"}[check.ok]
        print(f"{word:<12} {check.name}: {check.detail}")
    num_wrong = sum(check.ok is False for check in checks)
    print(f"{len(checks)} checks, {num_wrong} wrong")
    return 1 if num_wrong else 0


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}; --html names another file") from error


def open_console() -> Console:
    """A terminal as wide as it is; a pipe or a file gets lines that need no wrapping."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_report(data: RunData, *, ranges: Ranges | None = None) -> None:
    """The terminal version: signals, phases, clean medians, findings."""
    console = open_console()
    console.print(Text.assemble((data.name, "bold"), f"  {state(data)}  ", (headline(data), "bright_black")))
    console.print(_signal_table(data))
    phases = median_phases(data)
    if phases:
        console.print(_phase_table(data))
        console.print(_timing_table(data))
    print_findings(console, diagnose(data, ranges=ranges))


def _signal_table(data: RunData) -> Table:
    table = _table("the eight signals")
    for title in ("", "first", "last", "first ten", "over the run"):
        table.add_column(title, justify="left" if title in ("", "over the run") else "right", no_wrap=True)
    for item in signal_summaries(data):
        low, high = item.first_ten
        mark = "• " if item.signal.first_five else "  "
        values = [value for _, value in item.points]
        table.add_row(
            Text(mark + item.signal.title, COLOURS[item.signal.hue]),
            number(item.first),
            number(item.last),
            f"{number(low)} to {number(high)}",
            Text(spark(values), COLOURS[item.signal.hue]),
        )
    return table


def _table(title: str, *, show_header: bool = True) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=show_header
    )


def spark(values: Sequence[float], width: int = 14) -> str:
    """A line of block characters, each the mean of a stretch of steps."""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for start in range(0, len(values), size) if (part := values[start : start + size])]
    finite = [mean for mean in means if mean == mean and abs(mean) != float("inf")]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        _BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] if mean in finite else "!" for mean in means
    )


def _phase_table(data: RunData) -> Table:
    phases = median_phases(data)
    total = sum(phase.seconds for phase in phases) or 1.0
    table = _table("where the time of one step goes (median)", show_header=False)
    for phase in phases:
        share = phase.seconds / total
        bar = "█" * max(1, round(share * 40)) if share > 0.002 else "▏"
        table.add_row(phase.title, Text(bar, COLOURS[phase.hue]), duration(phase.seconds), f"{share:.1%}")
    return table


def _timing_table(data: RunData) -> Table:
    table = _table("medians over all and over clean steps")
    for title in ("", "all", "clean", "clean steps"):
        table.add_column(title, justify="left" if not title else "right")
    for row in timings(data):
        clean = "–" if row.clean_s is None else duration(row.clean_s)
        table.add_row(row.title, duration(row.all_s), clean, f"{row.num_clean} of {row.num_steps}")
    return table


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Ranked, with evidence and the flags to change."""
    if not findings:
        console.print("\n[green]No known sign of a broken run.[/green]")
        return
    console.print("\n[bold]what needs a look[/bold]")
    for place, finding in enumerate(findings, start=1):
        colour = {"bad": "red", "watch": "yellow", "note": "bright_black"}[finding.level]
        console.print(Text(f"{place}. {finding.title}", f"bold {colour}"))
        for line in finding.evidence:
            console.print(Text(f"     {line}"))
        flags = f"  [{', '.join(finding.flags)}]" if finding.flags else ""
        console.print(Text(f"   > {finding.advice}{flags}"))
