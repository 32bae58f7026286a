from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest

from miles.errors import PluginError
from miles.plugins import (
    HookThread,
    HookTimeoutError,
    call_apart,
    check_signature,
    describe_error,
    load_function,
    locate,
)


@pytest.fixture
def plugin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_function_is_loaded_from_a_module_on_the_path(plugin_dir: Path) -> None:
    (plugin_dir / "plug_ok.py").write_text("def score(args, sample):\n    return 3.0\n")
    assert load_function("plug_ok.score", flag="--custom-rm-path")(None, None) == 3.0


def test_modules_of_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plug_cwd.py").write_text("def score(args, sample):\n    return 4.0\n")
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    monkeypatch.chdir(tmp_path)
    assert load_function("plug_cwd.score", flag="--x")(None, None) == 4.0


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("score", "", "module.function"),
        ("plug_absent.score", "", "no module plug_absent"),
        ("plug_attr.scroe", "def score(args, sample): ...", "did you mean plug_attr.score?"),
        ("plug_value.score", "score = 3", "is a int"),
        ("plug_import.score", "import nonexistent_thing_x", "imports nonexistent_thing_x, which is not installed"),
        ("plug_raise.score", "\nraise RuntimeError('no key')", "plug_raise.py:2: RuntimeError: no key"),
        ("plug_syntax.score", "x = 1\ndef broken(:\n", "plug_syntax.py:2"),
    ],
)
def test_a_path_that_cannot_be_loaded_names_flag_and_cause(
    plugin_dir: Path, path: str, source: str, expected: str
) -> None:
    if source:
        (plugin_dir / f"{path.partition('.')[0]}.py").write_text(source)
    with pytest.raises(PluginError) as caught:
        load_function(path, flag="--custom-rm-path")
    assert f"--custom-rm-path {path}" in str(caught.value)
    assert expected in str(caught.value)


def test_a_signature_that_cannot_take_the_call_is_refused() -> None:
    def too_short(sample: object) -> float:
        return 0.0

    def flexible(args: object, sample: object, **kwargs: object) -> float:
        return 0.0

    check_signature(flexible, "args", "sample", path="m.flexible", flag="--custom-rm-path")
    with pytest.raises(PluginError, match=r"called as f\(args, sample\) but is defined as f\(sample"):
        check_signature(too_short, "args", "sample", path="m.too_short", flag="--custom-rm-path")


def test_hooks_plain_and_async_return_their_result() -> None:
    def plain(x: int) -> int:
        return x + 1

    async def asynchronous(x: int) -> int:
        await asyncio.sleep(0)
        return x + 2

    async def run() -> tuple[int, int]:
        return await hooks.call(plain, 1, timeout_s=5), await hooks.call(asynchronous, 1, timeout_s=5)

    hooks = HookThread("test")
    assert asyncio.run(run()) == (2, 3)
    hooks.close()


@pytest.mark.parametrize("kind", ["plain", "blocking_async", "waiting_async"])
def test_a_hanging_hook_times_out_and_leaves_the_caller_free(kind: str) -> None:
    def plain() -> None:
        time.sleep(1.5)

    async def blocking_async() -> None:
        time.sleep(1.5)

    async def waiting_async() -> None:
        await asyncio.sleep(60)

    function = {"plain": plain, "blocking_async": blocking_async, "waiting_async": waiting_async}[kind]

    async def run() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        with pytest.raises(HookTimeoutError):
            await hooks.call(function, timeout_s=0.3)
        ticking.cancel()
        return ticks

    hooks = HookThread("test")
    assert asyncio.run(run()) >= 3
    hooks.close()


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_calls_behind_a_hanging_hook_go_on_in_another_thread(kind: str) -> None:
    called = []

    def plain(x: int) -> int:
        called.append(x)
        if x == 0:
            time.sleep(0.05)  # the others wait behind it by then
        if x == 1:
            end.wait()
        return x

    async def blocking(x: int) -> int:
        await asyncio.sleep(0)
        return plain(x)

    async def run() -> list[int | BaseException]:
        function = plain if kind == "plain" else blocking
        calls = [hooks.call(function, x, timeout_s=0.2) for x in range(4)]
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=20)
        end.set()
        await asyncio.sleep(0.05)  # the thread that hung comes to the calls behind it
        return results

    hooks, end = HookThread("test"), threading.Event()
    zero, one, *others = asyncio.run(run())
    assert zero == 0
    assert isinstance(one, HookTimeoutError)
    if kind == "plain":
        assert others == [2, 3]
        assert called == [0, 1, 2, 3], "each was called once"
    hooks.close()


def test_an_error_is_located_in_the_users_file(plugin_dir: Path) -> None:
    (plugin_dir / "plug_deep.py").write_text("import json\n\ndef score(args, sample):\n    return json.loads('{')\n")
    function = load_function("plug_deep.score", flag="--custom-rm-path")
    with pytest.raises(ValueError) as caught:
        function(None, None)
    assert describe_error(caught.value, function=function).startswith(f"{plugin_dir}/plug_deep.py:4: ")
    assert "JSONDecodeError" in describe_error(caught.value, function=function)
    assert locate(function) == f"{plugin_dir}/plug_deep.py:3"


def test_a_stop_iteration_reaches_the_caller() -> None:
    hooks = HookThread("test")

    def first(numbers: list[int]) -> int:
        return next(iter(numbers))

    async def run() -> None:
        for call in (hooks.call(first, [], timeout_s=20), call_apart(first, [])):
            with pytest.raises(RuntimeError, match="it raised StopIteration"):
                await asyncio.wait_for(call, timeout=10)
        for error in (asyncio.CancelledError, KeyboardInterrupt, BaseException):  # a library can raise its own
            with pytest.raises(RuntimeError, match=f"it raised {error.__name__}"):
                await asyncio.wait_for(hooks.call(Mock(side_effect=error), timeout_s=20), timeout=10)

    asyncio.run(run())
    hooks.close()


def test_a_call_given_up_before_its_turn_leaves_no_warning() -> None:
    async def give_up() -> None:
        thread = HookThread("given up")
        busy = asyncio.create_task(thread.call(time.sleep, 0.1, timeout_s=5))
        await asyncio.sleep(0.02)
        waiting = asyncio.create_task(thread.call(time.sleep, 0, timeout_s=5))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        thread.close()
        await busy

    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        asyncio.run(give_up())
        for thread in threading.enumerate():
            if thread.name == "given up":
                thread.join(timeout=10)
        gc.collect()
    assert [str(one.message) for one in caught if one.category is RuntimeWarning] == []
