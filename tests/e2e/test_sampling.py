"""Whole runs with over-sampling, filters and partial rollout, also interrupted."""

import shutil
import signal

import pyarrow.parquet

from tests.e2e.harness import assert_same, is_one_error, records

FILTER = {
    "dynamic_sampling_filter_path": "tests.e2e.rewards.not_every_third",
    "over_sampling_batch_size": 4,
    "num_rollout": 3,
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
    }
    assert miles.train(**settings, before=[["signal_at_stage", "train", int(signal.SIGKILL), 2]]).code == -9
    assert miles.train(**settings).code == 0
    trained = [group for step in range(4) for group in trained_groups(miles.run, step)]
    assert len(trained) == len(set(trained)) == 8
    assert set(range(4)) <= set(trained)  # whatever was parked goes first
    assert any(record["rollout/num_groups_continued"] for record in records(miles.run, "step"))


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
