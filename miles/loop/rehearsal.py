"""The worker's side of `miles rehearse`: a run in which one thing goes wrong at one step.

A supervisor starts `train` of this file instead of that of `run.py`: nothing of it is in the way of a real run.

    python -m miles.loop.rehearsal CONFIG [FAULT STEP]
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from miles.config.dump import load_config
from miles.config.sections import RunConfig
from miles.loop import stages
from miles.loop.build import build
from miles.loop.run import run_to_end
from miles.loop.run_folder import RunFolder, open_run_folder
from miles.loop.stages import Run
from miles.loop.supervisor import supervise
from miles.loop.worker import WorkerContext
from miles.types import Sample

TRAIN = "miles.loop.rehearsal.train"
REQUEST, FIRED = "rehearsal.txt", "rehearsal_fired"
SLOW_REWARD_S, STANDSTILL_S, CLOCK_JUMP_S, GRADERS_S = 3.0, 6.0, 3600.0, 60.0


Fault = Callable[[Run], None]  # makes something go wrong in the rollout that is about to begin, or at once


def kill_worker(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(run: Run) -> None:
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the lock of the interpreter


def kill_graders(run: Run) -> None:
    """The processes that grade: children of the fork server, which is a child of the worker and needs seconds to import
    what they run. A run of a moment could end before."""
    for server in psutil.Process().children():
        end = time.monotonic() + GRADERS_S
        while not server.children() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.5)  # until they have said that they are ready: one that never is ends the pool
        for grader in server.children():
            grader.kill()


def fill_disk(run: Run) -> None:
    nothing_free = shutil.disk_usage("/")._replace(free=0)
    shutil.disk_usage = lambda path: nothing_free


def poison_sample(run: Run) -> None:
    after_rewards(run, lambda groups: set_reward(run, groups[0][0], math.nan))


def poison_gradient(run: Run) -> None:
    """Rewards that differ come first: without them there may be no gradient to poison."""

    def differ(groups: list[list[Sample]]) -> None:
        for group in groups:
            for number, sample in enumerate(group):
                set_reward(run, sample, number % 2)

    after_rewards(run, differ)
    parameter = next(parameter for parameter in run.trainer.model.parameters() if parameter.requires_grad)
    parameter.register_hook(lambda gradient: gradient * math.nan)


def lose_file(run: Run) -> None:
    """A file of the last checkpoint goes, and then the worker that does not need it."""
    assert run.saved_at is not None, "a checkpoint was saved before this step"
    next((run.folder.save / f"iter_{run.saved_at:07d}").glob("*.safetensors")).unlink()
    kill_worker(run)


def terminate(run: Run) -> None:
    os.kill(os.getppid(), signal.SIGTERM)


def jump_clock(run: Run) -> None:
    real = time.time
    time.time = lambda: real() + CLOCK_JUMP_S


def stand_still(run: Run) -> None:
    """All processes of the run stop and go on later, as in a paused container. A child outside of it wakes them."""
    ours = [os.getpid(), os.getppid()]
    if os.fork() == 0:
        os.setsid()
        for number, wait_s in ((signal.SIGSTOP, STANDSTILL_S), (signal.SIGCONT, 0.0)):
            for pid in reversed(ours) if number == signal.SIGSTOP else ours:
                os.kill(pid, number)
            time.sleep(wait_s)
        os._exit(0)
    time.sleep(0.5)  # it is stopped in here


FAULTS: dict[str, Fault] = {
    "worker killed": kill_worker,
    "worker hung": hang,
    "grader killed": kill_graders,
    "disk full": fill_disk,
    "slow reward": lambda run: after_rewards(run, lambda groups: time.sleep(SLOW_REWARD_S)),
    "poisoned sample": poison_sample,
    "nan gradient": poison_gradient,
    "lost file": lose_file,
    "sigterm": terminate,
    "paused container": stand_still,
    "clock jump": jump_clock,
}


def train(config: RunConfig, folder: RunFolder, context: WorkerContext) -> None:
    """What `miles.loop.run.train` does, with the fault that the run folder asks for, once."""
    with build(config, folder, context) as run:
        request = folder.path / REQUEST
        if request.exists():
            fault, step = request.read_text().split("\n")
            strike_at(int(step), FAULTS[fault], folder.path / FIRED)
        run_to_end(run)


def strike_at(step: int, fault: Fault, fired: Path) -> None:
    generate = stages.generate

    def generate_and_strike(run: Run) -> list[list[Sample]]:
        if run.num_done == step and not fired.exists():
            fired.write_text(str(time.time()))
            fault(run)
        return generate(run)

    stages.generate = generate_and_strike


def set_reward(run: Run, sample: Sample, value: float) -> None:
    key = run.config.reward.reward_key
    sample.reward = {**sample.reward, key: value} if isinstance(sample.reward, dict) and key else value


def after_rewards(run: Run, change: Callable[[list[list[Sample]]], None]) -> None:
    """Change, or delay, the scored answers of the next rollout."""
    collect = run.producer.collect

    async def collect_and_change(rollout_id: int) -> list[list[Sample]]:
        groups = await collect(rollout_id)
        change(groups)
        run.producer.collect = collect  # type: ignore[method-assign]
        return groups

    run.producer.collect = collect_and_change  # type: ignore[method-assign]


def main(argv: list[str]) -> int:
    config = load_config(Path(argv[0]))
    folder = open_run_folder(config, command=["miles", "rehearse"])
    if argv[1:]:
        (folder.path / REQUEST).write_text("\n".join(argv[1:]))
    try:
        return supervise(folder, config.process, resume_command="miles rehearse", train=TRAIN)
    finally:
        folder.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
