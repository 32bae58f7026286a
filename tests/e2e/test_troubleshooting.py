"""The symptoms of the manual's troubleshooting chapter that can happen here: each ends in a sentence and an exit code.

Those that only a log of public Miles can show are in `tests/unit/observe/test_symptoms.py`, heat is in `test_heat.py`,
a worker that the system killed for memory in `test_processes.py`.
"""

import subprocess
import sys
import time

import pytest

from miles.engine.core import EngineCore
from tests.e2e.loop_fork import run_fork, sums


def test_a_dead_engine_ends_the_run_in_seconds(tmp_path):
    """The manual's run went on for 63 minutes with 200,533 errors."""

    def kill_engine(run):
        if run.num_done == 1:
            EngineCore.step = lambda self: 1 / 0

    start = time.monotonic()
    ended = run_fork(tmp_path, sums(tmp_path, save_interval=None), each_step=kill_engine)
    assert time.monotonic() - start < 60
    assert ended.code == 1
    assert "miles: the rollout engine has died: ZeroDivisionError: division by zero" in ended.text
    assert "to resume: miles train" in ended.text
    assert (ended.folder / "checkpoints" / "iter_0000001").is_dir(), "the finished step is saved"
    assert (ended.folder / "log.txt").stat().st_size < 100_000


def test_a_reward_that_cannot_be_imported_ends_the_run_before_a_model_is_loaded(tmp_path):
    """The manual's run stayed up for two hours."""
    ended = run_fork(tmp_path, sums(tmp_path, rm_type=None, custom_rm_path="my_rewards.custom_rm"))
    assert ended.code == 2
    assert "--custom-rm-path my_rewards.custom_rm" in ended.text and "PYTHONPATH" in ended.text
    assert "Load weight end" not in ended.text


def test_a_public_name_of_an_attention_is_no_error(tmp_path):
    settings = sums(tmp_path, num_rollout=1, attn_implementation="triton", sglang_attention_backend="fa3")
    assert run_fork(tmp_path, settings).code == 0


def test_a_gap_at_step_0_stops_the_run_before_it_trains_on_wrong_numbers(tmp_path):
    def other_weights_on_one_side(run):
        collect = run.producer.collect

        async def collect_with_other_log_probs(rollout_id):
            groups = await collect(rollout_id)
            for group in groups:
                for sample in group:
                    sample.rollout_log_probs = [value - 2.0 for value in sample.rollout_log_probs]
            return groups

        run.producer.collect = collect_with_other_log_probs

    ended = run_fork(tmp_path, sums(tmp_path), each_step=other_weights_on_one_side)
    assert ended.code == 1
    assert "--max-logprob-gap" in ended.text
    assert not (ended.folder / "checkpoints" / "iter_0000001").exists()


@pytest.mark.parametrize(("tokens", "says"), [(16, "needs at least 32"), (10**12, "at most ")])
def test_a_cache_that_is_too_small_or_too_large_names_the_flag(tmp_path, tokens, says):
    ended = run_fork(tmp_path, sums(tmp_path, sglang_max_total_tokens=tokens))
    assert ended.code == 2
    assert "--engine-max-total-tokens" in ended.text and says in ended.text


def test_a_group_of_equal_fractions_stays_still(tmp_path):
    settings = sums(tmp_path, rm_type=None, custom_rm_path="tests.e2e.test_troubleshooting.three_tenths")
    ended = run_fork(tmp_path, settings)
    assert ended.code == 0, ended.text
    for record in ended.metrics:
        assert record["rollout/raw_reward"] == pytest.approx(0.3)
        assert record["train/grad_norm"] == record["rollout/advantages"] == 0.0
        assert record["rollout/no_signal_group_ratio"] == 1.0


def three_tenths(args, sample):
    return 0.3


def test_other_programs_are_left_alone(tmp_path):
    """Launchers of public Miles end every process with sglang or ray in its command line."""
    code = "import time; time.sleep(600)"
    others = [
        subprocess.Popen([sys.executable, "-S", "-c", code, name]) for name in ("sglang::scheduler", "ray::worker")
    ]
    try:
        assert run_fork(tmp_path, sums(tmp_path, num_rollout=1)).code == 0
        assert [other.poll() for other in others] == [None, None]
    finally:
        for other in others:
            other.kill()
            other.wait()
