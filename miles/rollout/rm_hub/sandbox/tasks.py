"""What a worker process does for `code`: run a program against its tests, in jails."""

from __future__ import annotations

import ast
import json
import math
import os
import secrets
import select
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from miles.rollout.rm_hub.sandbox import kernel
from miles.rollout.rm_hub.sandbox.jail import Jail, Limits, read_all
from miles.rollout.rm_hub.sandbox.kernel import SandboxError

_CANDIDATE = Path(__file__).with_name("candidate.py").read_bytes()
_TESTER = Path(__file__).with_name("tester.py").read_bytes()
_PROBE = b"import os\nassert os.getpid() > 1 and not os.path.exists('/proc/self')\nprint(6 * 7)\n"


def run(task: tuple[str, str, float]) -> Any:
    """`("tests", JSON of {"program": ..., and the tests}, seconds)`: whether the program passes all of them.
    `("output", program, seconds)`: what it prints, errors included.
    `("probe", "", seconds)`: why no sandbox can be built here, or None."""
    kind, text, timeout_s = task
    if kind == "probe":
        return _probe(timeout_s)
    if kind == "output":
        return _output(text.encode(errors="surrogatepass"), time.monotonic() + timeout_s)
    job = json.loads(text)
    deadline = time.monotonic() + timeout_s
    program = job["program"].encode(errors="surrogatepass")
    if "tests" in job:
        return passes_test_code(program, job["tests"].encode(), deadline)
    if job.get("fn_name"):
        return passes_calls(program, job["fn_name"], job["inputs"], job["outputs"], job.get("tolerance"), deadline)
    pairs = zip(job["inputs"], job["outputs"], strict=True)
    return all(_prints(program, given, expected, deadline) for given, expected in pairs)


def _probe(timeout_s: float) -> str | None:
    problem = kernel.missing()
    if problem is not None:
        return problem
    try:
        right = _prints(_PROBE, "", "42", time.monotonic() + timeout_s)
    except SandboxError as error:
        return str(error)
    return None if right else "a program that prints 42 failed in it"


def _prints(program: bytes, given: str, expected: str, deadline: float) -> bool:
    """Whether the program reads `given`, prints `expected` and ends without an error. Space at line ends and at the
    end of the text is not compared."""
    limits = _limits(deadline)
    with ExitStack() as stack:
        printed, to_print = _pipe_to_read(stack)
        inside = [_file(given), to_print, _nowhere()]
        jail = stack.enter_context(Jail(["program.py"], files={"program.py": program}, inside=inside, limits=limits))
        text = read_all(printed, limit=limits.output_bytes, deadline=deadline)
        if text is None or jail.wait(deadline - time.monotonic()) != 0:
            return False
    return _lines(text.decode(errors="replace")) == _lines(expected)


def _output(program: bytes, deadline: float) -> str:
    limits = _limits(deadline)
    with ExitStack() as stack:
        printed, to_print = _pipe_to_read(stack)
        inside = [_nowhere(), to_print, os.dup(to_print)]
        stack.enter_context(Jail(["program.py"], files={"program.py": program}, inside=inside, limits=limits))
        text = read_all(printed, limit=limits.output_bytes, deadline=deadline)
    return "error: it printed too much or ran for too long" if text is None else text.decode(errors="replace")


def passes_calls(
    program: bytes, name: str, inputs: Sequence[Any], outputs: Sequence[Any], tolerance: float | None, deadline: float
) -> bool:
    """Whether `name(*inputs[i])` gives `outputs[i]` for each i. The expected values never enter the jail."""
    with ExitStack() as stack:
        requests, replies = _start_candidate(stack, program, deadline)
        stack.callback(os.close, requests)
        stack.callback(os.close, replies)
        reader = _LineReader(replies, limit=_limits(deadline).output_bytes, deadline=deadline)
        names = reader.literal()
        if not isinstance(names, list) or name not in names:
            return False
        for arguments, expected in zip(inputs, outputs, strict=True):
            if not _send(requests, f"{(name, tuple(arguments), {})!r}\n".encode(), deadline):
                return False
            reply = reader.literal()
            if not isinstance(reply, tuple) or reply[:1] != ("ok",) or not same(reply[1], expected, tolerance):
                return False
    return True


