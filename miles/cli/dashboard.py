"""`miles dashboard`: a live page for one or many runs, on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from miles.errors import ConfigError
from miles.report.ranges import load_ranges
from miles.report.server import serve

DEFAULT_RUNS = Path("runs")


def run(argv: Sequence[str]) -> int:
    """`miles dashboard ...`; serves until interrupted."""
    parser = argparse.ArgumentParser(prog="miles dashboard", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "folders", type=Path, nargs="*", default=[DEFAULT_RUNS], metavar="FOLDER",
        help=f"run folders, or folders that hold some; default: {DEFAULT_RUNS}",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    parser.add_argument("--port", type=int, default=7788, help="port, 0 for a free one; default: 7788")
    parser.add_argument("--ranges", type=Path, metavar="FILE", help="healthy ranges of `miles compare --ranges`")
    arguments = parser.parse_args(argv)
    missing = [str(folder) for folder in arguments.folders if not folder.is_dir()]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: there is no such folder; name run folders or a folder of them")
    ranges = load_ranges(arguments.ranges) if arguments.ranges is not None else None
    serve(arguments.folders, host=arguments.host, port=arguments.port, ranges=ranges)
    return 0
