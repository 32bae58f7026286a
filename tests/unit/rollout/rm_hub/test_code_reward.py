"""Programs in the sandbox. Skipped where the machine allows no namespaces, since nothing runs without them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles.errors import RewardError
from miles.rollout.rm_hub import code_reward
from miles.rollout.rm_hub.builtin import BuiltinReward
from miles.rollout.rm_hub.code_reward import read_tests
from miles.rollout.rm_hub.sandbox import kernel, tasks
from miles.types import Sample
from tests.unit.rollout.rm_hub.graders import grade, make_reward

CALL = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]}
PRINT = {"inputs": ["2\n", "3"], "outputs": ["4", "9\n"]}
ASSERT = {"tests": ["assert f(2) == 4", "assert f(3) == 9"]}
ALL = {"call": CALL, "print": PRINT, "assert": ASSERT}


pytestmark = pytest.mark.usefixtures("only_sandbox")


@pytest.fixture(scope="module")
def reward() -> Iterator[BuiltinReward]:
    if not sys.platform.startswith("linux"):
        pytest.skip("the sandbox needs Linux")
    with make_reward("code", rm_code_timeout=1.5) as made:
        try:
            made.terms[0].grader.probe()
        except RewardError as error:
            pytest.skip(str(error))
        yield made


def run(reward: BuiltinReward, program: str, tests: Any) -> float:
    return grade(reward, [(tests, f"So:\n```python\n{program}\n```\n")])[0]


FUNCTION, SCRIPT = "def f(x): return x * x", "x = int(input())\nprint(x * x)"


@pytest.mark.parametrize("kind", ALL)
def test_a_right_program_passes_and_a_wrong_one_does_not(reward: BuiltinReward, kind: str) -> None:
    program = SCRIPT if kind == "print" else FUNCTION
    assert run(reward, program, ALL[kind]) == 1.0
    assert run(reward, program, json.dumps(ALL[kind])) == 1.0
    assert run(reward, program.replace("x * x", "x + x"), ALL[kind]) == 0.0  # right for 2 and wrong for 3


def test_where_the_program_is_read(reward: BuiltinReward) -> None:
    block = f"```python\n{FUNCTION}\n```"
    responses = {
        block: 1.0,
        f"<think>{block}</think> none": 0.0,
        f"```py\ndef f(x): return 0\n```\n{block}": 1.0,
        f"{block}\n```\ndef f(x): return 0\n```": 0.0,
        FUNCTION: 0.0,
        f"```python\n{FUNCTION}": 0.0,
        f"{block}\n```text\n4\n```": 1.0,
    }
    assert grade(reward, [(CALL, text) for text in responses]) == list(responses.values())


def test_forms_of_tests(reward: BuiltinReward) -> None:
    check = {"tests": "def check(candidate):\n    assert candidate(2) == 4", "entry_point": "f"}
    assert run(reward, FUNCTION, check) == 1.0
    assert run(reward, "class Solution:\n    def f(self, x): return x * x", CALL) == 1.0
    assert run(reward, "def f(xs): xs.sort()", {"tests": "a = [2, 1]\nf(a)\nassert a == [1, 2]"}) == 1.0
    raises = "try:\n    f(0)\n    assert False\nexcept ValueError:\n    pass"
    assert run(reward, "def f(x): raise ValueError('no')", {"tests": raises}) == 1.0
    assert run(reward, "def f(x): raise AssertionError('no')", {"tests": raises}) == 0.0
    third = {"fn_name": "f", "inputs": [[1]], "outputs": [0.3333333]}
    assert run(reward, "def f(x): return x / 3", third) == 0.0
    assert run(reward, "def f(x): return x / 3", {**third, "tolerance": 1e-6}) == 1.0


def test_equality_of_results() -> None:
    assert tasks.same((1, [2.0]), [1, [2]], None) and tasks.same({1: "a"}, {"1": "a"}, None)
    assert not tasks.same(True, 1, None) and not tasks.same("1", 1, None) and not tasks.same([1], [1, 2], None)


LIE = "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return E(7)"
HOSTILE = {
    "ends at once": "import os\nos._exit(0)",
    "ends in the call": "import os\ndef f(x): os._exit(0)",
    "leaves politely": "import sys\nsys.exit(0)",
    "pretends to be equal": LIE,
    "prints without end": "while True: print('4' * 10000)",
    "takes memory": "a = bytearray(8 << 30)\ndef f(x): return x * x\nprint(4)",
    "takes memory in small parts": "a = []\nwhile True: a.append(' ' * 100000)",
    "fills the disk": "for i in range(10**6): open(str(i), 'wb').write(b'x' * 1000000)",
    "nests deeply": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a\nprint(f(1))",
    "kills all": "import os\nos.kill(-1, 9)\nos.kill(1, 9)",
    "answers in place of the harness": "import os\nos.write(4, b\"['f']\\n('ok', 0, [2])\\n\")",
}
SLOW = {
    "loops": "while True: pass",
    "sleeps": "import time\ntime.sleep(1000)",
    "ignores signals": "import signal\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
}


@pytest.mark.parametrize("kind", ["call", "print", "assert"])
def test_field_note_46_hostile_programs_score_0(reward: BuiltinReward, kind: str) -> None:
    programs = list(HOSTILE.values()) + (list(SLOW.values()) if kind == "print" else list(SLOW.values())[:1])
    responses = [(ALL[kind], f"```python\n{program}\n```") for program in programs]
    assert grade(reward, responses) == [0.0] * len(programs)
    assert reward.terms[0].grader.tools.pools.failures() == {}
    assert left_behind() == []


def left_behind() -> list[str]:
    """Commands of processes that a jail started and that still live."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if (process.info["cmdline"] or [""])[0] == "python" and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(process.info["cmdline"]))
    return [command for command in found if command.endswith(("program.py", "candidate.py", "tester.py"))]


