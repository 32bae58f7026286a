"""`miles diagnose RUN`: why a run is flat, collapsing, slow or dead, with evidence and the flag to change."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from miles.cli.report import open_console, print_findings
from miles.report.diagnose import diagnose
from miles.report.html import headline
from miles.report.ranges import load_ranges
from miles.report.runs import open_run
from miles.report.summary import state

FOUND = 1  # exit code when something is broken, so that a script can ask


def run(argv: Sequence[str]) -> int:
    """`miles diagnose ...`; returns the exit code: 1 when a finding is bad, else 0."""
    parser = argparse.ArgumentParser(prog="miles diagnose", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or a log of this or of public Miles")
    parser.add_argument("--pauses", type=Path, metavar="FILE", help="log of a heat guard")
    parser.add_argument("--ranges", type=Path, metavar="FILE", help="healthy ranges of `miles compare --ranges`")
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON list")
    arguments = parser.parse_args(argv)
    data = open_run(arguments.run, pauses=arguments.pauses)
    ranges = load_ranges(arguments.ranges) if arguments.ranges is not None else None
    findings = diagnose(data, ranges=ranges)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        console = open_console()
        console.print(Text.assemble((data.name, "bold"), f"  {state(data)}  ", (headline(data), "bright_black")))
        print_findings(console, findings)
    return FOUND if any(finding.level == "bad" for finding in findings) else 0
