"""`miles rehearse`: what happens to this run when something goes wrong."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from miles.config.parse import parse_train
from miles.errors import ConfigError
from miles.loop.rehearse import NUM_ROLLOUT, PROMISES, STEP, Outcome, rehearse
from miles.observe.environment import describe_environment


def run(argv: list[str]) -> int:
    """Takes the flags of `miles train` and its own. Exit code 1 when a promise was broken."""
    own, flags = _parser().parse_known_args(argv)
    if unknown := [fault for fault in own.faults if fault not in PROMISES]:
        raise ConfigError(f"--faults {unknown[0]!r}: there are {', '.join(PROMISES)}")
    config = parse_train(flags, command="rehearse").config
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(own.faults)} faults at step {STEP} of {NUM_ROLLOUT}, each in a small run of these settings")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="miles-rehearse-") as scratch:
        outcomes = rehearse(config, Path(scratch), own.faults, lambda outcome: _say(console, outcome))
    console.print(_table(outcomes))
    if own.json is not None:
        record = _record(outcomes, seconds=time.monotonic() - start, command=["miles", "rehearse", *argv])
        own.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 1 if any(outcome.problem for outcome in outcomes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miles rehearse",
        description="Run these settings in small, once for each fault, and check that what is promised happens. Takes "
        "every flag of `miles train` too.",
        allow_abbrev=False,
    )
    parser.add_argument("--faults", nargs="+", default=list(PROMISES), metavar="FAULT", help=", ".join(PROMISES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    return parser


def _say(console: Console, outcome: Outcome) -> None:
    status = Text("broken", style="bold red") if outcome.problem else Text("kept  ", style="green")
    console.print(status + Text(f" {outcome.fault}: {outcome.problem or outcome.outcome}"))


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("fault", "outcome", "seconds to detect", "steps lost")
    for outcome in outcomes:
        detect = "" if outcome.detect_s is None else f"{outcome.detect_s:.1f}"
        table.add_row(outcome.fault, outcome.problem or outcome.outcome, detect, str(outcome.steps_lost))
    return table


def _record(outcomes: list[Outcome], *, seconds: float, command: list[str]) -> dict[str, Any]:
    environment = describe_environment(command=command, model_folder=None, seeds={})
    return {
        "name": "rehearsal",
        "seconds": round(seconds, 1),
        "num_broken": sum(bool(outcome.problem) for outcome in outcomes),
        "faults": [outcome.as_json() for outcome in outcomes],
        "hardware": environment["hardware"],
        "versions": environment["versions"],
        "commit": environment["commit"],
        "date": date.today().isoformat(),
        "command": environment["command"],
    }
