"""`miles train`: parse, open the run folder, supervise a worker."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from miles.config.explain import explain_text
from miles.config.parse import Parsed, parse_train
from miles.loop.in_process import run_in_process
from miles.loop.run_folder import open_run_folder
from miles.loop.supervisor import TRAIN, supervise


def run(argv: list[str]) -> int:
    return start(parse_train(argv), command=["miles", "train", *argv])


def start(parsed: Parsed, *, command: Sequence[str], function: str = TRAIN) -> int:
    """Explain or run these settings; `command` is what the user typed, shown again as the way to resume, and
    `function` what the worker does."""
    if parsed.explain:
        print(explain_text(parsed), end="", flush=True)
        return 0
    config = parsed.config
    folder = open_run_folder(config, command=command)
    print(f"run folder: {folder.path}", file=sys.stderr)
    resume_command = shlex.join(command)
    try:
        if config.process.in_process:
            return run_in_process(config, folder, resume_command=resume_command, train=function)
        return supervise(folder, config.process, resume_command=resume_command, train=function)
    finally:
        folder.close()
