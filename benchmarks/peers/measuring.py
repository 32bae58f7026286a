"""What every measurement in a process of its own shares: its job, and one JSON line for each thing it has found.

Imports nothing but the standard library: the software under test brings its own versions of the rest.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
Generate = Callable[[list[list[int]], list[int]], tuple[list[list[int]], list[list[float]]]]


def read_job() -> dict[str, Any]:
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


def emit(job: dict[str, Any], **found: Any) -> None:
    """Say at once what is known, so that it is kept when this process ends early."""
    with Path(job["found"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    print("FOUND", json.dumps(found)[:2000], flush=True)


def since_start() -> float:
    return time.perf_counter() - STARTED


def time_rollouts(job: dict[str, Any], generate: Generate, start_up: dict[str, float], **facts: Any) -> None:
    """Time `generate(prompts, lengths)`, which returns tokens and their log-probs, over the workloads of the job.

    `start_up` holds seconds of importing and of building the engine; those of the first 16 tokens of every request
    are added here.
    """
    start = time.perf_counter()
    first = job["workloads"][0]
    generate(first["warm_up"], [min(length, 16) for length in first["lengths"]])
    start_up["first_tokens"] = time.perf_counter() - start
    emit(job, start_up={**start_up, "total": sum(start_up.values())}, **facts)
    for workload in job["workloads"]:
        lengths = workload["lengths"]
        seconds: list[float] = []
        for prompts in workload["repetitions"]:
            start = time.perf_counter()
            tokens, log_probs = generate(prompts, lengths)
            seconds.append(time.perf_counter() - start)
            assert [len(answer) for answer in tokens] == lengths, "the answers have other lengths than asked for"
            assert [len(answer) for answer in log_probs] == lengths, "not every token has a log-prob"
            mean = sum(map(sum, log_probs)) / sum(lengths)
            emit(job, workload=workload["name"], all_seconds=seconds, mean_log_prob=mean)
