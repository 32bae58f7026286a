"""Runs the `miles` command on the shipped tiny model, in forks of a process that has imported it (`preloaded.py`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "miles" / "quickstart" / "model"

ROWS = [{"question": f"{a}+{b}=?", "answer": str(a + b)} for a, b in [(12, 34), (56, 27), (48, 48), (90, 11), (33, 8)]]

SETTINGS: dict[str, Any] = {
    "hf_checkpoint": MODEL,
    "prompt_data": "train.jsonl",
    "input_key": "question",
    "label_key": "answer",
    "apply_chat_template": True,
    "rollout_shuffle": True,
    "custom_rm_path": "tests.e2e.rewards.digits",
    "num_rollout": 4,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "rollout_max_response_len": 12,
    "lr": 1e-3,
    "save_interval": 1,
    "device": "cpu",
    "run_name": "run",
    "in_process": True,
}


def flags(settings: dict[str, Any]) -> list[str]:
    """A command line; None leaves a flag out."""
    tokens: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            tokens.append(flag)
        elif value is False:
            tokens.append("--no-" + flag.removeprefix("--"))
        elif isinstance(value, (list, tuple)):
            tokens += [flag, *map(str, value)]
        elif value is not None:
            tokens += [flag, str(value)]
    return tokens


class Server:
    """The preloaded process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.preloaded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=REPOSITORY,
        )

    def ask(self, request: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(request) + "\n")
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Ended:
    """`code` is the exit code, or minus the number of the signal that ended it."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """What went wrong, without the line that names the run folder."""
        return "\n".join(line for line in self.err.splitlines() if not line.startswith("run folder: "))


class Running:
    def __init__(self, server: Server, pid: int, files: Path) -> None:
        self.server, self.pid, self.files = server, pid, files

    def wait(self, timeout_s: float = 60.0) -> Ended:
        status = self.server.ask({"wait": self.pid, "timeout_s": timeout_s})
        if status is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise AssertionError(f"still running after {timeout_s} s; its output:\n{self._read('.out')}")
        left = [psutil.Process(pid) for pid in psutil.pids() if session_of(pid) == self.pid]
        # A child that outlives its parent by a moment is on its way out.
        _, left = psutil.wait_procs(left, timeout=5)
        assert not left, f"left behind: {left}"
        return Ended(os.waitstatus_to_exitcode(status), self._read(".out"), self._read(".err"))

    def _read(self, ending: str) -> str:
        return self.files.with_name(self.files.name + ending).read_text(errors="replace")


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


class Miles:
    """The `miles` command in a working directory of its own, which holds `train.jsonl`."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder, self.num_commands = server, folder, 0
        self.runs = folder / "runs"
        self.write("train.jsonl", ROWS)

    @property
    def run(self) -> Path:
        return self.runs / "run"

    def write(self, name: str, rows: list[Any]) -> str:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return name

    def start(self, *argv: str, before: list[Any] = (), cwd: Path | None = None, env: dict | None = None) -> Running:
        self.num_commands += 1
        files = self.folder / f"command-{self.num_commands}"
        request = {"argv": argv, "cwd": str(cwd or self.folder), "env": env or {}, "out": str(files)}
        request["before"] = [[f"tests.e2e.faults.{name}", *arguments] for name, *arguments in before]
        return Running(self.server, self.server.ask(request), files)

    def start_train(self, *, before: list[Any] = (), cwd: Path | None = None, **settings: Any) -> Running:
        return self.start("train", *flags({**SETTINGS, **settings}), before=before, cwd=cwd)

    def train(self, *, before: list[Any] = (), cwd: Path | None = None, **settings: Any) -> Ended:
        return self.start_train(before=before, cwd=cwd, **settings).wait()

    def log(self, run: str = "run") -> str:
        return (self.runs / run / "log.txt").read_text()

    def state(self, run: str = "run") -> dict[str, Any]:
        return state_of(self.runs / run)


def state_of(run: Path) -> dict[str, Any]:
    """All that two equal runs have in common: weights, optimizer, counters, metrics but speed, and samples."""
    root = run / "checkpoints"
    last = root / f"iter_{int((root / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    return {
        "model": load_file(next(last.glob("*/*model.safetensors"))),  # or the adapter
        "optimizer": load_file(last / "optimizer.safetensors"),
        "state": json.loads((last / "state.json").read_text())["state"],
        "metrics": records(run),
        "samples": {path.name: pyarrow.parquet.read_table(path) for path in sorted((run / "samples").iterdir())},
    }


def records(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """`metrics.jsonl` without times and speeds."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if name != "time" and not name.startswith("perf/")}
        for line in lines
        if kind in (None, line["kind"])
    ]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for kind in ("model", "optimizer"):
        assert one[kind].keys() == other[kind].keys()
        different = [name for name in one[kind] if not torch.equal(one[kind][name], other[kind][name])]
        assert not different, f"{kind}: {different}"
    assert one["state"] == other["state"]
    assert one["metrics"] == other["metrics"]
    assert one["samples"].keys() == other["samples"].keys()
    for name in one["samples"]:
        assert one["samples"][name].equals(other["samples"][name]), name


def is_one_error(ended: Ended, code: int, *parts: str) -> None:
    """One message that names all of these, this exit code, and no traceback anywhere on the terminal."""
    assert ended.code == code, (ended.code, ended.err)
    assert ended.message.startswith("miles: "), ended.err
    assert "Traceback" not in ended.out + ended.err
    missing = [part for part in parts if part not in ended.message]
    assert not missing, f"{missing} not in: {ended.message}"
