"""`miles train` seen from outside: starts the worker, keeps terminal and log, and turns death or hang into an exit.

    supervisor --- pipe: stdout and stderr ---> log.txt and the display
               --- pipe: heartbeat, errors ---> watchdog
    guard      --- pipe from the supervisor: its end means that the supervisor died

The worker leads a session of its own, so one signal to its process group reaches everything it started, and Ctrl+C
reaches only the supervisor. Whatever happens, no process of that group is left. Imports no torch.

With `--use-fault-tolerance` a worker that died or hung is followed by another, which goes on from the last checkpoint.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

from miles.config.sections import ProcessConfig
from miles.errors import WorkerError
from miles.loop import guard
from miles.loop.monitor import Monitor
from miles.loop.recover import End, Restarts
from miles.loop.run_folder import RunFolder
from miles.observe.display import Display, make_display
from miles.observe.log import get_logger, setup_logging, stop_logging
from miles.observe.metrics import append_event

TRAIN = "miles.loop.run.train"
SAVE_SIGNAL = signal.SIGUSR2  # asks for a checkpoint after the step in progress
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}

_TICK_S = 0.1
_STACKS_S = 1.0  # for a worker to write its stacks
_TERMINATE_S = 2.0  # for a process group to obey SIGTERM
_LEFTOVERS_S = 0.5  # the same when its worker has ended by itself
_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 20  # a progress bar may never end its line

logger = get_logger(__name__)


def supervise(
    folder: RunFolder,
    process: ProcessConfig,
    *,
    resume_command: str,
    train: str = TRAIN,
    display: Display | None = None,
) -> int:
    """Run the function named `train` in a worker until it ends, and return the exit code of the command.

    Errors are printed to stderr as one sentence. After a stop by signal (and after a failure that can be resumed from)
    the last line there is `resume_command`. Must be called from the main thread, which owns the signals.
    """
    assert threading.current_thread() is threading.main_thread(), "signals reach only the main thread"
    monitor = Monitor(folder.log_file, process, display=display or make_display(process.progress))
    setup_logging("supervisor", lambda line: monitor.log.write(line.encode(errors="backslashreplace")))
    received: list[int] = []
    previous = {number: signal.signal(number, _recorder(received)) for number in EXIT_CODES}
    previous[SAVE_SIGNAL] = signal.signal(SAVE_SIGNAL, lambda *_: folder.save_request.touch())
    try:
        end = _run_workers(folder, process, train, monitor, received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        stop_logging()
        monitor.close()
    return report_end(end.exit_code, end.sentence, received, resume_command=resume_command)


def _run_workers(folder: RunFolder, process: ProcessConfig, train: str, monitor: Monitor, received: list[int]) -> End:
    """One worker after another until the run ends, is stopped or cannot be repaired."""
    restarts = Restarts(process)
    while True:
        with _Worker(folder, train, monitor) as worker:
            outcome = _watch(worker, monitor, received)
            end = _conclude(outcome, worker, monitor, folder, stopping=bool(received))
        wait_s = None if received else restarts.wait_s(end, last_step=monitor.last_step)
        if wait_s is None:
            break
        message = f"{end.sentence}. Restart {restarts.num_in_a_row} of {process.max_restarts} in {wait_s:g} s"
        logger.warning(message)
        monitor.show(lambda display: display.line(message))  # noqa: B023
        append_event(folder.path, "repair", step=monitor.last_step + 1, reason=end.sentence)
        _sleep(wait_s, received)
        if received:
            return End(0)
        monitor.expect_worker()
    if restarts.num_in_a_row and end.exit_code:
        return replace(end, sentence=f"{end.sentence}; gave up after {restarts.num_in_a_row} restarts in a row")
    return end


def _sleep(seconds: float, received: list[int]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not received:
        time.sleep(min(_TICK_S, seconds))


def report_end(exit_code: int, sentence: str, received: list[int], *, resume_command: str) -> int:
    """Print how a run ended, and how to resume it; returns the exit code of the command."""
    if exit_code == 0 and received:
        exit_code = EXIT_CODES[signal.Signals(received[0])]
        sentence = f"stopped by {_signal_name(received[0])}"
    if sentence:
        print(f"miles: {sentence}", file=sys.stderr)
    # Exit code 2 is a mistake in the command or its files: the same command would meet it again.
    if exit_code not in (0, 2):
        print(f"to resume: {resume_command}", file=sys.stderr, flush=True)
    return exit_code


class _Worker:
    """The worker process with its pipes and its guard. Leaving the context ends the whole process group."""

    def __init__(self, folder: RunFolder, train: str, monitor: Monitor) -> None:
        self._monitor = monitor
        self.outputs_shown = True
        self._selector = selectors.DefaultSelector()
        heartbeat_fd, worker_fd = os.pipe()
        command = [sys.executable, "-m", "miles.loop.worker", "--config", str(folder.config_file), "--train", train]
        command += ["--heartbeat-fd", str(worker_fd), "--lock-fd", str(folder.lock_fd)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(worker_fd, folder.lock_fd),
            # Spinning OpenMP threads take the cores that the engine's and the graders' threads need. What the worker
            # prints is read as UTF-8, whatever the terminal speaks.
            env={
                "OMP_WAIT_POLICY": "PASSIVE",
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                "PYTHONIOENCODING": "utf-8:backslashreplace",
            },
        )
        os.close(worker_fd)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(self.process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._read_lines(self.process.stdout.fileno(), self._output)
        self._read_lines(heartbeat_fd, self._message)
        self._heartbeat_fd = heartbeat_fd

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_group(terminate_s=_LEFTOVERS_S)
        self._guard.kill()
        self._guard.wait()
        self._selector.close()
        os.close(self._heartbeat_fd)

    def pump(self, seconds: float) -> bool:
        """Take in what the worker sends, for at most this long; False once both of its pipes have ended."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        for key, _ in self._selector.select(seconds):
            key.data()
        return True

    def dump_stacks(self) -> None:
        """Have the worker write the stacks of all its threads to the log; works with the interpreter locked too."""
        logger.info("stacks of all threads of the worker:")
        self.outputs_shown = False
        self.process.send_signal(signal.SIGUSR1)
        self._pump_until(time.monotonic() + _STACKS_S)

    def end_group(self, *, terminate_s: float) -> None:
        """End the worker and all it started: SIGTERM, a wait, SIGKILL. Takes in the last output."""
        end = time.monotonic() + terminate_s
        if terminate_s and self._signal_group(signal.SIGTERM):
            while self._signal_group(0) and time.monotonic() < end:
                self.pump(_TICK_S)
                self.process.poll()
        self._signal_group(signal.SIGKILL)
        self.process.wait()
        # Nobody holds the pipes any more, so what is in them is all there is.
        self._pump_until(time.monotonic() + _STACKS_S)

    def _pump_until(self, end: float) -> None:
        while time.monotonic() < end and self.pump(_TICK_S):
            pass

    def _signal_group(self, number: int) -> bool:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _output(self, line: bytes) -> None:
        self._monitor.output(line if line.endswith(b"\n") else line + b"\n", shown=self.outputs_shown)

    def _message(self, line: bytes) -> None:
        # A worker that dies while it writes leaves a part of a message.
        if line.endswith(b"\n"):
            self._monitor.message(json.loads(line))

    def _read_lines(self, fd: int, take: Callable[[bytes], None]) -> None:
        rest = b""

        def read() -> None:
            nonlocal rest
            chunk = os.read(fd, _CHUNK_BYTES)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                take(line + b"\n")
            if not chunk:
                self._selector.unregister(fd)
            if rest and (not chunk or len(rest) > _MAX_LINE_BYTES):
                take(rest)
                rest = b""

        self._selector.register(fd, selectors.EVENT_READ, read)


