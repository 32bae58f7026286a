"""`--use-fault-tolerance` on real runs: the same loss curve, bit for bit, whatever dies."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from miles.checkpoint.layout import read_tracker
from tests.e2e.loop_fork import flags, run_fork, sums
from tests.e2e.test_processes import wait_for


def curve(folder: Path) -> list[dict[str, float]]:
    """What training computed, without what a clock says."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if name != "time" and not name.startswith("perf/")}
        for record in records
    ]


def start(settings) -> subprocess.Popen:
    command = [sys.executable, "-m", "miles", "train", *flags(settings)]
    with open(Path(settings["runs_dir"]).parent / "output.txt", "a") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def worker_of(process: subprocess.Popen) -> psutil.Process | None:
    try:
        children = psutil.Process(process.pid).children()
        return next((child for child in children if "miles.loop.worker" in child.cmdline()), None)
    except psutil.Error:
        return None


def num_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def last_tensors(folder: Path) -> dict[str, list]:
    checkpoint = sorted((folder / "checkpoints").glob("iter_*"))[-1]
    return {name: tensor.tolist() for name, tensor in load_file(checkpoint / "model" / "model.safetensors").items()}


def test_a_killed_worker_leaves_the_same_loss_curve(tmp_path):
    whole = run_fork(tmp_path, sums(tmp_path, num_rollout=6, run_name="whole"))
    repaired = sums(tmp_path, num_rollout=6, use_fault_tolerance=True, restart_backoff=0.1)
    process = start(repaired)
    folder = tmp_path / "runs" / "run"
    wait_for(lambda: num_steps(folder) >= 2)
    worker_of(process).kill()
    assert process.wait(timeout=100) == 0, (tmp_path / "output.txt").read_text()
    assert curve(folder) == curve(whole.folder)
    assert last_tensors(folder) == last_tensors(whole.folder)
    assert [path.name for path in sorted((folder / "checkpoints").glob("iter_*"))] == ["iter_0000006"]
    kinds = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds == ["start", "repair", "resume", "checkpoint", "finish"], "temporary checkpoints are not worth a word"


@pytest.mark.slow
def test_100_random_kills_of_a_run_in_a_loop(tmp_path):
    """Of the worker, which is repaired, or of the supervisor, where the same command goes on. No step is lost beyond
    the last checkpoint, the loss curve is that of a run without a kill, and no process is left."""
    settings = sums(
        tmp_path, num_rollout=100_000, use_fault_tolerance=True, restart_backoff=0.0, max_restarts=50, async_save=True
    )
    folder, chance, resumed_at = tmp_path / "runs" / "run", random.Random(100), []
    process = start(settings)
    for _ in range(100):
        time.sleep(chance.uniform(0.0, 8.0))
        worker = worker_of(process)
        if worker is not None and chance.random() < 0.7:
            worker.kill()
            wait_for(lambda dead=worker, of=process: worker_of(of) not in (None, dead))
            continue
        process.kill()
        process.wait()
        wait_for(lambda: not processes_of(folder))
        resumed_at.append(read_tracker(folder / "checkpoints") or 0)
        process = start(settings)
    process.kill()
    process.wait()
    wait_for(lambda: not processes_of(folder))
    assert resumed_at == sorted(resumed_at)
    num_rollout = num_steps(folder) + 2
    ended = run_fork(tmp_path, settings | {"num_rollout": num_rollout, "use_fault_tolerance": None})
    assert ended.code == 0, ended.text
    whole = run_fork(tmp_path, sums(tmp_path, num_rollout=num_rollout, run_name="whole"))
    assert curve(folder) == curve(whole.folder)
    assert last_tensors(folder) == last_tensors(whole.folder)
    assert not processes_of(folder)


def processes_of(folder: Path) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if str(folder) in " ".join(cmdline(process))]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
