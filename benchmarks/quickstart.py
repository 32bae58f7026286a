"""What the quickstart learns: five seeds, and two controls that must not learn.

    python benchmarks/quickstart.py [--seeds 5] [--write FOLDER]

Runs `miles quickstart` as a user does, one run after another, each with `--json`, and ends with one JSON line. A run
counts as learned when held-out accuracy goes from under 0.4 to above 0.9.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import record

KEPT = ("seed", "held_out_before", "held_out_after", "seconds", "steps", "reward_curve", "held_out_curve")
CONTROLS = {"random reward": ["--rm-type", "random"], "learning rate 0": ["--lr", "0"]}


def quickstart(folder: Path, *flags: str) -> dict[str, Any]:
    outcome = folder / "outcome.json"
    command = [sys.executable, "-m", "miles", "quickstart", "--runs-dir", str(folder), "--json", str(outcome), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads(outcome.read_text())
    return {name: result[name] for name in KEPT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = [quickstart(Path(scratch), "--seed", str(seed)) for seed in range(arguments.seeds)]
        controls = {name: quickstart(Path(scratch), *flags) for name, flags in CONTROLS.items()}
    for run in [*runs, *controls.values()]:
        print(f"seed {run['seed']}: {run['held_out_before']:.3f} -> {run['held_out_after']:.3f} in {run['seconds']} s")
    result = {
        "name": "quickstart",
        "seconds": max(run["seconds"] for run in runs),
        "limit_seconds": 180.0,
        "learned": [run["held_out_before"] < 0.4 and run["held_out_after"] > 0.9 for run in runs],
        "controls_learned": {name: run["held_out_after"] > 0.4 for name, run in controls.items()},
        "runs": runs,
        "controls": controls,
        "peers": {},
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
