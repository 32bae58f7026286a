"""What every built-in reward is: a place where it reads the answer, and a comparison of it with the label."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from miles.config.sections import RunConfig
from miles.rollout.reward_errors import ErrorWatch
from miles.rollout.rm_hub.math_answer import after_thinking, extract_boxed
from miles.rollout.rm_hub.pool import RAISED, WorkerPool
from miles.types import Sample

Reward = float | dict[str, Any]
SCORE = "score"  # the field of a dict reward that is the reward
SYMBOLIC = "miles.rollout.rm_hub.math_symbolic"
_WARM_UP = {SYMBOLIC: [("grade", "2x+4y=3", r"x+2y=\frac{3}{2}"), ("grade", "x^2+2x+1", "(x+1)^2")]}


class Pools:
    """The worker pools of a run, one for each module, started when first needed and shared by all rewards."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pools: dict[str, WorkerPool] = {}
        self._lock = threading.Lock()

    def get(self, module: str, *, timeout_s: float) -> WorkerPool:
        with self._lock:
            if module not in self._pools:
                self._pools[module] = WorkerPool(
                    module, num_workers=self._num_workers, timeout_s=timeout_s, warm_up=_WARM_UP.get(module, ())
                )
                self._pools[module].start()
            return self._pools[module]

    def failures(self) -> Counter[str]:
        """Tasks that timed out, died or raised since the start."""
        return sum((pool.failures for pool in self._pools.values()), Counter())

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@dataclass(frozen=True, slots=True)
class Tools:
    """What graders share."""

    config: RunConfig
    pools: Pools
    errors: ErrorWatch

    async def run(self, module: str, task: tuple[Any, ...], *, about: str, timeout_s: float | None = None) -> Any:
        """The value of a task done by a worker process; None, counted, when it hung, died or raised.

        Raises `RewardError` when more than a hundredth of all answers made a worker raise: hostile answers hang or
        die, so that would be a fault of the grader.
        """
        pool = self.pools.get(module, timeout_s=timeout_s or self.config.reward.rm_timeout)
        outcome = await asyncio.wrap_future(pool.submit(task))
        if outcome.failure == RAISED:
            self.errors.add(f"{outcome.detail} ({about})")
        return outcome.value


class Grader:
    """One built-in reward; the base grades the text after the thinking part.

    `place` says in words where the answer is read. `missing` is the reward of a response without an answer.
    `fields` are the fields of a dict reward, if it is one. `grades_empty`: with `boxed_`, no box is an empty answer.
    """

    place: ClassVar[str] = "the text after the thinking part"
    missing: ClassVar[Reward] = 0
    fields: ClassVar[tuple[str, ...]] = ()
    grades_empty: ClassVar[bool] = False

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    def start(self) -> None:
        """Start what takes time, and return at once."""

    def probe(self) -> None:
        """Raise `RewardError` when this machine or a service cannot do what the reward needs. Blocks."""

    async def close(self) -> None:
        """Give back what belongs to the event loop."""

    def find(self, response: str) -> str | None:
        """The answer as it is written in the response; None when there is none."""
        return after_thinking(response)

    def label_problem(self, label: Any, metadata: dict[str, Any]) -> str | None:
        """Why no answer could be graded with this label; None when one can. May block on a worker."""
        return None

    async def compare(self, answer: str, sample: Sample) -> Reward:
        """The reward of this answer. Raises `RewardError` when it could not be graded, whatever the answer."""
        raise NotImplementedError

    def right_answer(self, label: Any, metadata: dict[str, Any]) -> str | None:
        """An answer that must get the full reward; None when the label does not tell."""
        return None

    def write(self, answer: str) -> str:
        """A response that gives this answer in its place."""
        return answer


class Boxed(Grader):
    """Any grader, reading the last box only."""

    place = r"the last \boxed{...} after the thinking part"

    def __init__(self, inner: Grader) -> None:
        super().__init__(inner.tools)
        self.inner = inner
        self.missing = inner.missing  # type: ignore[misc]
        self.fields = inner.fields  # type: ignore[misc]
        self.start, self.probe, self.close = inner.start, inner.probe, inner.close  # type: ignore[method-assign]
        self.label_problem, self.compare = inner.label_problem, inner.compare  # type: ignore[method-assign]
        self.right_answer = inner.right_answer  # type: ignore[method-assign]

    def find(self, response: str) -> str | None:
        return extract_boxed(response) or ("" if self.inner.grades_empty else None)

    def write(self, answer: str) -> str:
        return rf"\boxed{{{answer}}}"


def unboxed(grader: Grader) -> Grader:
    return grader.inner if isinstance(grader, Boxed) else grader


MakeGrader = Callable[[Tools], Grader]
