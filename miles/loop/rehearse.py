"""`miles rehearse`: the user's own run, small, with one fault after another, and what was promised for each.

Whatever goes wrong, the run ends with the same numbers as one without a fault: by itself, or after the same command
was given again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from miles.config.dump import dump_config
from miles.config.flags import with_values
from miles.config.resolve import samples_per_rollout
from miles.config.sections import RunConfig

NUM_ROLLOUT, STEP = 4, 2
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Promise:
    """What must happen: exit code, part of what is said, and whether the worker is started again. With an exit code
    other than 0 the same command must end well when it is given again, unless `is_final`."""

    outcome: str
    exit_code: int = 0
    says: str = ""
    repairs: int = 0
    is_final: bool = False
    counted: str = ""  # a metric that is above 0 in the step of the fault
    same_curve: bool = True


PROMISES = {
    "worker killed": Promise("started again", says="was killed by SIGKILL", repairs=1),
    "worker hung": Promise("seen, ended and started again", says="has been silent", repairs=1),
    "grader killed": Promise("another one takes its place", says="a grading process has ended"),
    "disk full": Promise("stops; the last checkpoint is intact", exit_code=1, says="bytes and 0 are free"),
    "slow reward": Promise("waits"),
    "poisoned sample": Promise("left out and counted", same_curve=False, counted="rollout/num_unscored"),
    "nan gradient": Promise("stops before the weights change", exit_code=1, says="is not finite"),
    "lost file": Promise("stops and names the file", exit_code=2, says="is missing", repairs=1, is_final=True),
    "sigterm": Promise("saves and ends", exit_code=143, says="stopped by SIGTERM"),
    "paused container": Promise("goes on; nothing counts as a hang"),
    "clock jump": Promise("goes on; nothing counts as a hang"),
}


@dataclass(frozen=True)
class Outcome:
    """`problem` is empty when the promise was kept. `detect_s`: from the fault to the reaction, None where there is
    nothing to react to. `steps_lost`: finished steps that had to be done again."""

    fault: str
    outcome: str
    detect_s: float | None
    steps_lost: int
    problem: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def rehearse(config: RunConfig, scratch: Path, faults: Sequence[str], say: Callable[[Outcome], None]) -> list[Outcome]:
    """Rehearse each fault. Raises `AssertionError` when the small run does not even work without one."""
    whole = _Scenario(config, scratch, "whole")
    code, output = whole.run()
    assert code == 0, f"the small run fails without a fault (exit code {code}):\n{output}"
    outcomes = []
    for fault in faults:
        outcomes.append(_rehearse_one(config, scratch, fault, expected=whole.curve()))
        say(outcomes[-1])
    return outcomes


def _rehearse_one(config: RunConfig, scratch: Path, fault: str, *, expected: list[Any]) -> Outcome:
    promise = PROMISES[fault]
    scenario = _Scenario(config, scratch, fault.replace(" ", "-"))
    code, output = scenario.run(fault)
    ended_at = time.time()
    repairs = [event for event in scenario.events() if event["kind"] == "repair"]
    problems = []
    if code != promise.exit_code:
        problems.append(f"exit code {code}, promised {promise.exit_code}")
    if promise.says not in output:
        problems.append(f"nobody said {promise.says!r}")
    if len(repairs) != promise.repairs:
        problems.append(f"{len(repairs)} restarts, promised {promise.repairs}")
    detect_s = scenario.seconds_to(repairs[0]["time"] if repairs else None, ended_at)
    if code != 0 and not promise.is_final:
        again, text = scenario.run()
        if again != 0:
            problems.append(f"the same command again ends with {again}: {text.strip().splitlines()[-1:]}")
    if promise.same_curve and not promise.is_final and scenario.curve() != expected:
        problems.append("the loss curve is another one")
    if promise.counted and not scenario.metric(promise.counted):
        problems.append(f"{promise.counted} is 0")
    has_reaction = bool(promise.exit_code or promise.repairs)
    outcome = problems[0] if problems else promise.outcome
    return Outcome(fault, outcome, detect_s if has_reaction else None, scenario.steps_lost(), "; ".join(problems))


def small_config(config: RunConfig, runs_dir: Path) -> RunConfig:
    """A few short answers in a few steps, each saved."""
    rollout = config.rollout
    values = {
        "runs_dir": str(runs_dir), "save_hf": None, "num_rollout": NUM_ROLLOUT, "num_epoch": None, "save_interval": 1,
        "save_keep_last": None, "save_keep_best": None, "async_save": False, "num_steps_per_rollout": None,
        "rollout_batch_size": min(rollout.rollout_batch_size, 2),
        "n_samples_per_prompt": min(rollout.n_samples_per_prompt, 4),
        "rollout_max_response_len": min(rollout.rollout_max_response_len, 32),
        "eval_interval": None, "eval_prompt_data": (), "in_process": False, "progress": "off", "heat_guard": False,
        "use_fault_tolerance": True, "restart_backoff": 0.1, "heartbeat_timeout": 3.0,
    }  # fmt: skip
    small = with_values(config, values)
    return with_values(small, {"global_batch_size": samples_per_rollout(small)})


class _Scenario:
    """One run folder, and the runs in it."""

    def __init__(self, config: RunConfig, scratch: Path, name: str) -> None:
        self.folder = scratch / name
        save = str(self.folder / "checkpoints")
        settings = with_values(small_config(config, scratch), {"run_name": name, "save": save, "load": save})
        self._config_file = scratch / f"{name}.yaml"
        self._config_file.write_text(dump_config(settings), encoding="utf-8")

    def run(self, fault: str | None = None) -> tuple[int, str]:
        """Exit code and everything that was said."""
        command = [sys.executable, "-m", "miles.loop.rehearsal", str(self._config_file)]
        if fault is not None:
            command += [fault, str(STEP)]
        else:
            (self.folder / "rehearsal.txt").unlink(missing_ok=True)
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def curve(self) -> list[dict[str, Any]]:
        """What training computed, without what a clock says."""
        return [
            {name: value for name, value in record.items() if name != "time" and not name.startswith("perf/")}
            for record in _read(self.folder / "metrics.jsonl")
        ]

    def metric(self, name: str) -> float:
        """Of the step of the fault."""
        records = _read(self.folder / "metrics.jsonl")
        return next((record.get(name, 0.0) for record in records if record["step"] == STEP), 0.0)

    def events(self) -> list[dict[str, Any]]:
        return _read(self.folder / "events.jsonl")

    def seconds_to(self, event_time: str | None, ended_at: float) -> float | None:
        fired = self.folder / "rehearsal_fired"
        if not fired.exists():
            return None
        reaction = ended_at if event_time is None else datetime.fromisoformat(event_time).timestamp()
        return round(reaction - float(fired.read_text()), 1)

    def steps_lost(self) -> int:
        resumed = [event["step"] for event in self.events() if event["kind"] == "resume"]
        return max(0, STEP - resumed[0]) if resumed else 0


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
