"""Import paths given by flags: load `module.function`, check its signature, and call it where it cannot block a run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import difflib
import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from miles.errors import PluginError


def load_function(path: str, *, flag: str) -> Callable[..., Any]:
    """The callable that an import path `module.function` names. Raises `PluginError`."""
    function = load_object(path, flag=flag)
    if not callable(function):
        raise PluginError(f"{flag} {path}: is a {type(function).__name__}; expected a function or another callable")
    return function


def load_object(path: str, *, flag: str) -> Any:
    """What an import path `module.name` names.

    Modules are looked up in the working directory too, after everything else. Raises `PluginError` that names the
    flag, the path, what was tried and what to do.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name or not attribute:
        raise PluginError(f"{flag} {path}: expected an import path module.function, for example my_reward.score")
    module = _import_module(module_name, path=path, flag=flag)
    try:
        return getattr(module, attribute)
    except AttributeError:
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("__")]
        close = difflib.get_close_matches(attribute, names, n=1)
        hint = f"did you mean {module_name}.{close[0]}?" if close else f"it has: {', '.join(sorted(names)) or 'none'}"
        raise PluginError(
            f"{flag} {path}: module {module_name} ({module.__file__}) has no function {attribute}; {hint}"
        ) from None


def _import_module(name: str, *, path: str, flag: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise PluginError(
                f"{flag} {path}: there is no module {error.name}; looked in the working directory {os.getcwd()}, in "
                "PYTHONPATH and in the installed packages. Put the folder that holds it into PYTHONPATH"
            ) from None
        raise PluginError(f"{flag} {path}: module {name} imports {error.name}, which is not installed") from error
    except Exception as error:  # fault boundary: importing runs code of the user, which can raise anything
        raise PluginError(f"{flag} {path}: importing module {name} failed: {describe_error(error)}") from error


def check_signature(function: Callable[..., Any], *arguments: str, path: str, flag: str) -> None:
    """Raise `PluginError` unless `function` can be called with these positional arguments (given by name)."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none; the probe will call them
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise PluginError(
            f"{flag} {path}: is called as f({', '.join(arguments)}) but is defined as f{signature}: {error}"
        ) from None


def describe_error(error: BaseException, *, function: Callable[..., Any] | None = None) -> str:
    """`my_reward.py:12: ValueError: text`: the place the error comes from and the last line of its traceback.

    The place is the deepest line in the file of `function`, so that it is the user's line and not one of a library;
    for a syntax error it is the line that cannot be read.
    """
    last_line = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {last_line}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_own_frame(frame.filename)]
    users_file = getattr(_code(function), "co_filename", None) if function is not None else None
    frames = [frame for frame in frames if frame.filename == users_file] or frames
    return f"{frames[-1].filename}:{frames[-1].lineno}: {last_line}" if frames else last_line


def locate(function: Callable[..., Any]) -> str:
    """`my_reward.py:10`, where the function is defined; its name when it is a builtin or an object."""
    code = _code(function)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def _code(function: Callable[..., Any]) -> CodeType | None:
    """Of the function, or of the method that a class or an object is called by; None for builtins."""
    method = getattr(function, "__init__" if inspect.isclass(function) else "__call__", None)
    return getattr(inspect.unwrap(function), "__code__", None) or getattr(method, "__code__", None)


def _is_own_frame(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<frozen importlib") or filename == importlib.__file__


def _for_future(error: BaseException) -> BaseException:
    """The error, or one in its place that reaches the one who waits: a `StopIteration` would not, and what is no
    `Exception` would end a thread, or look as if the wait was cancelled."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    text = f"called sys.exit({error.code})" if isinstance(error, SystemExit) else f"raised {type(error).__name__}"
    return RuntimeError(f"it {text}").with_traceback(error.__traceback__)


async def call_apart(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a plain function in a daemon thread of its own: any number run at the same time, and one that never
    returns holds up neither another nor the end of the process."""
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(function(*arguments, **named))
        except BaseException as error:  # not caught here: the caller raises it
            outcome.set_exception(_for_future(error))

    threading.Thread(target=run, name="call-apart", daemon=True).start()
    return await asyncio.wrap_future(outcome)


_STUCK_S = 0.5  # a thread that does nothing for so long after a time-out is left to itself


class HookTimeoutError(Exception):
    """A hook ran for longer than it may."""


class HookThread:
    """A thread with its own event loop for functions of the user, plain or async.

    A hook that never returns, or an async one that blocks, holds up this thread only: the caller's time-out still
    fires, and calls that wait behind it go on in a new thread. Plain functions run one at a time, as their authors
    expect; async ones interleave. Callers share one event loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queued: dict[asyncio.Event, None] = {}  # of calls that wait for their turn, in order
        self._loop = self._start()

    def _start(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        # a daemon: one hanging hook must not keep the process from ending
        threading.Thread(target=loop.run_forever, name=self._name, daemon=True).start()
        return loop

    async def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        """The result of the function. Raises what it raises, or `HookTimeoutError` when it runs for longer than
        `timeout_s`; time spent waiting for other calls of this thread does not count."""
        while True:
            loop, call = self._loop, _HookCall(function, arguments)
            loop.call_soon_threadsafe(call.begin)
            self._queued[call.turn] = None
            outcome = asyncio.wrap_future(call.outcome)
            try:
                await call.turn.wait()
                if not call.outcome.cancel():  # it has begun
                    done, _ = await asyncio.wait([outcome], timeout=timeout_s)
                    if done:
                        outcome.exception()  # now asyncio knows that it was read; of a `TimeoutError` it has a copy
                        return call.outcome.result()
                    await self._leave_if_stuck(loop)
                    raise HookTimeoutError
            finally:
                self._queued.pop(call.turn, None)
                call.outcome.cancel()  # nobody waits for it any more: it need not begin,
                outcome.cancel()  # and what it still says is of no interest
                loop.call_soon_threadsafe(call.end)

    async def _leave_if_stuck(self, loop: asyncio.AbstractEventLoop) -> None:
        """Leave a blocked thread to itself, and let the calls behind it start again in a new one."""
        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
        answered, _ = await asyncio.wait([answer], timeout=_STUCK_S)
        if not answered and self._loop is loop:
            self._loop = self._start()
            for turn in self._queued:
                turn.set()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, 0.01, self._loop.stop)  # calls given up end before


class _HookCall:
    """One call: made in the caller's event loop, run in the thread of the hooks."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._caller = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self.turn = asyncio.Event()
        self.outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def begin(self) -> None:
        if not self.outcome.cancelled():
            self._task = asyncio.ensure_future(self.run())

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        if not self.outcome.set_running_or_notify_cancel():  # given up, or begun again in a new thread
            return
        self._caller.call_soon_threadsafe(self.turn.set)
        try:
            value = self._function(*self._arguments)
            value = await value if inspect.isawaitable(value) else value
        except BaseException as error:  # not caught here: the caller raises it
            self.outcome.set_exception(_for_future(error))
        else:
            self.outcome.set_result(value)
