"""`miles train --in-process` on the shipped tiny model in a fork of the test: no second import of torch, and the
test can reach into the run."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.cli.main import main
from miles.loop import stages
from miles.loop.stages import Run

MODEL = Path(__file__).resolve().parents[2] / "miles" / "quickstart" / "model"


@dataclass
class Ended:
    """`code` is the exit code, or minus the number of the signal that ended it; `text` is stdout and stderr."""

    code: int
    text: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]


def sums(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run that takes a moment; None leaves a flag out."""
    rows = [{"input": f"{a}+{b}=?", "label": str(a + b)} for a, b in [(12, 34), (56, 27), (48, 48), (90, 11), (33, 8)]]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "hf_checkpoint": MODEL, "prompt_data": folder / "sums.jsonl", "label_key": "label", "apply_chat_template": True,
        "rm_type": "deterministic_random", "num_rollout": 3, "rollout_batch_size": 2, "n_samples_per_prompt": 4,
        "rollout_max_response_len": 8, "lr": 1e-3, "device": "cpu", "runs_dir": folder / "runs", "run_name": "run",
        "progress": "off",
    }  # fmt: skip
    return settings | changes


def flags(settings: dict[str, Any]) -> list[str]:
    tokens: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            tokens.append(flag)
        elif isinstance(value, (list, tuple)):
            tokens += [flag, *map(str, value)]
        elif value is not None:
            tokens += [flag, str(value)]
    return tokens


def run_fork(
    folder: Path,
    settings: dict[str, Any],
    *,
    each_step: Callable[[Run], None] | None = None,
    before: Callable[[], None] | None = None,
) -> Ended:
    """Run to the end. `before` is called first, and `each_step` with the run at the start of every rollout."""
    output = folder / "output.txt"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(fd, stream)
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            _call_first(each_step)
            if before is not None:
                before()
            code = main(["train", *flags(settings), "--in-process"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    run_name = settings.get("run_name") or "run"
    return Ended(os.waitstatus_to_exitcode(status), output.read_text(), Path(settings["runs_dir"]) / run_name)


def _call_first(each_step: Callable[[Run], None] | None) -> None:
    if each_step is None:
        return
    generate = stages.generate

    def generate_after(run: Run) -> Any:
        each_step(run)
        return generate(run)

    stages.generate = generate_after
