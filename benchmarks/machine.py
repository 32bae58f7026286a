"""The record that every benchmark ends with."""

from __future__ import annotations

import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from miles.observe.environment import describe_environment


def record(result: dict[str, Any], *, write: Path | None, on_cpu: bool = False) -> None:
    """Add hardware, versions, commit, date and command; print one JSON line, and store it when asked to.

    The hardware is the GPU where there is one, unless all was computed `on_cpu`.
    """
    command = [os.path.relpath(sys.argv[0]), *sys.argv[1:]]  # `python -m` makes it absolute
    environment = describe_environment(command=command, model_folder=None, seeds={})
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and not on_cpu else None
    result |= {
        "hardware": gpu or environment["hardware"]["cpu"],
        "versions": environment["versions"],
        # A copy of the tree on another machine has no repository: its commit is handed over.
        "commit": environment["commit"] or os.environ.get("MILES_COMMIT"),
        "date": date.today().isoformat(),
        "command": environment["command"],
    }
    if write is not None:
        write.mkdir(parents=True, exist_ok=True)
        hardware = "".join(letter if letter.isalnum() else "-" for letter in result["hardware"].lower()).strip("-")
        path = write / f"{result['name']}_{hardware}_{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)
