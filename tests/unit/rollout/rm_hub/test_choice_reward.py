from __future__ import annotations

from typing import Any

import pytest

from miles.rollout.rm_hub.choice_reward import find_letter, right_letter
from tests.unit.rollout.rm_hub.graders import grade, make_reward


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"),
        ("The correct answer is **C**", "C"),
        ("Answer: D", "D"),
        ("answer: (a)", "A"),
        ("The final answer is option B, since", "B"),
        (r"so \boxed{B}", "B"),
        (r"so \boxed{\text{(B)}}", "B"),
        (r"\boxed{B. 12 m}", "B"),
        ("I weigh the options.\n\nB", "B"),
        ("(B)", "B"),
        ("B. because it is", "B"),
        ("The answer is A. No, the answer is B.", "B"),
        ("A proton is what an electron is not.", None),
        ("The answer is a proton", None),
        ("The answer is A or B", None),
        ("The answer is A, B", None),
        ("The answer is not B", None),
        (r"\boxed{A or B}", None),
        (r"\boxed{A}, wait \boxed{}", None),
        (r"\boxed{12}", None),
        ("Vitamin C", None),
        ("The answer is I think unclear", None),
        ("", None),
    ],
)
def test_the_letter_that_a_response_settles_on(text: str, letter: str | None) -> None:
    assert find_letter(text) == letter


@pytest.mark.parametrize(
    ("label", "metadata", "letter"),
    [
        ("B", {}, "B"),
        ("(c)", {}, "C"),
        (2, {}, "C"),
        ("0", {}, "A"),
        ("blue", {"choices": ["red", "blue"]}, "B"),
        ("4", {"choices": ["2", "4", "8"]}, "B"),
        (1, {"choices": ["1", "0"]}, "B"),
        ("x", {"correct_letter": "d"}, "D"),
        ("green", {"choices": ["red", "blue"]}, None),
        (4, {}, None),
        (None, {}, None),
    ],
)
def test_the_right_letter_comes_from_a_letter_an_index_or_a_text(
    label: Any, metadata: dict[str, Any], letter: str | None
) -> None:
    assert right_letter(label, metadata) == letter


def test_the_text_of_a_choice_counts_as_its_letter() -> None:
    metadata = {"choices": ["a dark red", "blue", "B or C"]}
    texts = [
        "The answer is blue.",
        r"\boxed{Blue}",
        "Answer: **blue**",
        "The answer is dark blue",
        "It may be blue",
        "blue",
    ]
    with make_reward("gpqa") as reward:
        assert grade(reward, [("B", text) for text in texts], metadata) == [1.0, 1.0, 1.0, 0.0, 0, 0]
        assert grade(reward, [("A", "The answer is a dark red"), ("C", "The answer is B or C")], metadata) == [1.0, 1.0]
        assert grade(reward, [("B", "The answer is B or C"), ("B", "The answer is blue")]) == [0.0, 0.0]


def test_gpqa_grades_and_refuses_labels_without_a_choice() -> None:
    with make_reward("gpqa") as reward:
        assert grade(reward, [("B", "<think>The answer is A</think>The answer is B"), ("B", "A")]) == [1.0, 0.0]
        assert grade(reward, [("B", "<think>The answer is B")]) == [0]
        assert reward.label_problem("E", {}) == "the letter E is none of A, B, C, D"
        assert reward.label_problem("E", {"valid_letters": list("ABCDE")}) is None
        assert reward.label_problem("magenta", {"choices": ["red", "blue"]}) == "it names none of the choices A, B"
        assert "must be a list" in (reward.label_problem("A", {"choices": "red"}) or "")
