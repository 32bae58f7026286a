"""Does training only adapters learn as well as training everything? The quickstart's task, two seeds, two controls.

    python benchmarks/lora_learning.py [--seeds 2] [--rank 8] [--lr 2e-3] [--write FOLDER]

Each run is `miles quickstart` as a user starts it, with and without `--lora-rank`; the controls train adapters on a
random reward and at learning rate 0. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import record
from benchmarks.quickstart import quickstart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    lora = ["--lora-rank", str(arguments.rank), "--lr", str(arguments.lr)]
    controls = {"random reward": ["--rm-type", "random"], "learning rate 0": ["--lr", "0"]}
    with tempfile.TemporaryDirectory() as scratch:
        runs: dict[str, list[dict[str, Any]]] = {
            name: [quickstart(Path(scratch), "--seed", str(seed), *flags) for seed in range(arguments.seeds)]
            for name, flags in (("lora", lora), ("full", []))
        }
        checks = {name: quickstart(Path(scratch), *lora, *flags) for name, flags in controls.items()}
    for name, outcomes in (*runs.items(), *((name, [outcome]) for name, outcome in checks.items())):
        for run in outcomes:
            print(f"{name}, seed {run['seed']}: {run['held_out_before']:.3f} -> {run['held_out_after']:.3f}")
    after = {name: [run["held_out_after"] for run in outcomes] for name, outcomes in runs.items()}
    result = {
        "name": "lora_learning",
        "seconds": max(run["seconds"] for run in runs["lora"]),
        "peers": {"full": {"seconds": max(run["seconds"] for run in runs["full"]), "version": "this commit"}},
        "rank": arguments.rank,
        "lr": arguments.lr,
        "held_out_after": after,
        "learns_as_well": min(after["lora"]) > min(after["full"]) - 0.02,
        "controls_learned": {name: outcome["held_out_after"] > 0.4 for name, outcome in checks.items()},
        "runs": runs,
        "controls": checks,
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
