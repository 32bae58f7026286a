"""Worker processes with a deadline for each task: what hangs, dies or raises is replaced and counted.

A task whose process dies is tried again in another one: three times in all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import psutil

from miles.errors import RewardError
from miles.observe.log import get_logger
from miles.rollout.rm_hub.fork_server import DONE, READY

logger = get_logger(__name__)

TIMEOUT = "timeout"
DIED = "died"
RAISED = "raised"
FORK_SERVER = "miles.rollout.rm_hub.fork_server"
MAX_WALL = 2
CLOCK_TICK_S = 0.02  # CPU times are known to about this
MAX_TRIES = 3  # of a task whose process died
MAX_START_S = 120.0  # imports on a busy machine


@dataclass(frozen=True, slots=True)
class Outcome:
    """`value` of a task, or how it failed: `TIMEOUT`, `DIED` or `RAISED`, with a text."""

    value: Any = None
    failure: str | None = None
    detail: str = ""


@dataclass(slots=True)
class _Task:
    content: Any
    future: Future[Outcome]
    num_lost: int = 0  # workers that died with it


@dataclass(slots=True)
class _Worker:
    pipe: Connection
    pid: int
    ready: bool = False
    task: _Task | None = None
    deadline: float = 0.0
    cpu_at_start_s: float = 0.0
    started_at: float = 0.0


class WorkerPool:
    """Runs `MODULE.run(task)` in worker processes. A thread of this process hands out tasks and watches deadlines.

    Tasks can be submitted from any thread. The deadline counts the worker's own CPU time from the moment it gets the
    task, so that a busy machine changes no verdict, and at most `MAX_WALL` times as much by the clock. The `warm_up`
    tasks are done before there are workers, so that no worker's first task pays for tables that are built once.
    """

    def __init__(
        self, module: str, *, num_workers: int, timeout_s: float, warm_up: Sequence[tuple[str, ...]] = ()
    ) -> None:
        self._module = module
        self._warm_up = json.dumps(warm_up)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._tasks: deque[_Task] = deque()
        self._workers: list[_Worker] = []
        self._wake_read, self._wake_write = Pipe(duplex=False)
        self._lock = threading.Lock()  # of the tasks, the wake pipe and the reason
        self._closing = False
        self._has_lost_one = False
        self._ended: str | None = None  # why no task can run any more
        self._thread: threading.Thread | None = None
        self.failures: Counter[str] = Counter()  # by kind, since the start

    def start(self) -> None:
        """Start the processes; they import while the caller goes on."""
        self._control, theirs = socket.socketpair()
        # A new process inherits the mask: Ctrl+C would end it with a traceback before it can ignore it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._server = subprocess.Popen(
                [sys.executable, "-m", FORK_SERVER, str(theirs.fileno()), self._module, self._warm_up],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self._thread = threading.Thread(target=self._run, name="grading-pool", daemon=True)
        self._thread.start()

    def submit(self, task: Any) -> Future[Outcome]:
        """Queue a task. The future raises `RewardError` when the workers cannot be started."""
        assert self._thread is not None, "start() comes first"
        future: Future[Outcome] = Future()
        with self._lock:
            if self._ended is not None:
                future.set_exception(RewardError(self._ended))
            else:
                self._tasks.append(_Task(task, future))
                self._wake_write.send_bytes(b"!")
        return future

    def close(self) -> None:
        """End all processes. Tasks that still wait fail with `RewardError`."""
        if self._thread is None:
            return
        self._closing = True
        with self._lock:
            self._wake_write.send_bytes(b"!")
        self._thread.join()
        self._control.close()  # the server kills its workers and ends
        self._server.wait()

    def _run(self) -> None:
        reason = "the grading processes were closed"
        try:
            self._await_server()
            while not self._closing:
                while len(self._workers) < self._num_workers:
                    self._workers.append(self._spawn())
                self._hand_out()
                if len(self._workers) == self._num_workers:
                    self._wait()
        except (OSError, EOFError) as error:
            reason = f"the grading processes have ended ({str(error) or type(error).__name__}); their output is above"
        self._fail_rest(reason)

    def _await_server(self) -> None:
        self._control.settimeout(MAX_START_S)
        if not self._control.recv(1):
            raise EOFError("they could not start")

    def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        reply = self._control.recv(8, socket.MSG_WAITALL)
        if len(reply) < 8:
            raise EOFError
        return _Worker(Connection(ours.detach()), int.from_bytes(reply, "little"))

    def _hand_out(self) -> None:
        for worker in list(self._workers):
            if not worker.ready or worker.task is not None or not self._tasks:
                continue
            task = self._tasks.popleft()
            if not task.future.running() and not task.future.set_running_or_notify_cancel():
                continue
            worker.task = task
            worker.cpu_at_start_s, worker.started_at = _cpu_s(worker.pid), time.monotonic()
            worker.deadline = worker.started_at + self._timeout_s
            try:
                worker.pipe.send(task.content)
            except ConnectionError:
                self._replace(worker, DIED, "the process ended")

    def _wait(self) -> None:
        deadlines = [worker.deadline for worker in self._workers if worker.task is not None]
        left = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        readable = wait([self._wake_read, *(worker.pipe for worker in self._workers)], timeout=left)
        if self._wake_read in readable:
            self._wake_read.recv_bytes()
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.pipe in readable:
                self._receive(worker)
            elif worker.task is not None and now >= worker.deadline and not self._extend(worker, now):
                self._replace(worker, TIMEOUT, f"no answer within {self._timeout_s} s")

    def _extend(self, worker: _Worker, now: float) -> bool:
        """Give a worker the CPU time that others have taken from it."""
        left = self._timeout_s - (_cpu_s(worker.pid) - worker.cpu_at_start_s)
        end = worker.started_at + MAX_WALL * self._timeout_s
        if left <= CLOCK_TICK_S or now >= end:
            return False
        worker.deadline = min(now + left, end)
        return True

    def _receive(self, worker: _Worker) -> None:
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, OSError):
            self._replace(worker, DIED, "the process ended")
            return
        if kind == READY:
            worker.ready = True
            return
        assert worker.task is not None, "a worker replies to a task only"
        if kind != DONE:
            self.failures[RAISED] += 1
        task, worker.task = worker.task, None
        task.future.set_result(Outcome(value) if kind == DONE else Outcome(None, RAISED, value))

    def _replace(self, worker: _Worker, failure: str, detail: str) -> None:
        """The process is dropped; the loop starts another in its place."""
        if failure == TIMEOUT:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        elif not worker.ready:
            raise EOFError("a new process ended before it was ready")
        worker.pipe.close()
        self._workers.remove(worker)
        if failure == DIED and not self._has_lost_one:
            self._has_lost_one = True
            logger.warning("a grading process has ended; another takes its place (said once)")
        task = worker.task
        if task is None:
            return
        task.num_lost += failure == DIED
        if failure == DIED and task.num_lost < MAX_TRIES:
            # Its process may have been ended for memory or by hand; a task that ends processes does it again.
            self._tasks.appendleft(task)
            return
        self.failures[failure] += 1
        task.future.set_result(Outcome(None, failure, detail))

    def _fail_rest(self, reason: str) -> None:
        with self._lock:
            self._ended = reason
        waiting = [worker.task.future for worker in self._workers if worker.task is not None]
        waiting += [task.future for task in self._tasks]
        for worker in self._workers:
            worker.pipe.close()
        self._workers = []
        for future in waiting:
            if not future.done():
                future.set_exception(RewardError(reason))


def _cpu_s(pid: int) -> float:
    """CPU time of a process of ours; 0 when it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system
