import json
import math

import pytest

from miles.errors import StorageError
from miles.observe.metrics import MetricsWriter, read_records


def write_steps(run_dir, steps, *, first_step=None, loss=0.0):
    writer = MetricsWriter(run_dir, first_step=first_step)
    for step in steps:
        writer.write(step, {"train/loss": loss})
    writer.close()


def test_one_record_per_step(tmp_path):
    write_steps(tmp_path, range(3))
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert set(records[0]) == {"kind", "step", "time", "train/loss"}


def test_a_resumed_run_has_no_step_twice(tmp_path):
    write_steps(tmp_path, range(5), loss=1.0)
    write_steps(tmp_path, range(3, 6), first_step=3, loss=2.0)
    records = read_records(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["train/loss"]) for record in records] == [
        (0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0),
    ]  # fmt: skip


def test_an_evaluation_before_the_step_that_is_resumed_stays(tmp_path):
    writer = MetricsWriter(tmp_path, first_step=None)
    writer.write(0, {"eval/set": 0.5}, kind="eval")
    for step in range(4):
        writer.write(step, {"train/loss": 0.0})
        writer.write(step + 1, {"eval/set": 0.5}, kind="eval")
    writer.close()
    MetricsWriter(tmp_path, first_step=2).close()
    records = [(record["kind"], record["step"]) for record in read_records(tmp_path / "metrics.jsonl")]
    assert records == [("eval", 0), ("step", 0), ("eval", 1), ("step", 1), ("eval", 2)]


def test_a_fresh_start_drops_everything_but_events(tmp_path):
    writer = MetricsWriter(tmp_path, first_step=None)
    writer.event("start", steps=2)
    writer.write(0, {"train/loss": 0.0})
    writer.close()
    MetricsWriter(tmp_path, first_step=None).close()
    assert read_records(tmp_path / "metrics.jsonl") == []
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["schema"], event["kind"], event["steps"]) == (1, "start", 2)


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path):
    write_steps(tmp_path, range(2))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "train/lo')
    write_steps(tmp_path, [2], first_step=2)
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path, value):
    writer = MetricsWriter(tmp_path, first_step=None)
    with pytest.raises(AssertionError, match="train/loss of step 0"):
        writer.write(0, {"train/loss": value})
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_unknown_names_and_repeated_steps_are_refused(tmp_path):
    writer = MetricsWriter(tmp_path, first_step=None)
    with pytest.raises(AssertionError, match="names.py"):
        writer.write(0, {"train/lose": 0.0})
    writer.write(1, {"train/loss": 0.0})
    with pytest.raises(AssertionError, match="step 1 comes after step 1"):
        writer.write(1, {"train/loss": 0.0})


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StorageError, match="missing"):
        MetricsWriter(tmp_path / "missing", first_step=None)


def test_a_full_disk_is_one_sentence(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path, first_step=None)
    with pytest.raises(StorageError, match="events.jsonl: cannot write: No space left"):
        writer.event("start")


def test_a_damaged_line_is_named(tmp_path):
    write_steps(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 1,', '"step: 1,'))
    with pytest.raises(StorageError, match=r"metrics.jsonl, line 2: is damaged"):
        MetricsWriter(tmp_path, first_step=3)