def _watch(worker: _Worker, monitor: Monitor, received: list[int]) -> str | None:
    """Until the worker ends. Returns what the watchdog had against it, `killed`, or None when it ended by itself."""
    num_forwarded = 0
    while worker.process.poll() is None:
        worker.pump(_TICK_S)
        if received and not num_forwarded:
            num_forwarded = 1
            worker.process.send_signal(signal.SIGTERM)
            monitor.show(lambda display: display.line(_stopping(received[0])))
            logger.info(_stopping(received[0]))
        if received[1:].count(signal.SIGINT):
            return "killed"
        verdict = monitor.tick()
        if verdict is not None:
            return verdict
    return None


def _conclude(outcome: str | None, worker: _Worker, monitor: Monitor, folder: RunFolder, *, stopping: bool) -> End:
    """End what is left of the worker, and say how it ended."""
    if outcome == "killed":
        worker.end_group(terminate_s=0)
        return End(130, "ended at once by a second Ctrl+C; the last checkpoint is whole")
    place = monitor.where
    if outcome is not None:
        worker.dump_stacks()
        worker.end_group(terminate_s=_TERMINATE_S)
        sentence = f"the worker {outcome} {place} and was ended"
    else:
        worker.end_group(terminate_s=_LEFTOVERS_S)
        if monitor.error is not None:
            logger.error(monitor.error.sentence)
            return monitor.error
        # A worker that is asked to stop before it listens ends by the signal itself; it had nothing to save.
        if worker.process.returncode == 0 or (stopping and worker.process.returncode == -signal.SIGTERM):
            return End(0)
        sentence = f"the worker {_describe_exit(worker.process.returncode)} {monitor.where}"
    if monitor.last_error_line:
        sentence += f"; its last error was: {monitor.last_error_line}"
    logger.error(sentence)
    return End(WorkerError.exit_code, f"{sentence}; log: {folder.log_file}", repairable=True)


def _describe_exit(returncode: int) -> str:
    """`was killed by SIGKILL ...`, or `exited with code 3`."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    name = _signal_name(-returncode)
    if name == "SIGKILL":
        return "was killed by SIGKILL (likely out of memory, or by hand)"
    return f"was killed by {name}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def _stopping(number: int) -> str:
    return f"{_signal_name(number)}: dropping or finishing the step, then saving; Ctrl+C again ends the run at once"


def _recorder(received: list[int]) -> Callable[[int, FrameType | None], Any]:
    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)

    return record
