"""`miles COMMAND ...`: finds the command's module, runs it, and turns errors into one message and an exit code.

A module is imported when its command runs, so that `miles --help` needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

from miles import __version__
from miles.config.flags import closest
from miles.errors import ConfigError, MilesError

COMMANDS = {
    "quickstart": "train a tiny model on this machine in under three minutes, and show what it learned",
    "train": "train a model with reinforcement learning, or on given answers",
    "reward": "grade stored answers offline, compare two rewards, check the labels of a data set",
    "check": "say before a run whether it can work: hooks, data, labels, model, memory, disk, log-probs, step time",
    "plan": "estimate memory, disk and time of a run without a GPU, and name what fits",
    "rehearse": "rehearse what can go wrong in a run: kills, hangs, a full disk, bad numbers",
    "eval": "evaluate a model or a checkpoint on sets of prompts",
    "hooks": "list the hooks: functions of yours that replace or extend a part of a run",
    "watch": "watch a run from outside and stop it when it is dead; pause it while the GPU is hot",
    "report": "show one run: on the terminal and as a page",
    "compare": "say whether a change helped: two setups, each with one or more seeds",
    "diagnose": "find out why a run is flat, collapsing, slow or dead",
    "dashboard": "show runs on a live page of this machine",
    "models": "list and fetch models that Miles can turn into a Hugging Face folder",
    "convert": "turn a GGUF file or a checkpoint into a Hugging Face folder",
}

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    _open_streams()
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except MilesError as error:
        print(error_text(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("miles: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe such as `miles train --help | head` has left; nothing more can be printed.
        return 1
    finally:
        _end_output()


def _open_streams() -> None:
    """A closed stream becomes `/dev/null`, and what a terminal cannot show is printed as an escape: neither may end a
    run. The numbers of closed streams would otherwise go to the next files and pipes."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end_output() -> None:
    """Print what is left, here, where a terminal that has gone away changes no exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h", "help"):
        print(_help(), end="", flush=True)
        return 0
    if name in ("--version", "-V"):
        print(f"miles {__version__}")
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"there is no command {name!r}{closest(name, COMMANDS)}; `miles --help` lists them")
    return int(importlib.import_module(f"miles.cli.{name}").run(arguments[1:]))


def error_text(error: MilesError) -> str:
    """One sentence, or a numbered list when several settings are wrong."""
    if isinstance(error, ConfigError) and len(error.violations) > 1:
        numbered = [f"  {number}. {text}" for number, text in enumerate(error.violations, start=1)]
        return "\n".join([f"miles: {len(numbered)} things are wrong with the settings", *numbered])
    return f"miles: {error}"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: miles COMMAND [--help] ...", "", "Commands:"]
    lines += [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    lines += ["", "miles COMMAND --help shows the flags of a command; miles --version shows the version."]
    return "\n".join(lines) + "\n"
