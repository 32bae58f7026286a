"""Rewards that compare text: `exact`, `f1`, `format`."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from miles.rollout.rm_hub.grader import Grader, Reward
from miles.rollout.rm_hub.math_answer import extract_answer
from miles.types import Sample

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WHOLE_ANSWERS = {"yes", "no", "noanswer"}  # half of such an answer is no answer


class ExactGrader(Grader):
    """`exact`: 1 when the answer is the label, character for character, apart from space around it."""

    def label_problem(self, label: Any, metadata: dict[str, Any]) -> str | None:
        if not isinstance(label, (str, int, float)):
            return f"it is a {type(label).__name__}; expected a text or a number"
        return None if str(label).strip() else "it is empty"

    async def compare(self, answer: str, sample: Sample) -> Reward:
        return int(answer.strip() == str(sample.label).strip())

    def right_answer(self, label: Any, metadata: dict[str, Any]) -> str | None:
        return str(label).strip()


class F1Grader(Grader):
    """`f1`: harmonic mean of precision and recall of the words, from 0 to 1; for a list of labels the best one."""

    def label_problem(self, label: Any, metadata: dict[str, Any]) -> str | None:
        labels = _labels(label)
        if not labels or not all(isinstance(one, (str, int, float)) for one in labels):
            return f"it is a {type(label).__name__}; expected a text, a number or a list of them"
        return None if all(_words(str(one)) for one in labels) else "it has no word"

    async def compare(self, answer: str, sample: Sample) -> Reward:
        return max(token_f1(answer, str(label)) for label in _labels(sample.label))

    def right_answer(self, label: Any, metadata: dict[str, Any]) -> str | None:
        return str(_labels(label)[0])


class FormatGrader(Grader):
    """`format`: 1 when the response ends its thinking part and has a final answer in its place, right or wrong."""

    place = r"after the thinking part, the last \boxed{...} or the line after ####"

    def find(self, response: str) -> str | None:
        return extract_answer(response)

    async def compare(self, answer: str, sample: Sample) -> Reward:
        return 1


def token_f1(answer: str, label: str) -> float:
    """F1 of the words after lower-casing and removal of punctuation and articles. `yes`, `no` and `noanswer` must
    match as a whole."""
    given, expected = _words(answer), _words(label)
    if given == expected:
        return 1.0
    if len(given) == 1 and given[0] in _WHOLE_ANSWERS or len(expected) == 1 and expected[0] in _WHOLE_ANSWERS:
        return 0.0
    num_shared = (Counter(given) & Counter(expected)).total()
    return 2 * num_shared / (len(given) + len(expected)) if num_shared else 0.0


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def _labels(label: Any) -> list[Any]:
    return label if isinstance(label, list) else [label]
