"""Field note 7, and: an end of any kind is seen, said in one sentence, and leaves no process."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from miles.loop.watch import RUN_ENDED, RUN_STOPPED, FolderTarget, watch
from miles.observe.error_rule import Limits


class Run:
    """A supervisor in a process of its own, as `miles train` is."""

    def __init__(self, tmp_path, function, *, heartbeat_timeout=30.0, deadlines=None, in_process=False, **settings):
        self.folder = tmp_path / "run"
        command = [sys.executable, "-m", "tests.e2e.supervise_fake", str(tmp_path), function]
        command += [str(heartbeat_timeout), json.dumps(deadlines or {}), json.dumps(settings)]
        command += ["in-process"] * in_process
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.pids: list[int] = []

    def wait_until_it_runs(self) -> int:
        """The process id of the worker, once it has children and is in its step."""
        path = self.folder / "pids.json"
        wait_for(path.exists)
        self.pids = json.loads(path.read_text())
        return self.pids[0]

    def end(self) -> tuple[int, str, list[str]]:
        """Exit code, stdout and the lines of stderr."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err.splitlines()

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def assert_nothing_is_left(self) -> None:
        if not self.pids:
            self.wait_until_it_runs()
        wait_for(lambda: not any(is_running(pid) for pid in self.pids))
        wait_for(lambda: not [process for process in psutil.process_iter() if belongs_to(process, self.folder)])


