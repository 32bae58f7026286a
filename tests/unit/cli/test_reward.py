from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.cli.main import main

ROWS = [("7", "#### 7"), ("7", "#### 8"), ("[0]", "[red]x[/red]")]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"label": label, "response": text}) + "\n" for label, text in ROWS))
    return str(path)


def test_reward_test_shows_verdicts_and_disagreements(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, cases = tmp_path / "page.html", tmp_path / "cases.jsonl"
    flags = [
        "--rm-type",
        "exact",
        "--against",
        "format",
        "--html",
        str(page),
        "--keep",
        "2=wrong",
        "--cases",
        str(cases),
    ]
    assert main(["reward", "test", file, *flags]) == 0
    out = capsys.readouterr().out
    assert "3 answers graded by exact: mean reward 0.0000" in out
    assert "disagreements with format: 2 (66.67%)" in out
    assert "time of an answer: median" in out
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(cases.read_text()) == {"label": "7", "response": "#### 8", "correct": False}


def test_without_flags_labels_are_found_and_graded_by_math(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "solved.jsonl"
    path.write_text('{"question": "q", "answer": "so #### 12"}\n')
    assert main(["reward", "check", str(path)]) == 0
    assert "1 labels for math: 1 can be read" in capsys.readouterr().out


def test_reward_check_ends_with_1_when_a_label_is_bad(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward", "check", f"{file}@[0:2]", "--rm-type", "gsm8k"]) == 0
    assert "2 of 2 differ from a changed one" in capsys.readouterr().out
    assert main(["reward", "check", file, "--rm-type", "gsm8k"]) == 1
    assert "cannot be read: answers.jsonl row 3: '[0]': it is not a number" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["test", "FILE", "--rm-type", "exakt"], "did you mean exact"),
        (["test", "FILE", "--rm-typ", "exact"], "unknown flag --rm-typ (did you mean --rm-type?)"),
        (["test", "FILE", "--rm-type", "exact", "--keep", "2"], "--keep 2: expected the number"),
        (["test", "FILE", "--rm-type", "exact", "--keep", "2=right"], "--keep and --cases go together"),
        (["check", "FILE", "--custom-rm-path", "a.b"], "only built-in rewards can write an answer"),
    ],
)
def test_mistakes_are_one_sentence(
    file: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reward", *[file if word == "FILE" else word for word in arguments]]) == 2
    assert message in capsys.readouterr().err
