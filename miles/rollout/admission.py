"""Which of the submitted groups make up a rollout, and how many more are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """Groups by their number: `surplus` ones are not needed, finished or not."""

    chosen: list[int]
    dropped: list[int]
    surplus: list[int]


class Admission:
    """Groups are numbered in the order they are submitted.

    With `in_order` the first ones that pass make up the rollout, whenever they finish: what is trained on depends on
    the answers alone, and slow groups are not left out. Else the ones that finish first do.
    """

    def __init__(self, wanted: int, *, in_order: bool) -> None:
        self._wanted, self._in_order = wanted, in_order
        self._passes: dict[int, bool] = {}  # in the order they finished
        self.num_submitted = 0

    def submit(self, count: int) -> range:
        """The numbers of `count` new groups."""
        first, self.num_submitted = self.num_submitted, self.num_submitted + count
        return range(first, self.num_submitted)

    def finish(self, number: int, *, passes: bool) -> None:
        self._passes[number] = passes

    @property
    def missing(self) -> int:
        """How many more groups are needed even if all that are being written pass."""
        return self._wanted - (self.num_submitted - self.num_dropped)

    @property
    def num_dropped(self) -> int:
        return self.num_finished - self.num_passed

    @property
    def num_passed(self) -> int:
        return sum(self._passes.values())

    @property
    def num_finished(self) -> int:
        return len(self._passes)

    def outcome(self) -> Outcome | None:
        """The rollout once it is known, else None."""
        order: Sequence[int] = list(self._passes)
        if self._in_order:
            order = range(next((n for n in range(self.num_submitted) if n not in self._passes), self.num_submitted))
        passed = [number for number in order if self._passes[number]]
        if len(passed) < self._wanted:
            return None
        chosen = sorted(passed[: self._wanted])
        last = chosen[-1] if self._in_order else self.num_submitted
        dropped = [n for n in range(self.num_submitted) if self._passes.get(n) is False and n < last]
        taken = {*chosen, *dropped}
        return Outcome(chosen, dropped, [n for n in range(self.num_submitted) if n not in taken])
