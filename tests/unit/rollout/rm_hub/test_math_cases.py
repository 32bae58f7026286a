"""No false positive and no false negative on the stored cases, through the reward as a run uses it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.rollout.rm_hub.builtin import BuiltinReward
from miles.rollout.rm_hub.math_answer import extract_boxed
from tests.unit.rollout.rm_hub.graders import grade, make_reward


@pytest.fixture(scope="module")
def reward() -> Iterator[BuiltinReward]:
    with make_reward("math", rm_timeout=5.0) as made:
        yield made


def test_every_case_gets_its_verdict(reward: BuiltinReward, cases_dir: Path) -> None:
    cases = [json.loads(line) for line in (cases_dir / "math_grading.jsonl").read_text().splitlines()]
    assert cases
    assert [reward.label_problem(case["label"], {}) for case in cases] == [None] * len(cases)
    verdicts = grade(reward, [(case["label"], case["response"]) for case in cases])
    wrong = [case for case, verdict in zip(cases, verdicts, strict=True) if verdict != case["correct"]]
    assert wrong == []


EQUAL = [
    (r"\text{Evelyn}", "Evelyn"),
    ("Yes", r"\text{yes}"),
    ("3 cm", r"3\text{ centimeters}"),
    ("12 cm^2", r"12\text{ cm}^2"),
    ("5 million", "5{,}000{,}000"),
    (r"\$5", r"5\text{ dollars}"),
    (r"0.1\overline{6}", r"\frac16"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"2\pi", "2 pi"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,2", r"2 \text{ and } 1"),
    (r"(-\infty,2)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,2)"),
    (r"(-\infty,\infty)", r"\mathbb{R}"),
    ("x<2", r"(-\infty,2)"),
    (r"[1,\infty)", r"x\ge 1"),
    ("x > 2", "2 < x"),
    ("1+2i", "2i+1"),
    ("7:30", "07:30"),
    ("B", "(B) 12"),
    ("1011_2", "1011_{2}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix}"),
    ("f(x)=2x+1", "1+2x"),
    ("5", "2+3=5"),
    ("(1,2)", "(x,y)=(1,2)"),
    (r"\pm 3", "3,-3"),
    (r"2\pm\sqrt{3}", r"2+\sqrt3, 2-\sqrt3"),
    ("1000", r"1\,000"),
    ("25", r"25\%"),
    ("-1/2", r"\frac{-1}{2}"),
    (r"-3\frac12", "-3.5"),
    (r"\frac{x}{2}", "0.5x"),
    ("y=2x", "y-2x=0"),
    (r"\emptyset", r"\{\}"),
    (r"\binom{5}{2}", "10"),
    ("2^{0.5}", r"\sqrt{2}"),
    ("(1,234)", "(1, 234)"),
    (r"x \in \{1,2\}", "1, 2"),
    (r"\sin^2 x", r"1-\cos^2 x"),
    (r"[0,\infty)", r"[0, +\infty)"),
    (r"f^{-1}(x)=\frac{x-1}{2}", r"\frac{x-1}{2}"),
    (r"\text{(1,2)}", "(1,2)"),
    ("5", "|-5|"),
    ("a=1,b=2", "b=2,a=1"),
    (r"x=\pm 2", "2,-2"),
    (r"1\pm i", "1+i,1-i"),
    ("2x=4", "x=2"),
    (r"-2\leq x<2", "[-2,2)"),
    (r"(-\infty,1)\cup(1,\infty)", r"x \neq 1"),
    ("10%", "0.1"),
    ("6 dozen", "72"),
    (r"\sin 30^\circ", r"\frac{1}{2}"),
    (r"\cos(60^{\circ})", "0.5"),
    ("45", r"45 \deg"),
    (r"5\text{ m/s}", "5 m/s"),
    ("5m", "5 m"),
    ("5", "5 m"),
    (r"x<-1 \text{ or } x>1", r"(-\infty,-1)\cup(1,\infty)"),
    ("#### 18", "18"),
    (r"so \boxed{18}", "18"),
]
DIFFERENT = [
    ("5", r"5\text{ million}"),
    (r"3\text{ cm}", r"3\text{ m}"),
    (r"12\text{ m}^2", r"12\text{ m}^3"),
    (r"\frac{1}{23}", r"\frac{12}{3}"),
    ("cat", "act"),
    (r"\sqrt{x^2}", "x"),
    ("2", "2 pi"),
    ("x<2", r"(-\infty,2]"),
    ("x>2", "x<2"),
    ("x+y<2", "y+x<3"),
    ("1:2", "2:1"),
    ("B", "B or C"),
    ("B", r"(B) \text{ or } (C)"),
    ("1", "1 + 10^{-30}"),
    ("1", r"\cos(10^{-30})"),
    ("1000", "10 00"),
    ("25%", "2.5"),
    ("5", r"\text{not } 5"),
    ("5", "5x"),
    ("e", "2.718281828"),
    (r"\sqrt{2}", "1.41421356237"),
    ("x=1", "y=1"),
    ("5", "2+4=5"),
    ("0", r"\frac{1}{0}"),
    ("5", r"2^{2^{2^{2^{2^{2}}}}}"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "1,2"),
    ("1,1", "1"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1 \\ 2\end{pmatrix}"),
    ("7", "12_5"),
    ("3", "1 or 3"),
    ("x", "X"),
    ("a=1,b=2", "a=2,b=1"),
    ("5 hours", "5 minutes"),
    ("5 cm", "5 m"),
    (r"(-\infty,\infty)", r"x>-1 \text{ and } x<1"),
    ("10^{100}", "10^{100}+1"),
    ("9007199254740993", "9007199254740992"),
    ("12", "12-13"),
    ("1/3", "0.3333333333"),
    ("7", "7!"),
    ("7", r"7\pi"),
    ("1/2", "1:2"),
    ("3+4i", "3-4i"),
    (r"\mathbb{Z}", r"\mathbb{R}"),
]


def test_notation_does_not_matter_and_value_does(reward: BuiltinReward) -> None:
    pairs = [(label, rf"\boxed{{{answer}}}") for label, answer in [*EQUAL, *DIFFERENT]]
    verdicts = grade(reward, pairs)
    expected = [1] * len(EQUAL) + [0] * len(DIFFERENT)
    assert [pair for pair, verdict, right in zip(pairs, verdicts, expected, strict=True) if verdict != right] == []


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{5",
        r"\boxed{}",
        r"\boxed{5} or \boxed{}",
        r"\boxed 5",
        "<think>\\boxed{5}",
        "<think>a</think> b <think>\\boxed{5}",
        "5",
        "the answer is 5",
        "####",
    ],
)
def test_an_answer_that_is_not_where_answers_go_is_wrong(reward: BuiltinReward, response: str) -> None:
    assert reward.find(response) is None
    assert grade(reward, [("5", response)]) == [0]


def test_boxed_math_reads_boxes_only() -> None:
    with make_reward("boxed_math") as boxed:
        assert grade(boxed, [("5", r"\boxed{5}"), ("5", "#### 5")]) == [1, 0]
    assert extract_boxed(r"<think>\boxed{1}</think> \boxed{\frac{1}{2}} and \fbox{7}") == "7"
    assert extract_boxed("none") == ""


@pytest.mark.parametrize(
    "label",
    [
        None,
        float("nan"),
        ["5"],
        "",
        "  ",
        "?",
        "nan",
        r"\frac{1}{",
        r"\boxed{5",
        "####",
        "5 +",
        "1.2.3",
        "3 4",
        "= 5",
        "@@",
    ],
)
def test_field_note_43_an_unreadable_label_is_refused(reward: BuiltinReward, label: object) -> None:
    assert reward.label_problem(label, {})


@pytest.mark.parametrize("label", ["5", 5, 3.5, r"x^2+1", r"\log_2 8", "Evelyn", "(B)", "work\n#### 18", r"[0,\infty)"])
def test_readable_labels_are_accepted(reward: BuiltinReward, label: object) -> None:
    assert reward.label_problem(label, {}) is None


def test_field_note_41_the_verdict_is_the_same_from_every_thread(reward: BuiltinReward) -> None:
    verdicts: list[list[float]] = []
    pairs = [(r"\sqrt{8}", r"\boxed{2\sqrt{2}}"), ("x^2", r"\boxed{x^3}"), ("5", "#### 5")]
    threads = [threading.Thread(target=lambda: verdicts.append(grade(reward, pairs))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [[1, 0, 1]] * 3


def test_all_gsm8k_labels_equal_themselves_and_differ_from_a_neighbour(data_dir: Path) -> None:
    from_file = [json.loads(line)["answer"] for line in (data_dir / "gsm8k" / "test.jsonl").read_text().splitlines()]
    with make_reward("gsm8k") as exact:  # needs no worker
        assert [exact.label_problem(label, {}) for label in from_file] == [None] * 1319
        assert grade(exact, [(label, label) for label in from_file]) == [1] * 1319
        assert grade(exact, [(label, label + "1") for label in from_file]) == [0] * 1319


def test_numbers_may_differ_where_a_tolerance_is_asked(reward: BuiltinReward) -> None:
    close = [
        ("3.14", "3.1"),
        ("100", "98.5"),
        ("(1,2)", "(1.01,2)"),
        (r"\pi", "3.14"),
        (r"\sqrt{2}", "1.41"),
        ("5", "5"),
    ]
    far = [("3.14", "3.0"), ("100", "-100"), ("(1,2)", "(2,1)"), (r"\pi", "3.3"), ("x", "1.01x"), ("5 cm", "5 m")]
    pairs = [(label, rf"\boxed{{{answer}}}") for label, answer in close + far]
    assert grade(reward, pairs, {"tolerance": 0.02}) == [1] * len(close) + [0] * len(far)
    assert grade(reward, pairs) == [0] * 5 + [1] + [0] * len(far)
    assert reward.label_problem("5", {"tolerance": 0.02}) is None
    assert "the share of the label" in (reward.label_problem("5", {"tolerance": "2%"}) or "")
    with make_reward("gsm8k") as plain:
        assert grade(plain, [("100", "#### 99"), ("100", "#### 97")], {"tolerance": 0.02}) == [1, 0]
