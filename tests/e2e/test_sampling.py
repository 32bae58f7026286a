"""Whole runs with over-sampling, filters and partial rollout, also interrupted."""

import shutil
import signal

import pyarrow.parquet
import pytest
import torch

from tests.e2e.harness import SETTINGS, assert_same, flags, is_one_error, records

FILTER = {
    "dynamic_sampling_filter_path": "tests.e2e.rewards.not_every_third",
    "over_sampling_batch_size": 4,
    "num_rollout": 3,
}

TOOLS = {
    "custom_generate_function_path": "miles.rollout.generate_hub.multi_turn.generate",
    "generate_execute_tool_function_path": "tests.e2e.rewards.tool",
}


def trained_groups(run, step):
    rows = pyarrow.parquet.read_table(run / "samples" / f"rollout_{step}.parquet").to_pylist()
    return sorted({row["group_index"] for row in rows})


def test_a_filtered_run_trains_on_what_passes_in_the_order_of_the_data_also_when_it_is_killed(miles):
    assert miles.train(**FILTER, before=[["signal_at_stage", "train", int(signal.SIGKILL), 2]]).code == -9
    assert miles.train(**FILTER).code == 0
    assert [trained_groups(miles.run, step) for step in range(3)] == [[1, 2], [4, 5], [7, 8]]
    for record in records(miles.run, "step"):
        assert record["rollout/dynamic_filter/drop_unnamed"] == 1.0
        assert "rollout/raw_reward_unfiltered" in record
    assert miles.train(**FILTER, run_name="whole").code == 0
    killed, whole = ({**miles.state(run), "metrics": []} for run in ("run", "whole"))  # aborts come at any time
    for of_run in (killed, whole):
        of_run["state"].pop("identity")
    assert_same(killed, whole)
    assert len(killed["state"]["source"]["parked"]) == 1


def test_partial_rollout_loses_no_group_and_trains_none_twice_also_when_it_is_killed(miles):
    settings = {
        "custom_rm_path": "tests.e2e.rewards.quick_if_even",
        "partial_rollout": True,
        "over_sampling_batch_size": 4,
        "lr": 1e-5,  # old samples stay near to the weights that train them, whichever are carried on
    }
    assert miles.train(**settings, before=[["signal_at_stage", "train", int(signal.SIGKILL), 2]]).code == -9
    assert miles.train(**settings).code == 0
    trained = [group for step in range(4) for group in trained_groups(miles.run, step)]
    assert len(trained) == len(set(trained)) == 8
    assert set(range(4)) <= set(trained)  # whatever was parked goes first
    assert any(record["rollout/num_groups_continued"] for record in records(miles.run, "step"))


def test_agents_on_mixed_prompts_by_difficulty_see_the_same_when_they_are_killed(miles):
    settings = {
        **FILTER,
        "custom_generate_function_path": "miles.rollout.generate_hub.agentic_tool_call.generate",
        "custom_agent_function_path": "tests.e2e.rewards.agent",
        "mix_prompt_data": ("train.jsonl", 0.5),
        "curriculum_pass_rates": (0.0, 0.9),
        "eval_prompt_data": ("held", "train.jsonl"),
        "eval_interval": 1,
    }
    assert miles.train(**settings, before=[["signal_at_stage", "train", int(signal.SIGKILL), 2]]).code == -9
    assert miles.train(**settings).code == 0
    assert miles.train(**settings, run_name="whole").code == 0
    runs = (miles.run, miles.run.with_name("whole"))
    for name in [f"rollout_{step}" for step in range(3)] + [f"eval_{step}" for step in range(3)]:
        stored = [pyarrow.parquet.read_table(run / "samples" / f"{name}.parquet").to_pylist() for run in runs]
        killed, whole = ([(row["group_index"], row["index"], row["tokens"]) for row in rows] for rows in stored)
        assert killed == whole


