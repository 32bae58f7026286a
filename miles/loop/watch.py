"""`miles watch`: a run seen from outside, by its log and by whether it still runs. Ends a run that is dead.

The run is a process, a run folder of ours or a container. Exit codes: 0 the run ended by itself, 1 it was ended here,
2 the watch cannot see it, so the run has no guard.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from miles.errors import ConfigError, MilesError
from miles.loop import release
from miles.observe.error_rule import INTERVAL_S, WINDOW_S, Judge, Limits, Seen, look
from miles.observe.heat import POLL_S, HeatGuard, HeatLimits, Sensor, describe, record_to

RUN_ENDED, RUN_STOPPED, CANNOT_SEE = 0, 1, 2

_TERMINATE_S = 60.0  # for a run to save and end
_LEFTOVERS_S = 5.0
_DOCKER_TIMEOUT_S = 60.0
_CONTAINER = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")


class CannotSeeError(MilesError):
    """The watch has lost the run: nobody guards it any more."""

    exit_code = CANNOT_SEE


class Target(Protocol):
    """A run that is watched."""

    name: str

    def is_running(self) -> bool:
        """Raises `CannotSeeError`."""

    def look(self, now: float) -> Seen | None:
        """What the log says since the last look; None when it could not be read."""

    def stop(self) -> None:
        """End the run, gently first."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def release_command(self) -> list[str]:
        """A command that resumes the run, for when this process is gone."""


def watch(
    target: Target,
    limits: Limits,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], float] | None = None,
) -> int:
    """Check every `INTERVAL_S` until the run ends or is ended; returns the exit code. `wait` sleeps, and returns how
    many seconds of that the run was paused."""
    judge = Judge(limits, started=clock())
    named: set[str] = set()
    while True:
        try:
            if not target.is_running():
                say(f"{target.name}: the run ended")
                return RUN_ENDED
        except CannotSeeError as error:
            say(f"{target.name}: {error}; the watch cannot see the run and stops")
            return CANNOT_SEE
        seen = target.look(clock())
        if seen is None:
            say(f"{target.name}: the log cannot be read, this check does not count")
        else:
            reason = judge.check(seen, clock())
            for symptom in judge.symptoms.values():
                if symptom.what not in named:
                    named.add(symptom.what)
                    say(f"{target.name}: {symptom.what}: {symptom.fix}")
            if reason is not None:
                say(f"{target.name}: {reason}. Stopping the run")
                target.stop()
                return RUN_STOPPED
        judge.paused(_sleep(INTERVAL_S) if wait is None else wait(INTERVAL_S))


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return 0.0


class HeatWait:
    """A `wait` for `watch` that guards the heat meanwhile. Leaving the context resumes the run; so does a helper
    process if this one is killed."""

    def __init__(
        self, target: Target, sensor: Sensor, limits: HeatLimits, say: Callable[[str], None], pauses: Path | None
    ):
        self._target = target
        self._say = say
        self._write = None if pauses is None else record_to(pauses)
        self._helper: subprocess.Popen[bytes] | None = None
        self._guard = HeatGuard(sensor, limits, pause=self._pause, resume=self._resume, record=self._record)

    def __enter__(self) -> HeatWait:
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.close(time.monotonic())

    def __call__(self, seconds: float) -> float:
        """Sleep; goes on while the run is paused. Returns the seconds of pauses that ended meanwhile."""
        end, paused_s = time.monotonic() + seconds, 0.0
        while time.monotonic() < end or self._guard.is_paused:
            time.sleep(min(POLL_S, seconds))
            paused_s += self._guard.poll(time.monotonic())
        return paused_s

    def _pause(self) -> None:
        command = [sys.executable, "-I", "-S", release.__file__, *self._target.release_command()]
        self._helper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._target.pause()

    def _resume(self) -> None:
        self._target.resume()
        if self._helper is not None and self._helper.stdin is not None:
            self._helper.kill()
            self._helper.wait()
            self._helper.stdin.close()
            self._helper = None

    def _record(self, entry: dict[str, Any]) -> None:
        if self._write is not None:
            self._write(entry)
        self._say(f"{self._target.name}: {describe(entry)}")


