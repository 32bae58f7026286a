"""Whole runs on the CPU: a gap of exactly zero, and runs that repeat bit for bit, also when they are stopped and when
rewards take their time."""

import json
import signal

import pytest

from miles.cli.main import main
from tests.e2e.harness import assert_same, is_one_error, records
from tests.e2e.loop_fork import MODEL

GAP = "train/train_rollout_logprob_abs_diff"
EXACT = {"true_on_policy_mode": True}
MODES = {
    "trainer": {"deterministic_mode": True},
    "engine": {"engine_enable_deterministic_inference": True},
    "both": {"deterministic_mode": True, "sglang_enable_deterministic_inference": True},
    "true on-policy": EXACT,
}
CUT = {"rollout_temperature": 0.8, "rollout_top_p": 0.9, "num_steps_per_rollout": 2, "max_tokens_per_gpu": 60}
FILTERED = {"dynamic_sampling_filter_path": "tests.e2e.rewards.not_every_third"}


def assert_exact(run):
    steps = records(run, "step")
    assert steps and all(step[GAP] == step[f"{GAP}_max"] == step[f"{GAP}_p99"] == 0.0 for step in steps)


def learned(state):
    """What two equal runs have in common when their flags or their interruptions differ."""
    del state["state"]["identity"]
    return state


def test_the_gap_is_zero_with_cuts_several_steps_and_small_micro_batches(miles):
    assert miles.train(**EXACT, recompute_logprobs_via_prefill=True).code == 0
    assert_exact(miles.run)
    assert miles.train(**EXACT, **CUT, run_name="cut").code == 0
    assert_exact(miles.runs / "cut")
    assert miles.train(run_name="fast").code == 0
    assert any(step[f"{GAP}_max"] > 0 for step in records(miles.runs / "fast", "step")), "the mode is what does it"


def test_it_repeats_when_it_is_killed_and_when_rewards_are_slow(miles):
    assert miles.train(**EXACT, **FILTERED, before=[["signal_at_stage", "train", int(signal.SIGKILL), 2]]).code == -9
    assert miles.train(**EXACT, **FILTERED).code == 0
    slow = {"custom_rm_path": "tests.e2e.rewards.quick_if_even"}
    assert miles.train(**EXACT, **FILTERED, **slow, run_name="slow").code == 0
    killed, whole = ({**learned(miles.state(run)), "metrics": []} for run in ("run", "slow"))
    assert_same(killed, whole)
    assert_exact(miles.runs / "slow")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_20_steps_repeat_bit_for_bit_also_when_stopped(miles, mode):
    long = {"num_rollout": 20, "save_interval": 10, "rollout_batch_size": 3, **MODES[mode]}
    assert miles.train(**long).code == 0
    assert miles.train(**long, run_name="again").code == 0
    assert_same(learned(miles.state()), learned(miles.state("again")))
    assert miles.train(**long, run_name="stopped", before=[["signal_at_stage", "train", int(signal.SIGTERM), 11]]).code
    assert miles.train(**long, run_name="stopped").code == 0
    assert_same(learned(miles.state()), learned(miles.state("stopped")))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["engine", "both", "true on-policy"])
def test_20_steps_repeat_when_rewards_take_different_times(miles, mode):
    long = {"num_rollout": 20, "save_interval": 20, **MODES[mode], **FILTERED}
    assert miles.train(**long).code == 0
    slow = {"custom_rm_path": "tests.e2e.rewards.quick_if_even"}
    assert miles.train(**long, **slow, run_name="slow").code == 0
    one, other = ({**learned(miles.state(run)), "metrics": []} for run in ("run", "slow"))
    assert_same(one, other)


def test_what_cannot_be_exact_is_refused_before_anything_is_loaded(miles):
    is_one_error(miles.train(**EXACT, engine_page_size=8), 2, "--engine-page-size 8 must be a multiple of 16")
    assert not miles.run.exists()


def test_a_gap_stops_the_run(miles):
    """The engine's log-probs are those of another softmax."""
    ended = miles.train(**EXACT, before=[["other_log_probs"]])
    is_one_error(ended, 1, "--true-on-policy-mode: trainer and engine differ in", "nat; the weights are as they were")


def test_check_proves_it_on_a_model_alone(capsys):
    code = main(["check", "--json", "--true-on-policy", "--hf-checkpoint", str(MODEL), "--device", "cpu"])
    (found,) = json.loads(capsys.readouterr().out)["checks"]
    assert (code, found["max_gap"], found["num_differ"]) == (0, 0.0, 0) and found["num_tokens"] > 100
    assert main(["check", "--true-on-policy"]) == 2
    assert "needs --hf-checkpoint" in capsys.readouterr().err
