import copy
import datetime
import json
from decimal import Decimal

import numpy as np
import pytest

from miles.errors import StorageError
from miles.observe.samples import from_row, load_samples, read_samples, to_row, write_samples
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
        "kept_token_ids": None,
        "top_token_ids": None,
        "top_log_probs": None,
        "exact": '{"reward": 1}',
    }
    assert load_samples(tmp_path / "samples" / "rollout_0.parquet") == {"train": [sample]}


def test_whatever_a_sample_holds_comes_back_equal(tmp_path):
    sample = Sample(
        prompt=[{"role": "user", "content": "1+1=?"}],
        label={"answer": 2},
        reward={"score": -0.25, "acc": 1},
        metadata={"start_rollout_id": 3},
        remove_sample=True,
        cached_tokens=7,
        generate_function_path="mine.generate",
        status=SampleStatus.ABORTED,
        kept_token_ids=[np.array([4, 5], dtype=np.int32), np.array([], dtype=np.int32)],
        top_log_probs=[np.array([-0.1, -3.3], dtype=np.float32)],
    )
    write_samples(tmp_path / "a.parquet", {"train": [sample]}, reward_key="score")
    from_file = load_samples(tmp_path / "a.parquet")["train"][0]
    from_json = from_row(json.loads(json.dumps(to_row(sample))))
    for read in (from_file, from_json):
        for name in ("kept_token_ids", "top_log_probs"):
            arrays, expected = getattr(read, name), getattr(sample, name)
            assert [(a.tolist(), a.dtype) for a in arrays] == [(a.tolist(), a.dtype) for a in expected]
            setattr(read, name, expected)
        assert read == sample


def test_a_copy_of_a_sample_shares_nothing_that_can_change():
    sample = Sample(prompt=[{"role": "user"}], tokens=[5, 6], metadata={"a": [1]}, loss_mask=[1], cached_tokens=7)
    copied = copy.deepcopy(sample)
    assert copied == sample
    copied.prompt[0]["role"] = "tool"
    copied.tokens.append(7)
    copied.metadata["a"].append(2)
    copied.loss_mask[0] = 0
    assert (sample.prompt, sample.tokens, sample.metadata) == ([{"role": "user"}], [5, 6], {"a": [1]})
    assert sample.loss_mask == [1]


def test_a_file_of_samples_that_is_not_there(tmp_path):
    with pytest.raises(StorageError, match="none.parquet: cannot read the samples"):
        load_samples(tmp_path / "none.parquet")


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
