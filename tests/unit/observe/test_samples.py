import datetime
from decimal import Decimal

import pytest

from miles.errors import StorageError
from miles.observe.samples import read_samples, write_samples
from miles.types import Sample, SampleStatus


def test_samples_are_read_back(tmp_path):
    sample = Sample(
        group_index=3,
        index=13,
        prompt="1+1=?",
        tokens=[5, 6, 7],
        response="2",
        response_length=1,
        label="2",
        reward=1,
        loss_mask=[1],
        rollout_log_probs=[-0.5],
        weight_versions=[4],
        status=SampleStatus.COMPLETED,
    )
    write_samples(tmp_path / "samples" / "rollout_0.parquet", {"train": [sample]})
    (row,) = read_samples(tmp_path / "samples" / "rollout_0.parquet")
    assert row == {
        "set": "train",
        "group_index": 3,
        "index": 13,
        "prompt": "1+1=?",
        "response": "2",
        "label": "2",
        "reward": 1.0,
        "status": "completed",
        "tokens": [5, 6, 7],
        "response_length": 1,
        "loss_mask": [1],
        "rollout_log_probs": [-0.5],
        "weight_versions": [4],
        "metadata": "{}",
    }


@pytest.mark.parametrize(
    ("label", "stored"),
    [
        (46, "46"),
        (["a", "b"], '["a", "b"]'),
        (datetime.date(2020, 2, 3), '"2020-02-03"'),
        (Decimal("2.50"), '"2.50"'),
        (b"ab", "\"b'ab'\""),
        ("half \ud800", "half \\ud800"),
        (None, None),
    ],
)
def test_any_label_of_a_data_file_is_stored_as_text(tmp_path, label, stored):
    write_samples(tmp_path / "a.parquet", {"train": [Sample(label=label, reward=0.0)]})
    assert read_samples(tmp_path / "a.parquet")[0]["label"] == stored


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "samples").write_text("a file")
    with pytest.raises(StorageError, match="samples/a.parquet: cannot write the samples"):
        write_samples(tmp_path / "samples" / "a.parquet", {"train": [Sample(reward=0.0)]})