def wait_for(condition, timeout_s=30.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def belongs_to(process: psutil.Process, folder) -> bool:
    try:
        return str(folder) in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.fixture
def start(tmp_path):
    runs: list[Run] = []

    def start_run(function, **settings) -> Run:
        runs.append(Run(tmp_path, function, **settings))
        return runs[-1]

    yield start_run
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def test_a_run_that_finishes(start):
    run = start("finish")
    code, out, err = run.end()
    assert (code, err) == (0, [])
    records = re.findall(
        r"^\[[-\d]{10} [:\d]{8}\.\d{3} main\] fake_train\.py:\d+ - step (\d+): (\{.*\})$", run.log, re.M
    )
    assert [(int(step), ast.literal_eval(record)) for step, record in records] == [
        (0, {"train/loss": 0.0}), (1, {"train/loss": 0.000001}), (2, {"train/loss": 0.000002}),
    ]  # fmt: skip
    assert "a hook printed this" in run.log
    assert "a hook printed this" in out
    assert [line.split(":")[0] for line in out.splitlines() if "loss" in line] == [
        "step 0 (1/3)", "step 1 (2/3)", "step 2 (3/3)",
    ]  # fmt: skip


def test_a_users_mistake_is_one_sentence_with_its_exit_code(start):
    code, out, err = start("user_mistake").end()
    assert code == 2
    assert err == ["miles: train.jsonl, row 3: the label is empty; give it an answer"]
    assert "Traceback" not in out


def test_our_mistake_is_one_sentence_with_the_traceback_in_the_log(start):
    run = start("own_mistake")
    code, _, err = run.end()
    assert code == 1
    assert err[0].startswith(
        "miles: the worker failed in phase train of step 4: ValueError: shapes differ; traceback in "
    )
    assert err[1:] == ["to resume: miles train --again"]
    assert "Traceback" in run.log and "ValueError: shapes differ" in run.log


def test_kill_9_of_the_worker(start):
    run = start("killed")
    code, _, err = run.end()
    assert code == 1
    assert err[0].startswith(
        "miles: the worker was killed by SIGKILL (likely out of memory, or by hand) in phase generate of step 7; "
        "its last error was: RuntimeError: the last thing it said; log: "
    )
    assert err[-1] == "to resume: miles train --again"
    assert "supervisor] supervisor.py" in run.log
    run.assert_nothing_is_left()


def test_a_hang_with_the_interpreter_locked_leaves_stacks_and_no_process(start):
    run = start("locks_the_interpreter", heartbeat_timeout=1.5)
    code, out, err = run.end()
    assert code == 1
    assert re.match(
        r"miles: the worker has been silent for [\d.]+ s .* in phase generate of step 7 and was ended", err[0]
    )
    assert "locks_the_interpreter" in run.log and "Thread 0x" in run.log
    assert run.log.count("Thread 0x") >= 2, "the stacks of all threads"
    assert "Thread 0x" not in out
    run.assert_nothing_is_left()


def test_a_phase_beyond_its_deadline_leaves_stacks_and_no_process(start):
    run = start("ignores_stop", deadlines={"generate": 1.0})
    code, _, err = run.end()
    assert code == 1
    assert "took longer than the 1 s that --phase-deadlines allows in phase generate of step 7" in err[0]
    assert "in ignores_stop" in run.log and "heartbeat.py" in run.log
    run.assert_nothing_is_left()


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_by_signal_saves_and_says_how_to_resume(start, number, expected):
    run = start("sleeps")
    run.wait_until_it_runs()
    run.process.send_signal(number)
    code, _, err = run.end()
    assert code == expected
    assert (run.folder / "saved").read_text() == "step 7"
    assert err == [f"miles: stopped by {signal.Signals(number).name}", "to resume: miles train --again"]
    run.assert_nothing_is_left()


def test_a_second_ctrl_c_ends_the_run_at_once(start):
    run = start("ignores_stop")
    run.wait_until_it_runs()
    run.process.send_signal(signal.SIGINT)
    wait_for(lambda: "SIGINT: dropping or finishing the step" in run.log)
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 130
    assert "second Ctrl+C" in err[0] and err[-1] == "to resume: miles train --again"
    run.assert_nothing_is_left()


@pytest.mark.parametrize("function", ["sleeps", "locks_the_interpreter"])
def test_kill_9_of_the_supervisor_leaves_no_process_and_a_free_run_folder(start, function):
    run = start(function)
    run.wait_until_it_runs()
    run.process.kill()
    run.process.communicate()
    run.assert_nothing_is_left()
    code, _, err = start("finish").end()
    assert (code, err) == (0, [])


def test_a_paused_container_is_no_hang(start):
    run = start("sleeps", heartbeat_timeout=2.0)
    worker = run.wait_until_it_runs()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in (run.process.pid, worker):
            os.kill(pid, number)
        time.sleep(3.0)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143


def test_a_stopped_worker_is_a_hang(start):
    run = start("sleeps", heartbeat_timeout=1.0)
    os.kill(run.wait_until_it_runs(), signal.SIGSTOP)
    code, _, err = run.end()
    assert code == 1
    assert "silent" in err[0]
    run.assert_nothing_is_left()


def test_a_terminal_that_takes_nothing_does_not_hold_the_run_up(start):
    run = start("talks")
    assert run.process.wait(timeout=60) == 0, "nobody has read a line so far"
    out, _ = run.process.communicate()
    assert "line 2999" not in out and "line 2999" in run.log


REPAIR = {"use_fault_tolerance": True, "restart_backoff": 0.05}


@pytest.mark.parametrize("function", ["dies_twice", "hangs_once", "fails_once"])
def test_a_worker_that_dies_hangs_or_fails_is_started_again(start, function):
    run = start(function, heartbeat_timeout=1.0, **REPAIR)
    code, out, err = run.end()
    assert (code, err) == (0, [])
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    num_failures = {"dies_twice": 2, "hangs_once": 1, "fails_once": 1}[function]
    assert [event["kind"] for event in events] == ["repair"] * num_failures
    assert all(event["step"] == 2 and event["reason"] for event in events)
    assert f"Restart {num_failures} of 3 in " in out
    run.assert_nothing_is_left()


def test_restarts_are_bounded_and_counted_in_the_sentence(start):
    run = start("killed", max_restarts=2, **REPAIR)
    code, _, err = run.end()
    assert code == 1
    assert "was killed by SIGKILL" in err[0] and err[0].endswith("gave up after 2 restarts in a row")
    assert err[-1] == "to resume: miles train --again"
    run.assert_nothing_is_left()


def test_a_users_mistake_is_not_repaired(start):
    run = start("user_mistake", **REPAIR)
    assert run.end()[0] == 2
    assert not (run.folder / "events.jsonl").exists()


def test_a_stop_while_a_restart_waits(start):
    run = start("killed", use_fault_tolerance=True, restart_backoff=600.0)
    wait_for((run.folder / "events.jsonl").exists)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert (code, err) == (143, ["miles: stopped by SIGTERM", "to resume: miles train --again"])
    run.assert_nothing_is_left()


def test_sigusr2_asks_for_a_checkpoint(start):
    run = start("sleeps")
    worker = run.wait_until_it_runs()
    os.kill(worker, signal.SIGUSR2)  # as to a whole group: the worker must not end by it
    run.process.send_signal(signal.SIGUSR2)
    wait_for((run.folder / "save_now").exists)
    assert is_running(worker)
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143


def test_a_watch_ends_a_run_that_makes_no_steps(start):
    run = start("sleeps")
    run.wait_until_it_runs()
    said = []

    def wait(seconds):
        time.sleep(1.0)
        return 0.0

    assert watch(FolderTarget(run.folder), Limits(no_step_s=2.0), said.append, wait=wait) == RUN_STOPPED
    assert "no line of a step" in said[-1]
    assert run.end()[2][0] == "miles: stopped by SIGTERM"  # the watch has taken the exit code
    assert (run.folder / "saved").exists(), "it could save before it ended"
    run.assert_nothing_is_left()


def test_a_watch_sees_a_run_end(start):
    run = start("sleeps")
    run.wait_until_it_runs()
    target = FolderTarget(run.folder)
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert watch(target, Limits(), lambda text: None) == RUN_ENDED


def test_in_process(start):
    run = start("finish", in_process=True)
    code, out, err = run.end()
    assert (code, err) == (0, [])
    assert "step 2 (3/3): loss 0.0000" in out
    assert "step 2: {'train/loss': 0.000002}" in run.log


def test_in_process_stop_and_mistake(start):
    run = start("sleeps_alone", in_process=True)
    wait_for((run.folder / "sleeping").exists)
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert (code, err[-1]) == (130, "to resume: miles train --again")
    assert (run.folder / "saved").exists()
    assert start("user_mistake", in_process=True).end()[0] == 2


def test_the_supervisor_imports_neither_torch_nor_transformers():
    code = (
        "import miles.loop.supervisor, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
