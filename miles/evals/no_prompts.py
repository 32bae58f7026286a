"""The data source of `miles eval`, which makes no rollout."""

from __future__ import annotations

from typing import Any, NoReturn


class NoPrompts:
    """A class for `--data-source-path`."""

    def __init__(self, args: Any) -> None: ...

    def get_samples(self, count: int) -> NoReturn:
        raise AssertionError("an evaluation asks for no rollout")

    def save(self, number: int) -> None: ...

    def load(self, number: int) -> None: ...
