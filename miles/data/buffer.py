"""Groups that a rollout took and did not use up, in front of the prompts that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from miles.observe.samples import from_row, to_row
from miles.types import DataSource, Sample


class GroupBuffer:
    """Implements `DataSource` over another one. Parked groups come first, the oldest before the others unless `take`
    takes others out of the list it is given, and are part of every checkpoint: none is lost, none comes twice."""

    def __init__(
        self, source: DataSource, *, take: Callable[[list[list[Sample]], int], list[list[Sample]]] | None = None
    ) -> None:
        self.source = source
        self._take = take or take_oldest
        self._parked: list[list[Sample]] = []
        self.drop_rate = 0.0  # share of groups that the filter dropped lately

    def __len__(self) -> int:
        """Groups that are parked."""
        return len(self._parked)

    def next(self, count: int) -> list[list[Sample]]:
        taken = self._take(self._parked, count)
        return taken + (self.source.next(count - len(taken)) if len(taken) < count else [])

    def park(self, groups: Iterable[list[Sample]]) -> None:
        self._parked = sorted([*groups, *self._parked], key=lambda group: group[0].group_index)

    def note(self, groups: Iterable[tuple[Sample, float]]) -> None:
        self.source.note(groups)

    get_samples, add_samples = next, park  # the public names, for hooks

    def state_dict(self) -> dict[str, Any]:
        parked = [[to_row(sample) for sample in group] for group in self._parked]
        return {**self.source.state_dict(), "parked": parked, "drop_rate": self.drop_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state)
        self._parked = [[from_row(row) for row in group] for group in state.get("parked", [])]
        self.drop_rate = state.get("drop_rate", 0.0)


def take_oldest(parked: list[list[Sample]], count: int) -> list[list[Sample]]:
    """Take up to `count` groups out of `parked`."""
    taken = parked[:count]
    del parked[:count]
    return taken
