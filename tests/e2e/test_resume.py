"""A run that is killed or stopped at any moment goes on as if nothing had happened."""

import contextlib
import shlex
import signal

import psutil
import pytest

from tests.e2e.harness import assert_same, state_of
from tests.e2e.test_processes import wait_for

KILL, TERM, INT = int(signal.SIGKILL), int(signal.SIGTERM), int(signal.SIGINT)
STAGES = ["generate", "publish", "report", "finish_step"]


@pytest.mark.parametrize("stage", STAGES)
def test_kill_9_at_the_start_of_a_stage(miles, whole_run, stage):
    assert miles.train(before=[["signal_at_stage", stage, KILL, 2]]).code == -KILL
    assert miles.train().code == 0
    assert_same(miles.state(), state_of(whole_run))


def test_kill_9_before_the_weights_change(miles, whole_run):
    assert miles.train(before=[["signal_before_update", KILL, 2]]).code == -KILL
    assert miles.train().code == 0
    assert_same(miles.state(), state_of(whole_run))


@pytest.mark.parametrize(
    ("part", "number"),
    [
        ("iter_0000002", 1),  # nothing is there
        ("iter_0000002", 5),  # the weights are written but have no name
        ("iter_0000002", 8),  # before state.json
        ("iter_0000002", 18),  # before the folder gets its name
        ("latest_checkpointed_iteration", 2),  # before the tracker names it
    ],
)
def test_kill_9_within_a_save(miles, whole_run, part, number):
    assert miles.train(before=[["kill_at_file_event", number, part]]).code == -KILL
    assert miles.train().code == 0
    assert_same(miles.state(), state_of(whole_run))
    assert not list((miles.run / "checkpoints").glob(".tmp*"))


def test_kill_9_of_the_worker_and_of_the_supervisor(miles, whole_run):
    """In processes of their own, as users run it."""
    (miles.folder / "slow").touch()
    for victim in ("worker", "supervisor"):
        already = num_steps(miles)
        running = miles.start_train(in_process=None)
        wait_for(lambda: num_steps(miles) > already, timeout_s=60)  # noqa: B023
        supervisor = psutil.Process(running.pid)
        (worker,) = (child for child in supervisor.children() if "miles.loop.worker" in child.cmdline())
        descendants = supervisor.children(recursive=True)
        (worker if victim == "worker" else supervisor).kill()
        ended = running.wait()
        _, alive = psutil.wait_procs(descendants, timeout=10)
        assert not alive, "processes are left"
        if victim == "worker":
            assert ended.code == 1
            assert "the worker was killed by SIGKILL (likely out of memory, or by hand) in phase " in ended.message
            assert ended.message.splitlines()[-1].startswith("to resume: miles train --hf-checkpoint")
            assert "Traceback" not in ended.out + ended.err
        else:
            assert ended.code == -KILL
    (miles.folder / "slow").unlink()
    assert miles.train().code == 0
    assert_same(miles.state(), state_of(whole_run))


def num_steps(miles) -> int:
    path = miles.run / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        (["signal_while_generating", TERM, 2, 3], TERM, 143),
        (["signal_while_generating", INT, 1, 60], INT, 130),
        (["signal_before_update", TERM, 1], TERM, 143),
        (["signal_before_update", INT, 0], INT, 130),
        (["signal_at_stage", "save_if_due", TERM, 2], TERM, 143),
        (["signal_at_stage", "evaluate_if_due", TERM, 0], TERM, 143),
    ],
    ids=lambda value: "_".join(map(str, value[:2])) if isinstance(value, list) else None,
)
def test_a_stop_saves_and_says_how_to_resume(miles, whole_run, moment, number, code):
    ended = miles.train(before=[moment], save_interval=None)
    assert ended.code == code
    first, resume = ended.message.splitlines()
    assert first == f"miles: stopped by {signal.Signals(number).name}"
    program, *argv = shlex.split(resume.removeprefix("to resume: "))
    assert program == "miles"
    assert miles.start(*argv).wait().code == 0
    assert_same(miles.state(), state_of(whole_run))


def test_a_stop_waits_for_a_hook_of_a_step_whose_weights_have_changed(miles, whole_run):
    hook = {"custom_rollout_log_function_path": "tests.e2e.rewards.slow_log"}
    ended = miles.train(before=[["signal_at_stage", "report", TERM, 1]], save_interval=None, **hook)
    assert ended.code == 143
    assert num_steps(miles) == 2, "the step that was stopped in its report is finished"
    assert miles.train(save_interval=None, **hook).code == 0
    stopped, whole = miles.state(), state_of(whole_run)
    del stopped["state"]["identity"], whole["state"]["identity"]  # one of them has a hook
    assert_same(stopped, whole)


@pytest.mark.parametrize("stage", ["evaluate_if_due", "generate"])
def test_a_stop_in_or_after_an_evaluation(miles, stage):
    """After one, too: what it leaves in the prefix index is gone when the run is resumed."""
    evaluated = {"eval_interval": 1, "eval_prompt_data": ["sums", "train.jsonl"], "num_rollout": 2}
    assert miles.train(before=[["signal_at_stage", stage, TERM, 1]], **evaluated).code == 143
    assert miles.train(**evaluated).code == 0
    assert miles.train(run_name="whole", **evaluated).code == 0
    assert_same(miles.state(), miles.state("whole"))


def test_a_supervised_run_is_stopped_by_ctrl_c(miles, whole_run):
    (miles.folder / "slow").touch()
    running = miles.start_train(in_process=None, save_interval=None)
    wait_for(lambda: num_steps(miles) > 1, timeout_s=60)
    psutil.Process(running.pid).send_signal(INT)
    ended = running.wait()
    assert ended.code == 130
    assert ended.message.splitlines()[0] == "miles: stopped by SIGINT"
    (miles.folder / "slow").unlink()
    assert miles.train(save_interval=None).code == 0
    assert_same(miles.state(), state_of(whole_run))


def is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
        return "worker" in str(process.cmdline())
    return False


def test_ctrl_c_while_it_starts(miles):
    """Before there is anything to save: it ends, says how to resume, and the next start is a fresh one."""
    running = miles.start_train(in_process=None)
    wait_for(lambda: any(is_worker(child) for child in psutil.Process(running.pid).children()))
    psutil.Process(running.pid).send_signal(INT)
    ended = running.wait()
    assert ended.code == 130
    assert ended.message.splitlines()[0] == "miles: stopped by SIGINT"
    assert not list((miles.run / "checkpoints").glob("iter_*"))


def test_going_on_from_the_checkpoint_of_another_run(miles):
    assert miles.train(num_rollout=2).code == 0
    start = {"run_name": "next", "load": miles.run / "checkpoints", "lr": 1e-4}
    assert miles.train(before=[["signal_at_stage", "train", KILL, 3]], **start).code == -KILL
    assert "the next step is 2" in miles.log("next")
    assert miles.train(**start).code == 0
    assert "the next step is 3" in miles.log("next"), "its own checkpoint counts once there is one"
