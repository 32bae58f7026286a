"""`--rm-type math`: 1 when the final answer of a response equals the label, else 0."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from miles.errors import RewardError
from miles.rollout.rm_hub.math_answer import extract_answer, extract_boxed, extract_label
from miles.rollout.rm_hub.math_grade import grade_exactly, label_problem, needs_symbolic
from miles.rollout.rm_hub.pool import RAISED, Outcome, WorkerPool
from miles.types import Sample

MAX_ERROR_SHARE = 0.01  # of the answers graded so far; more means that the grader itself is broken
NUM_ERRORS_TOLERATED = 10


class MathReward:
    """Exact arithmetic settles most answers here and now; what needs symbolic algebra goes to the worker processes.

    With `boxed` only a box counts as the place of the answer.
    """

    def __init__(self, *, boxed: bool, num_workers: int, timeout_s: float) -> None:
        self._boxed = boxed
        self._pool = WorkerPool("miles.rollout.rm_hub.math_symbolic", num_workers=num_workers, timeout_s=timeout_s)
        self._num_graded = 0
        self._errors: list[str] = []

    def start(self) -> None:
        self._pool.start()

    def close(self) -> None:
        self._pool.close()

    def extract(self, response: str) -> str | None:
        """The final answer as it is written in the response."""
        return (extract_boxed(response) or None) if self._boxed else extract_answer(response)

    def check_label(self, label: Any) -> str | None:
        """Why no answer can be compared with this label. Blocks while a worker reads it, when it is an expression."""
        problem = label_problem(label)
        if problem is not None or not needs_symbolic(str(label)):
            return problem
        outcome = self._pool.submit(("readable", extract_label(str(label)))).result()
        return (
            None if outcome.value else "no expression can be read in it" + f" ({outcome.detail})" * bool(outcome.detail)
        )

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """A 1 or 0 for each sample. An answer whose grading takes too long, dies or raises is wrong, and counted."""
        return list(await asyncio.gather(*(self._score_one(sample) for sample in samples)))

    def counts(self) -> dict[str, int]:
        """Failures of the grader since the start, by kind."""
        return dict(self._pool.failures)

    async def _score_one(self, sample: Sample) -> int:
        self._num_graded += 1
        answer = self.extract(sample.response)
        if answer is None:
            return 0
        label = extract_label(str(sample.label))
        assert label is not None, "check_label refuses such labels when they are loaded"
        verdict = grade_exactly(label, answer)
        if verdict is None:
            outcome = await asyncio.wrap_future(self._pool.submit(("grade", label, answer)))
            self._watch_errors(outcome, label, answer)
            verdict = bool(outcome.value)
        return int(verdict)

    def _watch_errors(self, outcome: Outcome, label: str, answer: str) -> None:
        if outcome.failure != RAISED:
            return
        self._errors.append(f"{outcome.detail} (label {label!r}, answer {answer!r})")
        if len(self._errors) > max(NUM_ERRORS_TOLERATED, MAX_ERROR_SHARE * self._num_graded):
            raise RewardError(
                f"--rm-type math: the grader raised for {len(self._errors)} of {self._num_graded} answers, which is "
                f"more than {MAX_ERROR_SHARE:.0%}: {'; '.join(self._errors[-3:])}"
            )
