from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from miles.config.sections import DataConfig, RewardConfig, RunConfig
from miles.errors import DataError
from miles.observe.samples import write_samples
from miles.rollout.reward_lab import (
    RECORDED,
    append_cases,
    check_labels,
    compare,
    config_of,
    page,
    perturb,
    read_stored,
)
from miles.types import Sample, SampleStatus


def settings(**reward: Any) -> RunConfig:
    return RunConfig(data=DataConfig(label_key="label"), reward=RewardConfig(**reward))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def stored(file: str) -> Any:
    return read_stored(file, response_key="response", label_key="label", metadata_key="metadata")


ROWS = [
    {"label": "7", "response": "#### 7", "reward": 1.0},
    {"label": "7", "response": "#### 8", "reward": 1.0},
    {"label": "7", "response": "seven</script><b>", "reward": 0.0},
    {"label": "7", "response": "7", "metadata": {"rm_type": "exact"}},
]


def test_answers_are_graded_and_compared_with_recorded_rewards(tmp_path: Path) -> None:
    rows = compare(stored(write_rows(tmp_path / "a.jsonl", ROWS)), settings(rm_type="gsm8k"), against=RECORDED)
    assert [row.verdict.reward for row in rows] == [1, 0, 0, 1]
    assert [row.verdict.answer for row in rows] == ["7", "8", None, "7"]
    assert [row.disagrees for row in rows] == [False, True, False, True]
    assert rows[1].stored.place == "a.jsonl row 2" and all(row.verdict.seconds > 0 for row in rows)


def test_two_rewards_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab_reward.py").write_text("def score(args, sample):\n    return {'score': len(sample.response)}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = write_rows(tmp_path / "a.jsonl", ROWS[:3])
    rows = compare(stored(file), settings(rm_type="gsm8k"), against="exact")
    assert [(row.verdict.reward, row.other) for row in rows] == [(1, 0), (0, 0), (0, 0)]
    custom = config_of("lab_reward.score", settings(reward_key="score"))
    assert [row.verdict.reward for row in compare(stored(file), custom, against=None)] == [6, 6, 17]


def test_what_cannot_be_graded_is_shown_and_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab_broken.py").write_text("def score(args, sample):\n    return {'#### 7': 1}[sample.response]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = write_rows(tmp_path / "a.jsonl", [{"label": "#### 7", "response": "#### 7"}, *ROWS[1:2]])
    rows = compare(stored(file), config_of("lab_broken.score", settings()), against=None)
    assert rows[0].verdict.reward == 1 and rows[1].verdict.reward is None and "KeyError" in rows[1].verdict.problem
    file = write_rows(tmp_path / "b.jsonl", [{"label": "x", "response": "#### 1"}])
    rows = compare(stored(file), settings(rm_type="gsm8k"), against=None)
    assert rows[0].verdict.problem == "its label cannot be read: it is not a number"


def test_a_run_folder_gives_all_its_samples_in_order(tmp_path: Path) -> None:
    for step in (10, 9):
        sample = Sample(
            group_index=step, index=step, tokens=[1, 2], response="#### 7", response_length=1, label=7, reward=1.0,
            loss_mask=[1], status=SampleStatus.COMPLETED, metadata={"rm_type": "exact"} if step == 10 else {},
        )  # fmt: skip
        write_samples(tmp_path / "samples" / f"rollout_{step}.parquet", {"train": [sample]})
    found = stored(str(tmp_path))
    assert [item.sample.index for item in found] == [9, 10]
    rows = compare(found, settings(rm_type="gsm8k"), against=RECORDED)
    assert [(row.verdict.reward, row.other) for row in rows] == [(1, 1.0), (0, 1.0)]
    with pytest.raises(DataError, match=r"there are no samples/\*.parquet"):
        stored(str(tmp_path / "samples" / ".."/ ".." ))  # fmt: skip


def test_a_missing_column_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 1 has no column 'response' .--response-key.; did you mean"):
        stored(write_rows(tmp_path / "a.jsonl", [{"label": "7", "responses": "x"}]))


def test_the_page_holds_all_rows_and_no_markup_of_theirs(tmp_path: Path) -> None:
    rows = compare(stored(write_rows(tmp_path / "a.jsonl", ROWS)), settings(rm_type="gsm8k"), against="exact")
    text = page(rows, reward="gsm8k", against="exact")
    embedded = re.search(r'id="rows">(.*?)</script>', text, re.DOTALL)
    assert embedded is not None
    assert [row["response"] for row in json.loads(embedded[1])] == [row["response"] for row in ROWS]
    assert "<b>" not in text and "http://" not in text and "https://" not in text


def test_chosen_rows_become_cases(tmp_path: Path) -> None:
    rows = compare(stored(write_rows(tmp_path / "a.jsonl", ROWS)), settings(rm_type="gsm8k"), against=None)
    cases = tmp_path / "cases.jsonl"
    append_cases(cases, rows, {2: False})
    append_cases(cases, rows, {1: True})
    assert [json.loads(line) for line in cases.read_text().splitlines()] == [
        {"label": "7", "response": "#### 8", "correct": False},
        {"label": "7", "response": "#### 7", "correct": True},
    ]
    with pytest.raises(DataError, match="there is no answer 5: they are numbered from 1 to 4"):
        append_cases(cases, rows, {5: True})


@pytest.mark.parametrize(
    ("answer", "changed"),
    [
        ("18", "19"),
        ("1,009", "1,000"),
        (r"\frac{1}{3}", r"\frac{1}{4}"),
        ("x^2", "x^3"),
        ("Zoe", "Zof"),
        ("Z", "A"),
        ("∅", "∅1"),
    ],
)
def test_a_perturbed_answer_is_another_one(answer: str, changed: str) -> None:
    assert perturb(answer) == changed


def test_labels_that_cannot_be_told_apart_are_found(tmp_path: Path) -> None:
    rows = [{"label": "7"}, {"label": "x"}, {"label": "#### 1/0"}, {"label": "0.50"}]
    checked = check_labels(
        [write_rows(tmp_path / "a.jsonl", rows)], settings(rm_type="gsm8k"), label_key="label", metadata_key="m"
    )
    assert (checked.num_labels, checked.num_tried, checked.is_good) == (4, 2, False)
    assert [place for place, _ in checked.unreadable] == ["a.jsonl row 2", "a.jsonl row 3"]
    words = [{"label": "the"}, {"label": "Paris"}]
    file = write_rows(tmp_path / "b.jsonl", words)
    f1 = check_labels([file], settings(rm_type="f1"), label_key="label", metadata_key="m")
    assert [place for place, _ in f1.unreadable] == ["b.jsonl row 1"] and f1.num_tried == 1


def test_all_gsm8k_labels_pass(data_dir: Path) -> None:
    files = [str(data_dir / "gsm8k" / f"{split}.jsonl") for split in ("train", "test")]
    checked = check_labels(files, settings(rm_type="gsm8k"), label_key="answer", metadata_key="metadata")
    assert (checked.num_labels, checked.num_tried, checked.is_good) == (8792, 8792, True)
