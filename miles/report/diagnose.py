"""Why a run is flat, collapsing, slow or dead: every known cause that its numbers and its log show, the worst first."""

from __future__ import annotations

from miles.report.causes import CAUSES
from miles.report.findings import BAD, Finding
from miles.report.ranges import RangeAlarm, Ranges
from miles.report.runs import RunData
from miles.report.symptoms import CAUSES_IN_LOGS, logged, other_error, unfinished


def diagnose(run: RunData, *, ranges: Ranges | None = None) -> list[Finding]:
    """Findings in the order of their scores. An error that a finding explains is not listed again."""
    found = logged(run)  # before what follows from it
    found += [finding for look in (*CAUSES_IN_LOGS, *CAUSES) if (finding := look(run)) is not None]
    if ranges is not None:
        found += _outside(run, ranges)
    if not any(finding.score >= BAD for finding in found):
        found += [finding for look in (other_error, unfinished) if (finding := look(run)) is not None]
    return sorted(found, key=lambda finding: -finding.score)


def _outside(run: RunData, ranges: Ranges) -> list[Finding]:
    alarm = RangeAlarm(ranges)
    texts = [(step.number, text) for step in run.steps for text in alarm.check(step.number, step.metrics)]
    return [
        Finding(
            "range",
            f"Outside the range of {len(ranges.runs)} healthy runs from step {step} on",
            BAD - 8,
            (text,),
            "Compare with the healthy runs: miles compare.",
        )
        for step, text in texts
    ]
