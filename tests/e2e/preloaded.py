"""Runs `miles` commands in forks of a process that has imported the loop, so that a run starts in milliseconds.

    python -m tests.e2e.preloaded

A line of JSON on stdin starts a command (`argv`, `cwd`, `env`, `out`, `before`) and is answered with its process id;
`{"wait": PID, "timeout_s": N}` is answered with its status as of `os.waitpid`, or null when it still runs. Each command
leads a session of its own, so a test finds what it left behind. `before` names functions that prepare the fork, for
example to fail at a chosen moment (`faults.py`).
"""

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes longer than a small run

import miles.cli.quickstart
import miles.cli.train  # a fork that gives up root may not be able to read the files of this Python any more
import miles.loop.run  # noqa: F401 - the slow import that every fork shares
from miles.cli.main import main as miles


def run(request: dict) -> int:
    os.setsid()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for fd, name in ((0, os.devnull), (1, request["out"] + ".out"), (2, request["out"] + ".err")):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    sys.path.insert(0, request["cwd"])
    for path, *arguments in request["before"]:
        module, _, function = path.rpartition(".")
        getattr(importlib.import_module(module), function)(*arguments)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    return miles(request["argv"])


def wait(pid: int, timeout_s: float) -> int | None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    return None


def serve() -> None:
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(json.dumps(wait(request["wait"], request["timeout_s"])), file=replies)
            continue
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = run(request)
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        print(json.dumps(pid), file=replies)


if __name__ == "__main__":
    assert Path("tests/e2e/preloaded.py").is_file(), "run it from the root of the repository"
    serve()
