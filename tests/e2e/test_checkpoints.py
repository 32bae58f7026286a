"""Checkpoints of whole runs: on request, pruned, from weights only. Runs are forks of one process (`loop_fork.py`)."""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from miles.checkpoint.layout import checkpoints
from miles.observe.samples import load_samples
from tests.e2e.loop_fork import MODEL, run_fork, sums

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_a_checkpoint_on_request_by_file_and_by_signal(tmp_path):
    def asks(run):
        if run.num_done == 1:
            run.folder.save_request.touch()
        if run.num_done == 3:
            os.kill(os.getpid(), signal.SIGUSR2)

    ended = run_fork(tmp_path, sums(tmp_path, num_rollout=5), each_step=asks)
    assert ended.code == 0, ended.text
    assert list(checkpoints(ended.folder / "checkpoints")) == [2, 4, 5]
    assert not (ended.folder / "save_now").exists()


def test_a_named_sentinel(tmp_path):
    def asks(run):
        if run.num_done == 1:
            (tmp_path / "please").touch()

    settings = sums(tmp_path, num_rollout=3, save_trigger_sentinel=str(tmp_path / "please"))
    ended = run_fork(tmp_path, settings, each_step=asks)
    assert list(checkpoints(ended.folder / "checkpoints")) == [2, 3]


def test_asynchronous_saves_hold_what_synchronous_ones_do_and_the_last_are_kept(tmp_path):
    ends = {}
    for name in ("sync", "async"):
        settings = sums(tmp_path, num_rollout=4, save_interval=1, save_keep_last=2, run_name=name)
        settings |= {"async_save": True} if name == "async" else {}
        ends[name] = run_fork(tmp_path, settings)
        assert ends[name].code == 0, ends[name].text
        assert list(checkpoints(ends[name].folder / "checkpoints")) == [3, 4]
    first, second = (ends[name].folder / "checkpoints" / "iter_0000004" for name in ends)
    for file in ("optimizer.safetensors", "model/model.safetensors"):
        one, other = load_file(first / file), load_file(second / file)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    events = [json.loads(line) for line in (ends["async"].folder / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "checkpoint"] == [1, 2, 3, 4]


@pytest.mark.parametrize("critic", [False, True])
def test_a_step_that_is_not_finite_loses_no_finished_one(tmp_path, critic):
    """A critic has made its own update by then: its weights are not those of the finished steps."""

    def poison(run):
        if run.num_done == 2:
            run.trainer.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))

    algorithm = {"advantage_estimator": "ppo"} if critic else {}
    ended = run_fork(tmp_path, sums(tmp_path, run_name="stopped", **algorithm), each_step=poison)
    assert ended.code == 1 and "is not finite" in ended.text
    assert list(checkpoints(ended.folder / "checkpoints")) == ([] if critic else [2])
    if not critic:
        resumed, whole = (run_fork(tmp_path, sums(tmp_path, run_name=name)) for name in ("stopped", "whole"))
        states = [load_file(one.folder / "checkpoints/iter_0000003/optimizer.safetensors") for one in (resumed, whole)]
        assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_a_hook_that_fails_late_loses_no_finished_rollout(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    body = "assert samples[0].group_index < 2, 'third'\n    return [[s.reward for s in samples]] * 2"
    (tmp_path / "late_hook.py").write_text(f"def f(args, samples):\n    {body}\n")
    ended = run_fork(tmp_path, sums(tmp_path, custom_reward_post_process_path="late_hook.f"))
    assert (
        "--custom-reward-post-process-path late_hook.f failed: " in ended.text and "AssertionError: third" in ended.text
    )
    assert list(checkpoints(ended.folder / "checkpoints")) == [1]


def test_a_save_that_fails_does_not_hide_why_the_run_ends(tmp_path):
    def spoils(run):
        if run.num_done == 1:
            run.trainer.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
            full = shutil.disk_usage(tmp_path)._replace(free=0)
            shutil.disk_usage = lambda path: full

    ended = run_fork(tmp_path, sums(tmp_path), each_step=spoils)
    assert ended.code == 1
    assert "is not finite" in ended.text and "0 are free" in ended.text


def test_init_from_takes_the_weights_and_nothing_else(tmp_path):
    first = run_fork(tmp_path, sums(tmp_path, num_rollout=2, lr=1e-2, run_name="first"))
    settings = sums(tmp_path, num_rollout=1, lr=0.0, run_name="second", init_from=str(first.folder))
    second = run_fork(tmp_path, settings)
    assert second.code == 0, second.text
    trained, start = (
        load_file(ended.folder / "checkpoints" / name / "model" / "model.safetensors")
        for ended, name in ((first, "iter_0000002"), (second, "iter_0000001"))
    )
    assert all(torch.equal(trained[key], start[key]) for key in trained)
    records = [json.loads(line) for line in (second.folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0], "counters, data position and optimizer start anew"


def test_init_from_of_another_shape_is_refused(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    model = json.loads((MODEL / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**model, "intermediate_size": 16}))
    ended = run_fork(tmp_path, sums(tmp_path, init_from=str(other)))
    assert ended.code == 2
    assert "--init-from" in ended.text and "do not fit" in ended.text


def test_unfinished_answers_are_part_of_a_checkpoint(tmp_path):
    """A run that carries answers on is killed while some are parked; the next goes on with them. Which groups finish
    first depends on the clock, so what is compared is that none is lost, changed or trained twice. The weights move
    little, for a run stops when those that wrote an answer are too far from those that train it."""
    carrying = {
        "num_rollout": 4, "save_interval": 1, "partial_rollout": True, "over_sampling_batch_size": 4,
        "rollout_batch_size": 2, "rollout_max_response_len": 24, "lr": 1e-5,
    }  # fmt: skip

    def kill(run):
        if run.num_done == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    killed = run_fork(tmp_path, sums(tmp_path, **carrying), each_step=kill)
    assert killed.code == -signal.SIGKILL
    before = parked(killed.folder, 2)
    assert before, "there is something to lose"
    ended = run_fork(tmp_path, sums(tmp_path, **carrying))
    assert ended.code == 0, ended.text
    trained = [
        sample
        for number in range(4)
        for sample in load_samples(ended.folder / "samples" / f"rollout_{number}.parquet")["train"]
    ]
    after = {sample.index: sample.tokens for sample in trained}
    assert len(after) == len(trained) == 4 * 2 * 4, "an answer was trained twice"
    after |= parked(ended.folder, 4)
    for index, tokens in before.items():
        assert after[index][: len(tokens)] == tokens


def parked(folder, iteration):
    """Tokens of the answers that a checkpoint carries on, by index."""
    state = json.loads((folder / "checkpoints" / f"iter_{iteration:07d}" / "state.json").read_text())
    return {row["index"]: row["tokens"] for group in state["state"]["source"]["parked"] for row in group}
