from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from miles.errors import RewardError
from miles.rollout.rm_hub.fork_server import READY
from miles.rollout.rm_hub.pool import DIED, FORK_SERVER, RAISED, TIMEOUT, WorkerPool

TASKS = """
import ctypes, os, sys, time

def run(task):
    kind, value = task
    if kind == "square":
        return value * value
    if kind == "nap":
        time.sleep(0.25)
        return value
    if kind == "raise":
        raise ValueError(f"cannot do {value}")
    if kind == "loop":
        while True:
            pass
    if kind == "hold the lock":
        ctypes.PyDLL(None).sleep(60)  # inside one C call, without releasing the interpreter
    if kind == "exit":
        os._exit(0)
    if kind == "memory":
        return len(bytearray(8 << 30))
    if kind == "recursion":
        return run(task)
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    (tmp_path / "pool_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = WorkerPool("pool_tasks", num_workers=2, timeout_s=0.3)
    made.start()
    yield made
    made.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: object, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def pids_of(pool: WorkerPool) -> list[int]:
    return [worker.pid for worker in pool._workers]


def test_tasks_are_done_whatever_their_neighbours_do(pool: WorkerPool) -> None:
    hostile = ["loop", "exit", "raise", "hold the lock", "memory", "recursion"]
    tasks = [(hostile[i // 2 % 6], i) if i % 2 else ("square", i) for i in range(24)]
    outcomes = [future.result(timeout=30) for future in [pool.submit(task) for task in tasks]]
    assert [outcome.value for outcome in outcomes[::2]] == [i * i for i in range(0, 24, 2)]
    kinds = [outcome.failure for outcome in outcomes[1::2]]
    assert kinds == [TIMEOUT, DIED, RAISED, TIMEOUT, RAISED, RAISED] * 2
    assert outcomes[5].detail == "ValueError: cannot do 5"
    assert pool.failures == {TIMEOUT: 4, DIED: 2, RAISED: 6}
    wait_until(lambda: len(pids_of(pool)) == 2 and all(map(is_alive, pids_of(pool))))


def test_a_task_whose_process_is_killed_is_done_by_another(pool: WorkerPool, caplog: pytest.LogCaptureFixture) -> None:
    assert pool.submit(("square", 1)).result(timeout=30).value == 1
    future = pool.submit(("nap", 5))
    time.sleep(0.1)
    for pid in pids_of(pool):
        os.kill(pid, signal.SIGKILL)
    assert future.result(timeout=30).value == 5
    assert pool.failures.total() == 0, "no answer was graded wrong"
    assert "a grading process has ended" in caplog.text


def test_field_note_8_hostile_answers_leave_the_pool_at_full_size(pool: WorkerPool) -> None:
    futures = [pool.submit(("exit" if i % 10 else "loop", i)) for i in range(100)]
    assert all(future.result(timeout=60).failure in (DIED, TIMEOUT) for future in futures)
    assert pool.failures.total() == 100
    wait_until(lambda: len(pids_of(pool)) == 2 and all(map(is_alive, pids_of(pool))))
    assert pool.submit(("square", 7)).result(timeout=10).value == 49


def test_closing_leaves_no_process_and_fails_what_waits(pool: WorkerPool) -> None:
    busy = [pool.submit(("loop", i)) for i in range(5)]
    wait_until(lambda: len(pids_of(pool)) == 2)
    pids = pids_of(pool)
    pool.close()
    for future in busy[2:]:
        with pytest.raises(RewardError, match="were closed"):
            future.result(timeout=5)
    wait_until(lambda: not any(map(is_alive, pids)))
    with pytest.raises(RewardError, match="were closed"):
        pool.submit(("square", 1)).result(timeout=5)


def test_workers_end_when_their_owner_is_killed(pool: WorkerPool, tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from miles.rollout.rm_hub.pool import WorkerPool\n"
        "pool = WorkerPool('pool_tasks', num_workers=2, timeout_s=60)\n"
        "pool.start(); pool.submit(('loop', 0)); pool.submit(('square', 0)).result()\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(' '.join(str(worker.pid) for worker in pool._workers))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    os.spawnve(
        os.P_WAIT,
        sys.executable,
        [sys.executable, "-c", code],
        {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
    )
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_module_that_cannot_be_imported_fails_every_task() -> None:
    broken = WorkerPool("there_is_no_such_module", num_workers=1, timeout_s=1.0)
    broken.start()
    with pytest.raises(RewardError, match="could not start"):
        broken.submit(1).result(timeout=30)
    with pytest.raises(RewardError, match="could not start"):
        broken.submit(2).result(timeout=30)
    broken.close()


def test_a_server_that_has_just_started_ignores_an_interrupt(pool: WorkerPool) -> None:
    pool._server.send_signal(signal.SIGINT)
    assert pool.submit(("square", 3)).result(timeout=10).value == 9


def test_a_killed_server_is_reported(pool: WorkerPool) -> None:
    assert pool.submit(("square", 2)).result(timeout=10).value == 4
    os.kill(pool._server.pid, signal.SIGKILL)
    pool._server.wait()
    with pytest.raises(RewardError, match="have ended"):
        for _ in range(3):  # the workers live on until they are lost
            pool.submit(("exit", 0)).result(timeout=10)


@contextlib.contextmanager
def server_of_its_own(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A server that goes on with its imports at a byte, and our end of its socket. It must end well, saying nothing."""
    (tmp_path / "slow_tasks.py").write_text(
        "import sys, time\nsys.stdin.read(1)\ndef run(task):\n    time.sleep(task)\n    return task"
    )
    ours, theirs = socket.socketpair()
    server = subprocess.Popen(
        [sys.executable, "-m", FORK_SERVER, str(theirs.fileno()), "slow_tasks", "[]"],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
    )
    theirs.close()
    yield server, ours
    ours.close()
    assert server.communicate(timeout=30)[1] == b""
    assert server.returncode == 0


def message(task: float) -> bytes:
    """What `Connection.send` writes."""
    content = pickle.dumps(task)
    return struct.pack("!i", len(content)) + content


def go_on(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    server.stdin.write(b"!")
    server.stdin.flush()


def test_a_server_whose_owner_ends_while_it_imports_says_nothing(tmp_path: Path) -> None:
    with server_of_its_own(tmp_path) as (server, control):
        control.close()
        go_on(server)


def test_a_server_whose_owner_ends_before_it_reads_the_greeting_says_nothing(tmp_path: Path) -> None:
    with server_of_its_own(tmp_path) as (server, control):
        go_on(server)
        wait_until(lambda: select.select([control], [], [], 0)[0])


@pytest.mark.parametrize(
    "sent", [None, message(0.2), message(0.2)[:6]], ids=["before it is ready", "in a task", "in a message"]
)
def test_a_worker_whose_owner_closes_its_pipe_says_nothing(tmp_path: Path, sent: bytes | None) -> None:
    with server_of_its_own(tmp_path) as (server, control):
        go_on(server)
        assert control.recv(1) == b"!"
        ours, theirs = socket.socketpair()
        socket.send_fds(control, [b"+"], [theirs.fileno()])
        theirs.close()
        if sent is not None:
            pipe = Connection(ours.detach())
            assert pipe.recv() == (READY, None)
            os.write(pipe.fileno(), sent)
            pipe.close()
        ours.close()
        worker = int.from_bytes(control.recv(8, socket.MSG_WAITALL), "little")
        wait_until(lambda: psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)  # it ended by itself
