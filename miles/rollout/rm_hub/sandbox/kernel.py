"""The Linux calls a sandbox is made of that Python 3.11 lacks, and the filter of system calls."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x00000080
ALL_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 38, 22, 2
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY_NOSUID_NODEV, _SYS_MOUNT_SETATTR = -100, 0x8000, 7, 442

# Calls that a program has no use for and that reach beyond its limits: other processes, namespaces and mounts, kernel
# memory that no limit counts, and parts of the kernel with a history of holes. (x86_64, aarch64) numbers.
_DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "mount_setattr": (442, 442), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "shmget": (29, 194),
    "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "kexec_load": (246, 104), "syslog": (103, 116),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "personality": (135, 92),
    "quotactl": (179, 60), "acct": (163, 89), "swapon": (167, 224), "reboot": (169, 142),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), (435, 435)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38

_libc = ctypes.CDLL(None, use_errno=True)


class SandboxError(Exception):
    """This machine does not allow a step of building the sandbox."""


def missing() -> str | None:
    """Why no sandbox can be built on this kind of machine; None when one may be."""
    if sys.platform != "linux":
        return f"it needs Linux namespaces, and this is {sys.platform}"
    if platform.machine() not in _ARCHITECTURES:
        return f"its system-call filter knows {' and '.join(_ARCHITECTURES)}, not {platform.machine()}"
    return None


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare (new namespaces)")


def die_with_parent() -> None:
    """SIGKILL for this process when its parent ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl (death signal)")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    data = None if options is None else options.encode()
    _checked(_libc.mount(*arguments, ctypes.c_ulong(flags), data), f"mount {target}")


def make_read_only(target: str) -> None:
    """A mount and all mounts below it: read-only, without devices and without set-user-id programs."""
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY_NOSUID_NODEV, 0, 0, 0)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    _checked(result, f"mount_setattr {target} (Linux 5.12 or newer)")


def enter_root(folder: str) -> None:
    """Make the mount at `folder` the root directory; everything else is gone."""
    os.chdir(folder)
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")


def filter_system_calls() -> None:
    """Give up new privileges and the calls above, for this process and all that come from it."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl (no new privileges)")
    program = _filter(*_ARCHITECTURES[platform.machine()])
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


def _filter(column: int, architecture: int) -> bytes:
    """BPF: another architecture's calls kill, denied ones fail with EPERM, new namespaces by clone too."""
    denied = [numbers[column] for numbers in _DENIED.values()]
    namespaces = ALL_NAMESPACES | CLONE_NEWTIME
    checks: list[tuple[int, int, int | str, int | str]] = [
        (_LOAD, 4, 0, 0),  # architecture
        (_JUMP_EQUAL, architecture, 0, "kill"),
        (_LOAD, 0, 0, 0),  # number of the call
        (_JUMP_AT_LEAST, 0x40000000, "kill", 0),  # the x32 numbers of x86_64
        *((_JUMP_EQUAL, number, "deny", 0) for number in denied),
        (_JUMP_EQUAL, _CLONE3[column], "absent", 0),  # its flags are in memory; C libraries fall back to clone
        (_JUMP_EQUAL, _CLONE[column], 0, "allow"),
        (_LOAD, 16, 0, 0),  # flags of clone, low half
        (_JUMP_ANY_BIT, namespaces, "deny", "allow"),
    ]
    ends = {"allow": _ALLOW, "deny": _ERROR | _EPERM, "absent": _ERROR | _ENOSYS, "kill": _KILL}
    places = {name: len(checks) + position for position, name in enumerate(ends)}
    program = b""
    for position, (code, value, yes, no) in enumerate(checks):
        jumps = [places[jump] - position - 1 if isinstance(jump, str) else jump for jump in (yes, no)]
        program += struct.pack("HBBI", code, *jumps, value)
    return program + b"".join(struct.pack("HBBI", _RETURN, 0, 0, value) for value in ends.values())


def _checked(result: int, what: str) -> None:
    if result < 0:
        raise SandboxError(f"{what}: {os.strerror(ctypes.get_errno())}")
