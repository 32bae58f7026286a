"""Rewards that compare the final answer of a response with the label by exact arithmetic, then by symbolic algebra."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from miles.rollout.rm_hub.grader import SYMBOLIC, Grader, Reward
from miles.rollout.rm_hub.math_answer import after_thinking, extract_answer, extract_boxed, extract_label
from miles.rollout.rm_hub.math_grade import grade_exactly, label_problem, needs_symbolic
from miles.types import Sample

_PLAIN = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_POWER_OF_TEN = re.compile(r"(?:\\times|\\cdot|[×·*])\s*10\s*\^\s*\{?\s*-?\d+\s*\}?")
_ARITHMETIC = re.compile(r"[\d)}]\s*(?:[-+*^!(×·÷\u2212]|\\cdot|\\times|\\div)|\\(?:sqrt|d?binom)")
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


class MathGrader(Grader):
    """`math`: 1 when the final answer equals the label, else 0. Numbers are compared exactly, unless
    `metadata["tolerance"]` gives the share of the label that they may differ by.

    Exact arithmetic settles most answers here and now; what needs symbolic algebra goes to the worker processes.
    """

    place = r"after the thinking part, the last \boxed{...} or the line after ####"

    def start(self) -> None:
        self.tools.pools.get(SYMBOLIC, timeout_s=self.tools.config.reward.rm_timeout)

    def find(self, response: str) -> str | None:
        return extract_answer(response)

    def label_problem(self, label: Any, metadata: dict[str, Any]) -> str | None:
        problem = label_problem(label) or _tolerance_problem(metadata)
        if problem is not None or not needs_symbolic(str(label)):
            return problem
        return self._symbolic_problem(extract_label(str(label)) or "")

    def _symbolic_problem(self, label: str) -> str | None:
        pool = self.tools.pools.get(SYMBOLIC, timeout_s=self.tools.config.reward.rm_timeout)
        outcome = pool.submit(("readable", label)).result()
        detail = f" ({outcome.detail})" if outcome.detail else ""
        return None if outcome.value else f"no expression can be read in it{detail}"

    async def compare(self, answer: str, sample: Sample) -> Reward:
        return int(await self._is_right(answer, sample))

    async def _is_right(self, answer: str, sample: Sample) -> bool:
        label = extract_label(str(sample.label))
        assert label is not None, "label_problem refuses such labels when they are loaded"
        tolerance = _tolerance(sample.metadata)
        verdict = grade_exactly(label, answer, tolerance=tolerance)
        if verdict is None:
            about = f"label {label!r}, answer {answer!r}"
            task = ("grade", label, answer, str(tolerance or 0))
            verdict = bool(await self.tools.run(SYMBOLIC, task, about=about))
        return verdict

    def right_answer(self, label: Any, metadata: dict[str, Any]) -> str | None:
        return extract_label(str(label))

    def write(self, answer: str) -> str:
        return rf"\boxed{{{answer}}}"


class Gsm8kGrader(MathGrader):
    """`gsm8k`: the answer must be a number, and not arithmetic that is left to the reader: `16-3-4` copied from the
    question is no answer. Needs no process."""

    def start(self) -> None:
        pass

    def _symbolic_problem(self, label: str) -> str | None:
        return "it is not a number"

    async def _is_right(self, answer: str, sample: Sample) -> bool:
        label = extract_label(str(sample.label)) or ""
        if "tolerance" not in sample.metadata and _PLAIN.fullmatch(label) and _PLAIN.fullmatch(answer):
            return label == answer or Fraction(label.replace(",", "")) == Fraction(answer.replace(",", ""))
        number = _POWER_OF_TEN.sub("", answer.rpartition("=")[2]).strip(" *`")
        if _ARITHMETIC.search(number):
            return False
        return grade_exactly(label, answer, tolerance=_tolerance(sample.metadata)) is True

    def write(self, answer: str) -> str:
        return f"#### {answer}"


class DeepscalerGrader(MathGrader):
    """`deepscaler`: a response must end its thinking part with `</think>`, or have `###Response`."""

    place = r"after </think> or ###Response, the last \boxed{...} or the line after ####"

    def find(self, response: str) -> str | None:
        for text in (response.rpartition("</think>"), response.partition("###Response")):
            if text[1]:
                return extract_answer(text[2])
        return None

    def write(self, answer: str) -> str:
        return rf"</think>\boxed{{{answer}}}"


class GemmaMathGrader(MathGrader):
    """`gemma_math`: thinking ends with `<channel|>`, if there is any."""

    place = r"after <channel|>, the last \boxed{...} or the line after ####"

    def find(self, response: str) -> str | None:
        return extract_answer(response.rpartition("<channel|>")[2])


class DapoGrader(MathGrader):
    """`dapo`: score 1 or -1, with the accuracy and the answer that was read."""

    place = "the last line `Answer: ...` after the thinking part"
    missing = {"score": -1.0, "acc": 0, "pred": ""}
    fields = ("score", "acc", "pred")

    def find(self, response: str) -> str | None:
        lines = _ANSWER_LINE.findall(after_thinking(response) or "")
        answer = lines[-1].strip().strip("*").strip() if lines else ""
        return (extract_boxed(answer) if "\\boxed" in answer else answer) or None

    async def compare(self, answer: str, sample: Sample) -> Reward:
        right = await self._is_right(answer, sample)
        return {"score": 1.0 if right else -1.0, "acc": int(right), "pred": answer}

    def write(self, answer: str) -> str:
        return f"Answer: {answer}"


def _tolerance(metadata: dict[str, Any]) -> Fraction | None:
    return Fraction(str(metadata["tolerance"])) if "tolerance" in metadata else None


def _tolerance_problem(metadata: dict[str, Any]) -> str | None:
    tolerance = metadata.get("tolerance", 0.5)
    if isinstance(tolerance, (int, float)) and 0 < tolerance < 1:
        return None
    return f'metadata["tolerance"] is {tolerance!r}; expected the share of the label that numbers may differ by'
