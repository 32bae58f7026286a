"""Pauses a run while the GPU is too hot, and writes every pause down, so that times can be compared without them.

In the worker a thread shuts the gate of `gate.py`; `miles watch --heat` pauses a run from outside. Whatever ends the
guard resumes what it has paused.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles.config.sections import ProcessConfig
from miles.errors import ConfigError, MilesError
from miles.observe.gate import GATE
from miles.observe.heartbeat import Heartbeat
from miles.observe.log import get_logger
from miles.observe.metrics import now

try:
    import pynvml
except ImportError:
    pynvml = None

POLL_S = 5.0
PAUSES_NAME = "pauses.jsonl"

logger = get_logger(__name__)


class SensorError(MilesError):
    """The temperature cannot be read."""


class Sensor(Protocol):
    def celsius(self) -> float:
        """The temperature of the hottest GPU. Raises `SensorError`."""


@dataclass(frozen=True)
class HeatLimits:
    """Pause at `pause_c`; go on at `resume_c` after at least `min_s`, or after `max_s` at any temperature."""

    pause_c: float = 84.0
    resume_c: float = 74.0
    min_s: float = 45.0
    max_s: float = 120.0


class NvmlSensor:
    """All GPUs of this machine through NVML. Raises `ConfigError` when there is none."""

    def __init__(self) -> None:
        if pynvml is None:
            raise ConfigError("the heat guard needs nvidia-ml-py: pip install nvidia-ml-py, or leave --heat-guard out")
        try:
            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise ConfigError(f"the heat guard cannot read a GPU: {error}; leave --heat-guard out here") from error
        if not self._gpus:
            raise ConfigError("the heat guard found no GPU; leave --heat-guard out here")

    def celsius(self) -> float:
        try:
            return float(max(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU) for gpu in self._gpus))
        except pynvml.NVMLError as error:
            raise SensorError(str(error)) from error


class HeatGuard:
    """Belongs to one thread. `record` gets one mapping per pause and per resume."""

    def __init__(
        self,
        sensor: Sensor,
        limits: HeatLimits,
        *,
        pause: Callable[[], None],
        resume: Callable[[], None],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        self._sensor = sensor
        self._limits = limits
        self._pause = pause
        self._resume = resume
        self._record = record
        self._paused_at: float | None = None
        self._sensor_works = True

    @property
    def is_paused(self) -> bool:
        return self._paused_at is not None

    def poll(self, time_s: float) -> float:
        """Read the sensor and act. Returns the seconds of a pause that ended now, else 0."""
        celsius = self._celsius()
        if self._paused_at is None:
            if celsius is not None and celsius >= self._limits.pause_c:
                # Noted first: if pausing is interrupted, `close` still resumes.
                self._paused_at = time_s
                self._pause()
                self._record({"time": now(), "kind": "pause", "celsius": celsius})
            return 0.0
        paused_s = time_s - self._paused_at
        is_cool = celsius is not None and celsius <= self._limits.resume_c
        if (is_cool and paused_s >= self._limits.min_s) or paused_s >= self._limits.max_s:
            return self._go_on(time_s, celsius)
        return 0.0

    def close(self, time_s: float) -> None:
        """Resume what is paused, at any temperature."""
        if self._paused_at is not None:
            self._go_on(time_s, None)

    def _go_on(self, time_s: float, celsius: float | None) -> float:
        assert self._paused_at is not None, "only a pause ends"
        paused_s = time_s - self._paused_at
        self._resume()
        self._paused_at = None
        self._record({"time": now(), "kind": "resume", "celsius": celsius, "seconds": round(paused_s, 1)})
        return paused_s

    def _celsius(self) -> float | None:
        try:
            celsius = self._sensor.celsius()
        except SensorError as error:
            if self._sensor_works:
                logger.warning(f"the temperature cannot be read ({error}); no pause until it can")
            self._sensor_works = False
            return None
        self._sensor_works = True
        return celsius


def record_to(path: Path) -> Callable[[dict[str, Any]], None]:
    """Appends to a `pauses.jsonl` and logs."""

    def record(entry: dict[str, Any]) -> None:
        logger.info(describe(entry))
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            logger.warning(f"{path}: the pause cannot be written down: {error.strerror}")

    return record


def describe(entry: dict[str, Any]) -> str:
    at = "" if entry["celsius"] is None else f" at {entry['celsius']:g} C"
    if entry["kind"] == "pause":
        return f"paused{at}: the GPU is too hot"
    return f"resumed{at} after {entry['seconds']:g} s"


def make_sensor(process: ProcessConfig) -> Sensor | None:
    """The sensor that `--heat-guard` asks for. Raises `ConfigError` when there is none."""
    return NvmlSensor() if process.heat_guard else None


@contextmanager
def guarding(sensor: Sensor | None, process: ProcessConfig, folder: Path, heartbeat: Heartbeat) -> Iterator[None]:
    """Shut the gate of this process while it is too hot; nothing without a sensor."""
    if sensor is None:
        yield
        return

    def pause() -> None:
        GATE.shut()
        heartbeat.set_paused(True)

    def resume() -> None:
        GATE.open()
        heartbeat.set_paused(False)

    limits = HeatLimits(process.heat_pause, process.heat_resume)
    guard = HeatGuard(sensor, limits, pause=pause, resume=resume, record=record_to(folder / PAUSES_NAME))
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(POLL_S):
            guard.poll(time.monotonic())
        guard.close(time.monotonic())

    GATE.begin()
    thread = threading.Thread(target=poll, name="heat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
