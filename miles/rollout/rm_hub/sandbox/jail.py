"""A process that sees nothing of this machine: `Jail(...)` starts a Python program in namespaces of its own.

Called in a grading worker, which has one thread. The tree of processes, each in the namespaces of the one before:

    worker - supervisor (new namespaces) - init (process 1 there: builds the file system) - the program

When the worker dies the supervisor is killed, with it init, and with init every process of its namespace. There is no
way to run a program without the sandbox: where a step is not allowed, `SandboxError` says which.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles.rollout.rm_hub.sandbox import kernel
from miles.rollout.rm_hub.sandbox.kernel import SandboxError

NOBODY = 65534
HOME = "/box"
_MAX_DESCRIPTOR = 1 << 16
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": HOME,
    "TMPDIR": HOME,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same verdict each time, also where a program prints a set
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one jail: memory and CPU time of each process, the others of all together."""

    cpu_s: int = 10
    memory_bytes: int = 512 << 20
    num_processes: int = 8  # threads count; init is one of them
    disk_bytes: int = 16 << 20
    num_files: int = 512
    num_open_files: int = 64  # of each process
    output_bytes: int = 1 << 20  # of each pipe out


class Jail:
    """`python -I -S argv` with `files` in its working directory.

    `inside` are the descriptors the program gets as 0, 1, 2, ...; they are closed here. Nothing else reaches it.
    Use as a context manager: on leaving, all its processes are gone.
    """

    def __init__(
        self, argv: Sequence[str], *, files: Mapping[str, bytes], inside: Sequence[int], limits: Limits
    ) -> None:
        self._init: int | None = None  # descriptor of process 1 of the jail
        status, report = os.pipe()
        go, release = os.pipe()
        self._supervisor = os.fork()
        if self._supervisor == 0:
            os.close(status)
            os.close(release)
            _supervise(list(argv), files, list(inside), limits, report=report, go=go)
        for descriptor in (report, go, *inside):
            os.close(descriptor)
        try:
            self._build(status, release)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(status)
            os.close(release)

    def __enter__(self) -> Jail:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, status: int, release: int) -> None:
        """Follow the steps of the child: `u` new namespaces, `p<pid>` init exists, then the end when the program runs;
        `!` and a text when a step failed."""
        with os.fdopen(os.dup(status), "rb") as lines:
            for line in lines:
                kind, text = line[:1], line[1:].decode(errors="replace").strip()
                if kind == b"u":
                    _map_users(self._supervisor)
                    os.write(release, b"g")
                elif kind == b"p":
                    self._init = os.pidfd_open(int(text))
                else:
                    raise SandboxError(text)
        if self._init is None:
            raise SandboxError("the process that builds it ended early")

    def wait(self, timeout_s: float) -> int | None:
        """Exit code of the program, 128 and more for a signal; None when it still runs."""
        end = time.monotonic() + timeout_s
        while self._supervisor:
            pid, code = os.waitpid(self._supervisor, os.WNOHANG)
            if pid:
                self._supervisor = 0
                return os.waitstatus_to_exitcode(code)
            if time.monotonic() > end:
                return None
            time.sleep(0.002)
        return None

    def close(self) -> None:
        """Kill all processes of the jail and wait until they are gone."""
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            os.close(self._init)
            self._init = None
        elif self._supervisor:
            os.kill(self._supervisor, signal.SIGKILL)
        if self._supervisor:
            # It ends when init has ended, which the kernel lets happen after everything else in there.
            os.waitpid(self._supervisor, 0)
            self._supervisor = 0


def read_all(descriptor: int, *, limit: int, deadline: float) -> bytes | None:
    """What comes from a pipe until its end; None when it is more than `limit` bytes or not over at `deadline`."""
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left)[0]:
            break
        part = os.read(descriptor, 65536)
        if not part:
            return data
        data += part
        if len(data) > limit:
            break
    return None


def _map_users(pid: int) -> None:
    """In the jail the user is nobody; so it is outside where this process may choose (as root), else our own user."""
    if os.geteuid() == 0:
        users = groups = f"0 0 1\n{NOBODY} {NOBODY} 1\n"
    else:
        users, groups = f"{NOBODY} {os.geteuid()} 1\n", f"{NOBODY} {os.getegid()} 1\n"
        Path(f"/proc/{pid}/setgroups").write_text("deny", encoding="ascii")
    try:
        Path(f"/proc/{pid}/uid_map").write_text(users, encoding="ascii")
        Path(f"/proc/{pid}/gid_map").write_text(groups, encoding="ascii")
    except OSError as error:
        raise SandboxError(f"mapping users: {error.strerror}") from error