def passes_test_code(program: bytes, tests: bytes, deadline: float) -> bool:
    """Whether the test code comes to its end. It runs in another jail than the program, which cannot touch it."""
    token = secrets.token_bytes(16)
    with ExitStack() as stack:
        requests, replies = _start_candidate(stack, program, deadline)
        verdict, said = _pipe_to_read(stack)
        files = {"tester.py": _TESTER, "tests.py": tests, "token": token}
        inside = [_nowhere(), _nowhere(), _nowhere(), replies, requests, said]
        stack.enter_context(Jail(["tester.py"], files=files, inside=inside, limits=_limits(deadline)))
        return read_all(verdict, limit=len(token), deadline=deadline) == token


def _start_candidate(stack: ExitStack, program: bytes, deadline: float) -> tuple[int, int]:
    """A jail that waits for calls; gives the descriptors to write requests to and to read replies from."""
    from_us, requests = os.pipe()
    replies, to_us = os.pipe()
    inside = [_nowhere(), _nowhere(), _nowhere(), from_us, to_us]
    files = {"candidate.py": _CANDIDATE, "program.py": program}
    stack.enter_context(Jail(["candidate.py"], files=files, inside=inside, limits=_limits(deadline)))
    return requests, replies


def same(value: Any, expected: Any, tolerance: float | None) -> bool:
    """Equality of plain data: a tuple equals a list, True does not equal 1, keys of JSON objects may be numbers."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        if tolerance is None or math.isinf(value):
            return value == expected
        return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(same(a, b, tolerance) for a, b in zip(value, expected, strict=True))
    if isinstance(value, dict) and isinstance(expected, dict):
        value = {str(key): item for key, item in value.items()}
        return value.keys() == expected.keys() and all(same(value[key], expected[key], tolerance) for key in value)
    return type(value) is type(expected) and bool(value == expected)


class _LineReader:
    """Literals from a pipe, one a line, within a number of bytes in all."""

    def __init__(self, descriptor: int, *, limit: int, deadline: float) -> None:
        self._descriptor, self._left, self._deadline = descriptor, limit, deadline
        self._buffer = b""

    def literal(self) -> Any:
        """The next one; None when there is none, or it is no literal."""
        while b"\n" not in self._buffer:
            part = _read_some(self._descriptor, self._deadline)
            self._left -= len(part)
            if not part or self._left < 0:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return ast.literal_eval(line.decode())
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None


def _read_some(descriptor: int, deadline: float) -> bytes:
    ready = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
    return os.read(descriptor, 65536) if ready else b""


def _send(descriptor: int, data: bytes, deadline: float) -> bool:
    """Write all of it; False when the other side has ended or does not read."""
    os.set_blocking(descriptor, False)
    while data:
        if not select.select([], [descriptor], [], max(0.0, deadline - time.monotonic()))[1]:
            return False
        try:
            data = data[os.write(descriptor, data) :]
        except BrokenPipeError:
            return False
    return True


def _pipe_to_read(stack: ExitStack) -> tuple[int, int]:
    """Its end to read, closed with the stack, and its end to write, for a jail."""
    read, write = os.pipe()
    stack.callback(os.close, read)
    return read, write


def _file(text: str) -> int:
    descriptor = os.memfd_create("stdin")
    os.write(descriptor, text.encode(errors="surrogatepass"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _nowhere() -> int:
    return os.open(os.devnull, os.O_RDWR)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _limits(deadline: float) -> Limits:
    return Limits(cpu_s=max(1, math.ceil(deadline - time.monotonic())))
