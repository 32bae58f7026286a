"""`miles watch`: guard a run from outside, or replay the rule over a log."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from miles.errors import ConfigError
from miles.loop.watch import (
    RUN_ENDED,
    RUN_STOPPED,
    ContainerTarget,
    FolderTarget,
    HeatWait,
    ProcessTarget,
    Target,
    watch,
)
from miles.observe import error_rule
from miles.observe.error_rule import Limits, Replay, dead_engine, read_timeline, replay
from miles.observe.heat import PAUSES_NAME, HeatLimits, NvmlSensor


def run(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.checks < 1 or arguments.limit < 0 or arguments.no_step_minutes < 0:
        raise ConfigError("--checks must be at least 1, --limit and --no-step-minutes at least 0")
    limits = Limits(arguments.limit, arguments.checks, arguments.no_step_minutes * 60)
    if arguments.replay is not None:
        return _replay(arguments.replay, limits)
    target = _target(arguments)
    pauses = arguments.pauses or (arguments.run / PAUSES_NAME if arguments.run else None)
    # Ends as Ctrl+C does, so that a paused run is resumed.
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.ExitStack() as stack:
        wait = None
        if arguments.heat:
            heat = HeatLimits(arguments.heat_pause, arguments.heat_resume)
            wait = stack.enter_context(HeatWait(target, NvmlSensor(), heat, _say, pauses))
        _say(f"{target.name}: watched every {error_rule.INTERVAL_S} s")
        return watch(target, limits, _say, wait=wait)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miles watch",
        description="Watch a run, of this Miles or of the public one, and stop it when it is dead. Exit codes: 0 the "
        "run ended by itself, 1 the watch stopped it, 2 the watch cannot see it.",
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("run", nargs="?", type=Path, help="a run folder")
    what.add_argument("--pid", type=int, help="a process; its log is given with --log")
    what.add_argument("--container", help="a container, seen through `docker`")
    what.add_argument("--replay", type=Path, metavar="LOG", help="what the rule would have done with this log")
    parser.add_argument("--log", type=Path, help="log file of --pid")
    parser.add_argument("--limit", type=int, default=error_rule.LIMIT, help="errors of 60 s that are too many (100)")
    parser.add_argument("--checks", type=int, default=error_rule.CHECKS, help="checks in a row above the limit (10)")
    parser.add_argument(
        "--no-step-minutes",
        type=float,
        default=error_rule.NO_STEP_MINUTES,
        help="longest time without a line of a step; 0: any (60); 10 at most after an error that no run survives",
    )
    parser.add_argument("--heat", action="store_true", help="pause the run while a GPU is hot")
    parser.add_argument("--heat-pause", type=float, default=84.0, help="pause at this temperature in C (84)")
    parser.add_argument("--heat-resume", type=float, default=74.0, help="go on at this temperature in C (74)")
    parser.add_argument("--pauses", type=Path, help=f"file for the pauses; default: {PAUSES_NAME} of a run folder")
    return parser


def _target(arguments: argparse.Namespace) -> Target:
    if arguments.container is not None:
        return ContainerTarget(arguments.container)
    if arguments.pid is not None:
        if arguments.log is not None and not arguments.log.is_file():
            raise ConfigError(f"--log {arguments.log} is not a file")
        return ProcessTarget(arguments.pid, arguments.log)
    return FolderTarget(arguments.run)


def _replay(path: Path, limits: Limits) -> int:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            timeline = read_timeline(file)
    except OSError as error:
        raise ConfigError(f"--replay {path}: {error.strerror}") from error
    if timeline is None:
        raise ConfigError(f"--replay {path}: no line begins with a time stamp such as [2026-10-22 07:16:29]")
    print(
        f"{path}: {len(timeline.errors)} errors in {timeline.end} s from {timeline.first}, checks every "
        f"{error_rule.INTERVAL_S} s over the last {error_rule.WINDOW_S} s, limit {limits.errors}"
    )
    print(f"{'checks':>6}  {'this run stopped':<16}  {'most in a row':>13}  {'after':<12}  a dead engine stopped after")
    for checks in sorted({6, 8, 10, limits.checks}):
        tried = Limits(limits.errors, checks)
        done, dead = replay(timeline, tried), dead_engine(tried)
        share = f"{done.num_stopped} of {error_rule.NUM_OFFSETS}"
        print(f"{checks:>6}  {share:<16}  {done.most_in_a_row:>13}  {_range(done):<12}  {_range(dead)}")
    stopped = replay(timeline, limits).num_stopped > 0
    minutes = timeline.longest_gap_s / 60
    too_long = bool(limits.no_step_s) and timeline.longest_gap_s >= limits.no_step_s
    print(f"longest time without a line of a step: {minutes:.1f} minutes{', which stops the run' if too_long else ''}")
    return RUN_STOPPED if stopped or too_long else RUN_ENDED


def _range(done: Replay) -> str:
    return "-" if done.stopped_after is None else f"{done.stopped_after[0]} to {done.stopped_after[1]} s"


def _say(text: str) -> None:
    print(f"{datetime.now(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')} {text}", flush=True)


def _interrupt(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)