class FileLog:
    """The new lines of a log file. What was there before the first look is history."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._counts: deque[tuple[float, int]] = deque()

    def look(self, now: float) -> Seen | None:
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, os.SEEK_END) < self._position:  # begun anew
                    self._position, self._rest = 0, b""
                file.seek(self._position)
                data = file.read()
        except OSError:
            return None
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        seen = look(line.decode(errors="replace") for line in lines)
        self._counts.append((now, seen.num_errors))
        while self._counts[0][0] <= now - WINDOW_S:
            self._counts.popleft()
        return Seen(sum(count for _, count in self._counts), seen.has_step, seen.symptoms)


class ProcessTarget:
    """A process by its id, with its log file if there is one."""

    def __init__(self, pid: int, log: Path | None) -> None:
        self.name = f"process {pid}"
        self._log = None if log is None else FileLog(log)
        try:
            self._process = psutil.Process(pid)
        except psutil.NoSuchProcess as error:
            raise ConfigError(f"--pid {pid}: there is no such process") from error

    def is_running(self) -> bool:
        try:
            return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def look(self, now: float) -> Seen | None:
        return Seen() if self._log is None else self._log.look(now)

    def stop(self) -> None:
        self.resume()
        family = self._family()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.terminate()
        psutil.wait_procs([self._process], timeout=_TERMINATE_S)
        # A supervisor has ended its workers by now; other programs may leave theirs behind.
        _, left = psutil.wait_procs(family, timeout=_LEFTOVERS_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def pause(self) -> None:
        """A supervisor comes first: it would take workers that stand still for hung."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        for process in reversed(self._family()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def release_command(self) -> list[str]:
        return ["kill", "-CONT", *(str(process.pid) for process in reversed(self._family()))]

    def _family(self) -> list[psutil.Process]:
        try:
            return [self._process, *self._process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


class FolderTarget(ProcessTarget):
    """A run folder: the supervisor holds its lock, and the log is in it."""

    def __init__(self, folder: Path) -> None:
        self._lock = folder / ".lock"
        if not self._lock.is_file():
            raise ConfigError(
                f"{folder} is not a run folder: it has no .lock; expected the folder that `miles train` named"
            )
        if not self._is_held():
            raise ConfigError(f"{folder}: no run is using this folder now")
        super().__init__(int(self._lock.read_text()), folder / "log.txt")
        self.name = str(folder)

    def is_running(self) -> bool:
        return self._is_held() and super().is_running()

    def _is_held(self) -> bool:
        with open(self._lock, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


class ContainerTarget:
    """A container by its name, seen through the `docker` command."""

    def __init__(self, name: str, *, docker: str = "docker") -> None:
        if not _CONTAINER.fullmatch(name):
            raise ConfigError(f"--container {name!r} is not the name of a container")
        self.name = name
        self._docker = docker

    def is_running(self) -> bool:
        done = self._call("ps", "-q", "--filter", f"name=^{self.name}$")
        if done is None or done.returncode:
            raise CannotSeeError(f"{self._docker} ps failed{'' if done is None else ': ' + done.stderr.strip()}")
        return bool(done.stdout.strip())

    def look(self, now: float) -> Seen | None:
        done = self._call("logs", "--since", f"{WINDOW_S}s", self.name)
        if done is None or done.returncode:
            return None
        return look([*done.stdout.splitlines(), *done.stderr.splitlines()])

    def stop(self) -> None:
        self.resume()
        self._call("stop", self.name, timeout_s=_DOCKER_TIMEOUT_S + _TERMINATE_S)

    def pause(self) -> None:
        self._call("pause", self.name)

    def resume(self) -> None:
        self._call("unpause", self.name)

    def release_command(self) -> list[str]:
        return [self._docker, "unpause", self.name]

    def _call(self, *arguments: str, timeout_s: float = _DOCKER_TIMEOUT_S) -> subprocess.CompletedProcess[str] | None:
        """None when the command is not there or does not answer."""
        command: Sequence[str] = [self._docker, *arguments]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False, timeout=timeout_s
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
