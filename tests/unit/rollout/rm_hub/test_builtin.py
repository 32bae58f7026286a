from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.errors import ConfigError
from miles.rollout.rm_hub.builtin import BUILTIN
from miles.rollout.rm_hub.text_reward import token_f1
from tests.unit.rollout.rm_hub.graders import grade, make_reward


def rewards(spec: str, pairs: list[tuple[Any, str]], metadata: dict[str, Any] | None = None, **settings: Any) -> Any:
    with make_reward(spec, **settings) as reward:
        return grade(reward, pairs, metadata)


def test_gsm8k_reads_the_line_or_the_box_and_compares_numbers_exactly() -> None:
    right = ["#### 1,234", "so #### $1234.00", r"\boxed{1234}", "<think>#### 5</think>\n#### 1234 apples", "#### +1234"]
    wrong = ["1234", "#### 1234.5", "#### 12,34", "#### 1234 or 5", "<think>#### 1234", "#### -1234", "#### 617*2+1"]
    assert rewards("gsm8k", [("work\n#### 1,234", text) for text in right + wrong]) == [1] * 5 + [0] * 7


@pytest.mark.parametrize(
    "answer", ["17+1", "9*2", "2*(4+5)", r"3\times 6", "20 - 2", "36÷2", r"\sqrt{324}", "18!/17!", "4^2+2"]
)
def test_gsm8k_takes_no_arithmetic_for_a_number(answer: str) -> None:
    pairs = [("18", f"#### {answer}"), ("18", f"#### {answer} = 18"), ("18", f"#### {answer} = 19")]
    assert rewards("gsm8k", pairs) == [0, 1, 0]


@pytest.mark.parametrize(
    "answer",
    ["18.0", "**18**", r"1.8\times10^{1}", "1.8e1", "$18", "18 eggs", "36/2", r"\frac{36}{2}", "x = 18", "+18"],
)
def test_gsm8k_takes_a_number_in_any_notation(answer: str) -> None:
    assert rewards("gsm8k", [("18", f"#### {answer}"), ("19", f"#### {answer}")]) == [1, 0]


def test_gsm8k_refuses_labels_that_are_not_numbers() -> None:
    with make_reward("gsm8k") as reward:
        assert reward.label_problem(r"\sqrt{2}", {}) == "it is not a number"
        assert reward.label_problem("#### 3/4", {}) is None


def test_deepscaler_needs_the_end_of_the_thinking_part() -> None:
    texts = [r"<think>a</think>\boxed{5}", r"x ###Response \boxed{5}", r"\boxed{5}", r"<think>\boxed{5}</think> 5"]
    assert rewards("deepscaler", [("5", text) for text in texts]) == [1, 1, 0, 0]


def test_gemma_math_reads_after_the_channel_marker() -> None:
    texts = [r"\boxed{4}<channel|>\boxed{5}", r"\boxed{5}<channel|>\boxed{4}", r"\boxed{5}"]
    assert rewards("gemma_math", [("5", text) for text in texts]) == [1, 0, 1]


def test_dapo_reads_the_last_answer_line() -> None:
    texts = ["Answer: 4\nAnswer: $5$", "**Answer:** 5", r"answer: \boxed{5}", "Answer: 6", "5", "Answer: 5 or 6"]
    scores = rewards("dapo", [("5", text) for text in texts], reward_key="score")
    assert [score["score"] for score in scores] == [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    assert scores[0] == {"score": 1.0, "acc": 1, "pred": "$5$"}
    assert scores[4] == {"score": -1.0, "acc": 0, "pred": ""}
    assert rewards("dapo", [(r"\frac{1}{2}", "Answer: 0.5")]) == [1.0]  # no key, and a label that is no integer


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        ("The cat sat.", "a cat", 2 / 3),  # of [cat, sat] and [cat] one word is shared
        ("Paris", "paris!", 1.0),
        ("the big big dog", "big dog", 4 / 5),
        ("yes", "yes, it is", 0.0),
        ("Yes.", "yes", 1.0),
        ("no", "yes", 0.0),
        ("blue", "red", 0.0),
        ("", "red", 0.0),
    ],
)
def test_f1_counts_shared_words(answer: str, label: str, expected: float) -> None:
    assert token_f1(answer, label) == pytest.approx(expected)