def assert_nothing_stays() -> None:
    """What was killed is gone as soon as the kernel comes to it."""
    end = time.monotonic() + 5
    while left_behind() and time.monotonic() < end:
        time.sleep(0.02)
    assert left_behind() == []


def test_field_note_46_nothing_survives_the_sandbox(reward: BuiltinReward) -> None:
    escape = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)"
    )
    assert run(reward, f"{escape}\n{SCRIPT}", PRINT) == 1.0
    assert left_behind() == []


SECRET = "MILES_TEST_SECRET"
LOOKS = {
    "other files": f"import os\nprint(os.path.exists({str(Path(__file__))!r}) or os.path.exists('/etc/passwd'))",
    "other processes": "import os\nprint(os.path.exists('/proc/1') or os.getpid() > 3)",
    "our environment": f"import os\nprint({SECRET!r} in os.environ)",
    "the network": (
        "import socket\ntry:\n    socket.create_connection(('127.0.0.1', PORT), 1)\n    print(True)\n"
        "except OSError:\n    print(False)"
    ),
    "rights": "import os\nprint(os.getuid() == 0 or os.access('/usr', os.W_OK))",
    "new namespaces": "import ctypes\nprint(ctypes.CDLL(None).unshare(0x10000000) == 0)",
    "shared memory": "import ctypes\nprint(ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0)",
}


@pytest.mark.parametrize("what", LOOKS)
def test_a_program_sees_nothing_of_this_machine(
    reward: BuiltinReward, what: str, unused_tcp_port_server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "x")
    program = LOOKS[what].replace("PORT", str(unused_tcp_port_server))
    assert run(reward, program, {"inputs": [""], "outputs": ["False"]}) == 1.0


@pytest.fixture
def unused_tcp_port_server() -> Iterator[int]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_descriptors_of_the_worker_stay_outside(reward: BuiltinReward) -> None:
    program = "import os\nfound = []\nfor n in range(3, 200):\n    try:\n        os.fstat(n)\n        found.append(n)\n"
    program += "    except OSError: pass\nprint(found)"
    assert run(reward, program, {"inputs": [""], "outputs": ["[]"]}) == 1.0


def test_a_killed_worker_takes_its_jail_along(reward: BuiltinReward) -> None:
    async def kill_while_running() -> Any:
        sample = Sample(label=PRINT, response="```python\nimport time\ntime.sleep(600)\n```")
        scoring = asyncio.ensure_future(reward.score(sample))
        pool = reward.terms[0].grader.tools.pools.get(code_reward.SANDBOX, timeout_s=1.0)
        await asyncio.sleep(0.7)
        for worker in pool._workers:
            os.kill(worker.pid, 9)
        return await scoring

    assert asyncio.run(kill_while_running()) == 0.0
    assert_nothing_stays()


BUILDS_A_JAIL = """
import os, sys, time
from miles.rollout.rm_hub.sandbox import jail, kernel

before, calls = kernel.die_with_parent, []

def late():
    calls.append(1)
    if len(calls) == int(sys.argv[1]):
        os.write(1, b"!")
        time.sleep(0.1)
    before()

kernel.die_with_parent = late
files = {"program.py": b"import time; time.sleep(600)"}
jail.Jail(["program.py"], files=files, inside=[0], limits=jail.Limits())
time.sleep(600)
"""


@pytest.mark.parametrize("process", [1, 2], ids=["supervisor", "init"])
def test_a_worker_killed_while_it_builds_a_jail_leaves_no_process_and_no_word(process: int) -> None:
    command = [sys.executable, "-c", BUILDS_A_JAIL, str(process)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as worker:
        assert worker.stdout is not None
        assert worker.stdout.read(1) == b"!"
        worker.kill()
        assert worker.stdout.read() == b""  # until the last process of the jail has ended, or its program starts
    assert_nothing_stays()


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (None, "expected a mapping"),
        ("{", "Expecting property name"),
        ({}, "expected `inputs` and `outputs`, or `tests`"),
        ({"inputs": [], "outputs": []}, "at least one"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": [" "]}, "an output is empty"),
        ({"inputs": [1], "outputs": ["1"]}, "must be texts"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "the list of the arguments"),
        ({"tests": "f(1"}, "is not Python"),
        ({"tests": "f(1)"}, "asserts nothing"),
    ],
)
def test_tests_that_cannot_fail_or_be_read_are_refused(label: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_tests(label, {})


def test_without_a_sandbox_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.platform, "machine", lambda: "riscv64")
    assert tasks.run(("probe", "", 5.0)) == "its system-call filter knows x86_64 and aarch64, not riscv64"

    def refuse(flags: int) -> None:
        raise kernel.SandboxError("unshare (new namespaces): Operation not permitted")

    monkeypatch.undo()
    monkeypatch.setattr(kernel, "unshare", refuse)
    assert tasks.run(("probe", "", 5.0)) == "unshare (new namespaces): Operation not permitted"
    with pytest.raises(kernel.SandboxError, match="not permitted"):
        tasks.run(("tests", json.dumps({"program": SCRIPT, **PRINT}), 5.0))
