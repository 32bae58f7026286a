"""Whole runs with over-sampling, filters and partial rollout, also interrupted."""

import signal

import pyarrow.parquet

from tests.e2e.harness import assert_same, records

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
