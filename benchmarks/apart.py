"""Measure software in a process of its own, so that its packages, its memory and its failures stay its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent / "peers"
ENVIRONMENT = dict(os.environ)  # as it was given: what Miles sets for itself here is nothing that peers chose


def paths_by_name(given: list[str]) -> dict[str, str]:
    """Of options NAME=FOLDER[:FOLDER...]."""
    found = {}
    for text in given:
        name, folders = text.split("=", 1)
        found[name] = os.pathsep.join(str(Path(folder).resolve()) for folder in folders.split(os.pathsep))
    return found


def measure_apart(
    script: str, job: dict[str, Any], *, folder: Path, paths: str | None, limit_seconds: float
) -> tuple[list[dict[str, Any]], str | None]:
    """Run a script of `benchmarks/peers` on a job. What it found, and the end of its output if it failed.

    `paths`: folders of its packages; None is this repository. `folder` gets its job, its findings and its output.
    """
    name = job["part"]
    found, job_file, log = folder / f"{name}.found.jsonl", folder / f"{name}.job.json", folder / f"{name}.log"
    found.write_text("", encoding="utf-8")
    job_file.write_text(json.dumps({**job, "found": str(found)}), encoding="utf-8")
    environment = ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    packages = [paths or str(REPOSITORY), ENVIRONMENT.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, packages))
    print(f"{name}: started, {limit_seconds:.0f} s at most", flush=True)
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / script), str(job_file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        reason = None
        try:
            code = process.wait(timeout=limit_seconds)
            reason = f"exit code {code}" if code != 0 else None
        except subprocess.TimeoutExpired:
            reason = f"not done after {limit_seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
            process.wait()
    findings = [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()]
    error = None if reason is None else f"{reason}: {last_lines(log)}"
    print(f"{name}: {error or 'done'} ({time.perf_counter() - start:.0f} s)", flush=True)
    return findings, error


def last_lines(log: Path, *, count: int = 12) -> str:
    lines = [line.rstrip()[:300] for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return "\n".join([line for line in lines if line and not line.startswith("FOUND")][-count:])
