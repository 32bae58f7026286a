"""How many answers could not be graded, and when that is too many to go on."""

from __future__ import annotations

from miles.errors import RewardError

MAX_SHARE = 0.01  # of the answers graded so far
NUM_TOLERATED = 2  # the third failure can be shown with two others
NUM_SHOWN = 3


class ErrorWatch:
    """Counts answers, and failures with their text. Used from one thread."""

    def __init__(self, flag: str) -> None:
        self._flag = flag
        self._shown: list[str] = []
        self.num_answers = 0
        self.num_failed = 0

    def add(self, failure: str) -> None:
        """Count a failure. Raises `RewardError` with three examples when more than 1 percent of the answers failed."""
        self.num_failed += 1
        self._shown = [*self._shown, failure][-NUM_SHOWN:]
        if self.num_failed > max(NUM_TOLERATED, MAX_SHARE * self.num_answers):
            examples = "".join(f"\n  {text}" for text in self._shown)
            raise RewardError(
                f"{self._flag}: {self.num_failed} of {self.num_answers} answers could not be graded, more than "
                f"{MAX_SHARE:.0%}; the last ones:{examples}"
            )
