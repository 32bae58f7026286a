"""Training functions for tests of the processes around them. No torch: a worker starts in a fraction of a second."""

import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time

from miles.errors import DataError
from miles.observe.log import get_logger, log_record

logger = get_logger("miles.fake")


def finish(config, folder, context):
    for step in range(3):
        context.heartbeat.set_step(step, num_steps=3)
        context.heartbeat.set_phase("train")
        log_record("step", step, {"train/loss": 1e-6 * step}, logger=logger)
        context.heartbeat.report_step(step, {"train/loss": 1e-6 * step}, num_steps=3)
    print("a hook printed this")


def user_mistake(config, folder, context):
    raise DataError("train.jsonl, row 3: the label is empty; give it an answer")


def own_mistake(config, folder, context):
    context.heartbeat.set_step(4, num_steps=9)
    context.heartbeat.set_phase("train")
    raise ValueError("shapes differ")


def killed(config, folder, context):
    _begin(folder, context)
    logger.error("RuntimeError: the last thing it said")
    os.kill(os.getpid(), 9)


def talks(config, folder, context):
    for number in range(3000):
        print(f"line {number} " + "x" * 100)


def dies_twice(config, folder, context):
    _fail(folder, context, times=2, how=lambda: os.kill(os.getpid(), 9))


def hangs_once(config, folder, context):
    def hang():
        while True:  # a signal ends a sleep
            ctypes.PyDLL(None).sleep(600)

    _fail(folder, context, times=1, how=hang)


def fails_once(config, folder, context):
    _fail(folder, context, times=1, how=lambda: 1 / 0)


def _fail(folder, context, *, times, how):
    """Finish steps 0 and 1; then fail in the first starts, else finish step 2."""
    count = folder.path / "starts"
    starts = int(count.read_text()) if count.exists() else 0
    count.write_text(str(starts + 1))
    for step in range(3):
        context.heartbeat.set_step(step, num_steps=3)
        if step == 2 and starts < times:
            _begin(folder, context)
            how()
        context.heartbeat.report_step(step, {"train/loss": 0.5}, num_steps=3)


def sleeps(config, folder, context):
    """Runs until it is stopped, then saves."""
    _begin(folder, context)
    sleeps_alone(config, folder, context)


def sleeps_alone(config, folder, context):
    (folder.path / "sleeping").touch()
    while not context.stop_requested():
        time.sleep(0.02)
    (folder.path / "saved").write_text("step 7")


def ignores_stop(config, folder, context):
    _begin(folder, context)
    time.sleep(600)


def locks_the_interpreter(config, folder, context):
    threading.Thread(target=time.sleep, args=(600,), name="another_thread", daemon=True).start()
    _begin(folder, context)
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the lock of the interpreter


def _begin(folder, context):
    """Enter step 7 with children of several kinds, and tell the test all process ids."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    grader = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,), daemon=True)
    grader.start()
    context.heartbeat.set_step(7, num_steps=9)
    context.heartbeat.set_phase("generate")
    temporary = folder.path / "pids.tmp"
    temporary.write_text(json.dumps([os.getpid(), child.pid, grader.pid]))
    temporary.rename(folder.path / "pids.json")