def _supervise(
    argv: list[str], files: Mapping[str, bytes], inside: list[int], limits: Limits, *, report: int, go: int
) -> None:
    """The first child. Never returns."""
    try:
        kernel.unshare(kernel.ALL_NAMESPACES)
        kernel.die_with_parent()  # after unshare, which clears it
        os.write(report, b"u\n")
        if not os.read(go, 1):
            os._exit(1)
        init = os.fork()
        if init == 0:
            kernel.die_with_parent()
            if select.select([go], [], [], 0)[0]:  # the worker has ended, so the supervisor may have, before that call
                os._exit(1)
            _init(argv, files, inside, limits, report=report)
        os.write(report, b"p%d\n" % init)
        os.closerange(0, _MAX_DESCRIPTOR)
        _, code = os.waitpid(init, 0)
        os._exit(_plain_code(code))
    except (OSError, SandboxError) as error:
        _give_up(report, error)


def _init(argv: list[str], files: Mapping[str, bytes], inside: list[int], limits: Limits, *, report: int) -> None:
    """Process 1 of the jail: builds its file system, starts the program, and ends with it. Never returns."""
    try:
        _build_root(files, limits)
        program = os.fork()
        if program == 0:
            _become_program(argv, inside, limits, report=report)
        os.closerange(0, _MAX_DESCRIPTOR)
        while True:
            pid, code = os.wait()
            if pid == program:
                os._exit(_plain_code(code))  # the kernel kills whatever the program left behind
    except (OSError, SandboxError) as error:
        _give_up(report, error)


def _build_root(files: Mapping[str, bytes], limits: Limits) -> None:
    """A small file system in memory with the system and Python read-only, as the only thing there is."""
    root = _mount_point()
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    options = f"size={limits.disk_bytes},nr_inodes={limits.num_files},mode=0755"
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    bound: list[str] = []
    for path in (*_SYSTEM, *_DEVICES, sys.base_prefix, os.path.dirname(os.path.realpath(_python()))):
        if os.path.exists(path) and not any(path == other or path.startswith(f"{other}/") for other in bound):
            _show(path, root)
            bound.append(path)
    home = root + HOME
    os.mkdir(home, 0o700)
    os.symlink(HOME, f"{root}/tmp")
    for name, content in files.items():
        Path(home, name).write_bytes(content)
    os.chown(home, NOBODY, NOBODY)
    kernel.enter_root(root)


def _show(path: str, root: str) -> None:
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    kernel.mount(path, target, None, kernel.MS_BIND | kernel.MS_REC)
    if path not in _DEVICES:
        kernel.make_read_only(target)


def _mount_point() -> str:
    """An empty folder of ours. Each jail mounts on it in its own namespace, so nothing is ever seen in it from here."""
    folder = f"{tempfile.gettempdir()}/miles-jail-{os.geteuid()}"
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise SandboxError(f"{folder} is not a folder")
    return folder


def _become_program(argv: list[str], inside: list[int], limits: Limits, *, report: int) -> None:
    """Take the descriptors, give up all rights, and run. Never returns."""
    try:
        first = max(report, *inside) + 1
        for place, descriptor in enumerate([*inside, report]):  # away from the places they go to
            os.dup2(descriptor, first + place)
        for place in range(len(inside)):
            os.dup2(first + place, place)
        report = first + len(inside)
        os.set_inheritable(report, False)
        os.closerange(len(inside), report)
        os.closerange(report + 1, _MAX_DESCRIPTOR)  # above all the pipe to the owner, which trusts what comes from it
        os.chdir(HOME)
        os.setsid()
        if os.getuid() != NOBODY:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        for kind, value in (
            (resource.RLIMIT_CPU, limits.cpu_s),
            (resource.RLIMIT_AS, limits.memory_bytes),
            (resource.RLIMIT_NPROC, limits.num_processes),
            (resource.RLIMIT_FSIZE, limits.disk_bytes),
            (resource.RLIMIT_NOFILE, limits.num_open_files),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (value, value))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        kernel.filter_system_calls()
        os.execve(_python(), ["python", "-I", "-S", *argv], _ENVIRONMENT)
    except (OSError, ValueError, SandboxError) as error:
        _give_up(report, error)


def _python() -> str:
    return sys._base_executable or sys.executable  # type: ignore[attr-defined]  # of a venv the real one


def _plain_code(code: int) -> int:
    exit_code = os.waitstatus_to_exitcode(code)
    return exit_code if exit_code >= 0 else 128 - exit_code


def _give_up(report: int, error: Exception) -> None:
    with contextlib.suppress(BrokenPipeError):  # a worker that has ended
        os.write(report, f"!{error}\n".encode())
    os._exit(1)
