"""A small process that forks grading workers on request: `python -m miles.rollout.rm_hub.fork_server FD MODULE TASKS`.

It imports MODULE and runs the warm-up TASKS (JSON) once, which is slow, and forks, which is fast, so a worker that had
to be killed is back in milliseconds. It is a program of its own, started by `pool.py`: a fork of the training process
would copy its threads' locks and its memory.
Each request is one byte with the descriptor of the new worker's pipe; the reply is the worker's process id. When the
pipe to its owner closes, all workers are killed and it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MAX_MEMORY_BYTES = 2 << 30  # address space of a worker

READY = "ready"
DONE = "done"
FAILED = "failed"


def serve(control: socket.socket, run: Callable[[Any], Any]) -> None:
    """Fork a worker for each request until the owner is gone. A worker itself never returns from here."""
    workers: set[int] = set()
    with contextlib.suppress(ConnectionError):  # an owner that ended with a byte of ours unread
        control.sendall(b"!")  # the imports are done
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not request:
                break
            workers -= {pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0] == pid}
            pid = os.fork()
            if pid == 0:
                control.close()
                if sys.platform == "linux":
                    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
                with contextlib.suppress(EOFError, OSError):  # the owner has closed the pipe, perhaps within a message
                    work(Connection(descriptors[0]), run)
                os._exit(0)
            workers.add(pid)
            os.close(descriptors[0])
            control.sendall(pid.to_bytes(8, "little"))
    for pid in workers:
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)


def work(pipe: Connection, run: Callable[[Any], Any]) -> None:
    """Run tasks until the pipe raises, closed by its owner. Replies are (READY or DONE or FAILED, value or text)."""
    pipe.send((READY, None))
    while True:
        task = pipe.recv()
        try:
            reply = (DONE, run(task))
        except Exception as error:  # fault boundary: the owner counts these
            reply = (FAILED, f"{type(error).__name__}: {error}")
        pipe.send(reply)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the whole process group; the owner decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # it had to wait until here: see `pool.py`
    control = socket.socket(fileno=int(sys.argv[1]))
    run = importlib.import_module(sys.argv[2]).run
    for task in json.loads(sys.argv[3]):
        run(task)
    serve(control, run)


if __name__ == "__main__":
    main()