def test_stored_samples_give_the_same_step_bit_for_bit(miles):
    template = str(miles.folder / "dump" / "r_{rollout_id}.parquet")
    cut = {"rollout_top_k": 5, "num_rollout": 2}
    assert miles.train(**cut, save_debug_rollout_data=template, run_name="whole").code == 0
    for source in (template, str(miles.runs / "whole/samples/rollout_{rollout_id}.parquet")):
        assert miles.train(**cut, load_debug_rollout_data=source, run_name="again").code == 0
        assert "KV Cache is allocated" not in miles.log("again")
        again, whole = miles.state("again"), miles.state("whole")
        for state in (again, whole):
            state["state"].pop("identity"), state["state"].pop("source")
        one, other = again.pop("metrics"), whole.pop("metrics")
        for name in ("train/loss", "train/grad_norm", "rollout/log_probs", "rollout/raw_reward"):
            assert [record[name] for record in one] == [record[name] for record in other]
        assert_same({**again, "metrics": []}, {**whole, "metrics": []})
        shutil.rmtree(miles.runs / "again")


def test_a_later_step_is_trained_again_from_its_checkpoint(miles):
    assert miles.train(num_rollout=2, run_name="whole").code == 0
    root = miles.runs / "whole"
    shutil.copytree(root / "checkpoints" / "iter_0000001", miles.folder / "start" / "iter_0000001")
    (miles.folder / "start" / "latest_checkpointed_iteration.txt").write_text("1\n")
    stored = str(root / "samples/rollout_{rollout_id}.parquet")
    ended = miles.train(num_rollout=2, run_name="again", load=miles.folder / "start", load_debug_rollout_data=stored)
    assert ended.code == 0, ended.err
    last, before = records(root, "step")[-1], records(miles.runs / "again", "step")[-1]
    assert last["train/loss"] == before["train/loss"] and last["step"] == before["step"] == 1


def test_only_the_rollout(miles):
    assert miles.train(num_rollout=2, debug_rollout_only=True).code == 0
    first, second = records(miles.run, "step")
    assert "train/loss" not in first and first["rollout/response_len/mean"] > 0
    assert miles.state()["state"]["version"] == 0


def test_a_stored_rollout_that_is_not_there(miles):
    ended = miles.train(load_debug_rollout_data="none_{rollout_id}.parquet")
    is_one_error(ended, 1, "--load-debug-rollout-data none_0.parquet: there is no such file")


def test_a_checkpoint_is_evaluated_as_it_was_in_its_run_and_training_does_not_notice(miles):
    sets = {"eval_prompt_data": ["sums", "train.jsonl"], "n_samples_per_eval_prompt": 2, "eval_temperature": 0.7}
    assert miles.train(num_rollout=2, eval_interval=2, **sets).code == 0
    assert miles.train(num_rollout=2, run_name="without").code == 0
    one, other = miles.state(), miles.state("without")
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in other["model"])
    names = ("hf_checkpoint", "input_key", "label_key", "apply_chat_template", "custom_rm_path", "device", "in_process")
    settings = {**{name: SETTINGS[name] for name in names}, "rollout_max_response_len": 12, **sets, "run_name": "eval"}
    settings["init_from"] = miles.run / "checkpoints" / "iter_0000002"
    ended = miles.start("eval", *flags(settings)).wait()
    assert ended.code == 0, ended.err
    (alone,) = records(miles.runs / "eval")
    last = records(miles.run, "eval")[-1]
    assert last["step"] == 2 and last["eval/sums"] > 0
    assert {**alone, "step": 2} == last


@pytest.mark.parametrize("cuts", [{}, {"rollout_top_k": 5, "rollout_stop": "1"}], ids=["plain", "cut"])
@pytest.mark.parametrize("turns", [{}, TOOLS], ids=["one turn", "tools"])
def test_the_trainer_agrees_with_every_token_of_an_answer_that_went_on(miles, cuts, turns):
    """Nothing is learned, so tokens of every version have the same log-probs on both sides."""
    settings = {"custom_rm_path": "tests.e2e.rewards.quick_if_even", "over_sampling_batch_size": 4, "lr": 0}
    assert miles.train(partial_rollout=True, **settings, **cuts, **turns).code == 0
    found = records(miles.run, "step")
    assert max(record["train/train_rollout_logprob_abs_diff_max"] for record in found) < 1e-4
    assert any(record["rollout/num_groups_continued"] for record in found)
    assert max(record["rollout/weight_version/max"] for record in found) > 0
