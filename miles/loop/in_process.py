"""`--in-process`: the worker's function in the caller, for debugging and notebooks. Nothing watches for a hang."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any

from miles.config.sections import RunConfig
from miles.loop.monitor import Monitor
from miles.loop.run_folder import RunFolder
from miles.loop.supervisor import SAVE_SIGNAL, TRAIN, report_end
from miles.loop.worker import WorkerContext, run_guarded
from miles.observe.display import Display, make_display
from miles.observe.heartbeat import Heartbeat
from miles.observe.log import setup_logging, stop_logging


def run_in_process(
    config: RunConfig, folder: RunFolder, *, resume_command: str, train: str = TRAIN, display: Display | None = None
) -> int:
    """What `supervise` does, in this process. The first Ctrl+C or SIGTERM requests a stop, a second Ctrl+C raises
    `KeyboardInterrupt` where the code is."""
    monitor = Monitor(folder.log_file, config.process, display=display or make_display(config.process.progress))

    def hear(message: Mapping[str, Any]) -> None:
        monitor.message(message)
        monitor.tick()

    heartbeat = Heartbeat(hear)
    context = WorkerContext(heartbeat)
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt
        context.request_stop()

    setup_logging("main", lambda line: monitor.output(line.encode(errors="backslashreplace")))
    previous: dict[signal.Signals, Any] = {
        number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)
    }
    previous[SAVE_SIGNAL] = signal.signal(SAVE_SIGNAL, lambda *_: folder.save_request.touch())
    heartbeat.start()
    try:
        exit_code = run_guarded(train, config, folder, context)
    finally:
        heartbeat.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
        stop_logging()
        monitor.close()
    sentence = monitor.error.sentence if monitor.error is not None else ""
    return report_end(exit_code, sentence, received, resume_command=resume_command)
