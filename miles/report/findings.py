"""One thing that is wrong or worth a look, with what shows it and what to change."""

from __future__ import annotations

from dataclasses import dataclass

FATAL, BAD, WATCH, NOTE = 100.0, 60.0, 30.0, 5.0


@dataclass(frozen=True)
class Finding:
    """`score` orders findings: 100 ends a run, 60 spoils it, 30 costs time or signal, 5 is good to know.

    flags: what to change, spelled as the run's own program spells it. section: of the manual.
    """

    key: str
    title: str
    score: float
    evidence: tuple[str, ...]
    advice: str
    flags: tuple[str, ...] = ()
    section: str = ""

    @property
    def level(self) -> str:
        """`bad`, `watch` or `note`."""
        if self.score >= BAD:
            return "bad"
        return "watch" if self.score >= WATCH else "note"
