"""The worker process: everything that computes. Started by `supervisor.py`, which watches it.

    python -m miles.loop.worker --config FILE --train MODULE.FUNCTION --heartbeat-fd N --lock-fd N

It imports little itself: the training function is looked up by name after the heartbeat has begun, because importing
torch takes seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from miles.config.dump import load_config
from miles.config.sections import RunConfig
from miles.errors import MilesError
from miles.loop.run_folder import RunFolder, run_folder_of
from miles.observe.heartbeat import Heartbeat, send_to_pipe
from miles.observe.log import get_logger, setup_logging
from miles.observe.watchdog import where

STACKS_SIGNAL = signal.SIGUSR1

logger = get_logger(__name__)


class WorkerContext:
    """What the loop knows of the process around it."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self._stop_requested = False
        self._callbacks: list[Callable[[], None]] = []

    def stop_requested(self) -> bool:
        """True once the run should drop or finish its step, save and return."""
        return self._stop_requested

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a stop is requested, or at once when it was already. It runs inside a signal handler:
        it may set flags and wake loops, and must not wait for a lock."""
        self._callbacks.append(callback)
        if self._stop_requested:
            callback()

    def request_stop(self) -> None:
        if not self._stop_requested:
            self._stop_requested = True
            for callback in self._callbacks:
                callback()


TrainFunction = Callable[[RunConfig, RunFolder, WorkerContext], None]


def run_guarded(train: str, config: RunConfig, folder: RunFolder, context: WorkerContext) -> int:
    """Call the function named `train` and return the exit code; an error is reported over the heartbeat.

    This is the fault boundary of a worker: whatever it catches ends the run.
    """
    try:
        _load(train)(config, folder, context)
    except MilesError as error:
        context.heartbeat.report_error(str(error), error.exit_code, repairable=error.repairable)
        return error.exit_code
    except Exception as error:
        logger.exception("the run failed %s", where(context.heartbeat.phase, context.heartbeat.step))
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        place = where(context.heartbeat.phase, context.heartbeat.step)
        sentence = f"the worker failed {place}: {reason}; traceback in {folder.log_file}"
        context.heartbeat.report_error(sentence, 1, repairable=True)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="miles.loop.worker", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)
    parser.add_argument("--lock-fd", type=int, required=True)
    args = parser.parse_args(argv)
    for fd in (args.heartbeat_fd, args.lock_fd):
        os.set_inheritable(fd, False)
    # Both write without the interpreter, so they also work when it is locked or has crashed.
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    setup_logging("main", _write_stdout)
    heartbeat = Heartbeat(send_to_pipe(args.heartbeat_fd, on_broken=_end_group))
    context = WorkerContext(heartbeat)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: context.request_stop())
    # Asks the supervisor for a checkpoint; sent to the whole group by mistake, it must not end the worker.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    heartbeat.start()
    config = load_config(args.config)
    exit_code = run_guarded(args.train, config, run_folder_of(config, lock_fd=args.lock_fd), context)
    heartbeat.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # A run that failed may have left threads that would keep a normal exit waiting. The supervisor ends the children.
    os._exit(exit_code)


def _load(path: str) -> TrainFunction:
    module, _, function = path.rpartition(".")
    return vars(importlib.import_module(module))[function]


def _write_stdout(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def _end_group() -> None:
    """The supervisor is gone: nobody would notice what happens here any more."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