def test_f1_takes_the_best_of_several_labels() -> None:
    assert rewards("f1", [(["red", "dark blue"], "blue"), ("red", "<think>red")]) == [pytest.approx(2 / 3), 0]
    with make_reward("f1") as reward:
        assert reward.label_problem("the", {}) == "it has no word"
        assert reward.label_problem([], {}) is not None


def test_exact_compares_every_character() -> None:
    texts = [" Paris\n", "<think>x</think>Paris", "paris", "Paris.", "It is Paris"]
    assert rewards("exact", [("Paris", text) for text in texts]) == [1, 1, 0, 0, 0]
    assert rewards("boxed_exact", [("Paris", r"It is \boxed{Paris}"), ("Paris", "Paris")]) == [1, 0]


def test_format_needs_an_answer_in_its_place_but_no_right_one() -> None:
    texts = [r"<think>x</think>\boxed{9}", "#### 9", r"<think>\boxed{5}", r"\boxed{}", "5"]
    assert rewards("format", [("5", text) for text in texts]) == [1, 1, 0, 0, 0]


def test_a_weighted_sum_adds_the_parts() -> None:
    pairs = [("5", "#### 5"), ("5", "#### 4"), ("5", "4")]
    assert rewards("gsm8k+0.1*format", pairs) == pytest.approx([1.1, 0.1, 0.0])
    assert rewards("2 * gsm8k - 0.5*format", pairs) == pytest.approx([1.5, -0.5, 0.0])
    assert rewards("dapo+format", [("5", r"Answer: \boxed{5}"), ("5", "x")]) == [2.0, -1.0]
    with_parts = rewards("gsm8k+0.5*format", pairs[1:2], reward_key="score")
    assert with_parts == [{"score": 0.5, "gsm8k": 0.0, "format": 1.0}]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("math+", "cannot be read at '\\+'"),
        ("math format", "cannot be read at 'math format'"),
        ("0.1format", "cannot be read at '0.1format'"),
        ("", "cannot be read at ''"),
        ("math+fromat", "no such reward as fromat; did you mean format"),
        ("math+0.5*math", "a name stands in it twice"),
    ],
)
def test_a_sum_that_cannot_be_read_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message), make_reward(spec):
        pass


@pytest.mark.parametrize("name", sorted(set(BUILTIN) - {"remote_rm", "random", "deterministic_random"}))
def test_every_reward_is_bounded_and_gives_its_least_without_an_answer(name: str) -> None:
    least = {"dapo": -1.0}.get(name, 0)
    metadata = {"regex": "^x$", "json_schema": {"type": "object"}, "tests": {"tests": "assert f(1)"}}
    assert rewards(name, [("A", "<think>A"), ("A", "<think>" * 1000)], metadata) == [least, least]


@pytest.mark.parametrize("name", ["math", "gsm8k", "deepscaler", "gemma_math", "dapo", "f1", "exact", "gpqa"])
def test_a_written_answer_is_found_and_right(name: str) -> None:
    label = "B" if name == "gpqa" else "42"
    for spec in (name, f"boxed_{name}"):
        with make_reward(spec) as reward:
            answer = reward.right_answer(label, {})
            assert answer == label
            assert grade(reward, [(label, reward.write(answer))]) == [1]


TEXT = "0123456789abcdfAB. ,:()<>/think#\\boxed{}$%`*\n\u2212answerisor\ud7ff"


@given(
    responses=st.lists(st.text(TEXT, max_size=60), min_size=1, max_size=5), label=st.sampled_from(["5", "1,000", "B"])
)
def test_no_response_breaks_a_reward_or_leaves_its_range(responses: list[str], label: str) -> None:
    pairs = [(label, text) for text in responses]
    for name in ("gsm8k", "f1", "exact", "gpqa", "format", "dapo", "boxed_f1", "deterministic_random"):
        if name != "gsm8k" or label != "B":
            low = -1 if name == "dapo" else 0
            assert all(low <= reward <= 1 for reward in rewards(name, pairs))
