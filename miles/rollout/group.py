"""Write the answers of one prompt and score them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from miles.rollout.reward_value import take_outcome
from miles.types import Sample, SampleStatus

Generate = Callable[[Sample], Awaitable[str | None]]  # gives the reason when it failed
ScoreGroup = Callable[[list[Sample]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class WrittenGroup:
    """`samples` have an answer and a reward. `failed` and `aborted` have none and are not part of the group: the others
    are compared among themselves."""

    samples: list[Sample]
    failed: list[Sample]
    aborted: list[Sample]
    reasons: list[str]  # of the failures
    answered_at: float  # `time.perf_counter()` when its last answer was written


async def write_group(
    samples: list[Sample], *, generate: Generate, score: ScoreGroup, goes_on: bool = False
) -> WrittenGroup:
    """Write all answers of the group at the same time, then score the ones that came to an end.

    The group is scored as soon as its last answer is there, while other groups are still being written. With `goes_on`
    a group that has a cut-off answer is scored when it has been finished later.
    """
    given = list(samples)  # `generate` may replace a sample by several rows
    failures = await asyncio.gather(*(generate(sample) for sample in given))
    samples.sort(key=lambda sample: sample.index)
    answered_at = time.perf_counter()
    reasons = [f"sample {sample.index}: {failure}" for sample, failure in zip(given, failures, strict=True) if failure]
    written = [s for s in samples if s.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)]
    is_open = goes_on and any(sample.status is SampleStatus.ABORTED for sample in samples)
    last = {sample.index: sample for sample in written}  # an answer of several rows is what its last one says
    unscored = [sample for sample in last.values() if sample.reward is None]  # its writer may have scored it
    if unscored and not is_open:
        await score(unscored)
        for sample in written:
            if sample.reward is None:
                take_outcome(sample, last[sample.index])
    return WrittenGroup(
        samples=[s for s in written if s.status is not SampleStatus.FAILED],  # a reward can drop some
        failed=[s for s in samples if s.status is SampleStatus.FAILED],
        aborted=[s for s in samples if s.status is SampleStatus.ABORTED],
        reasons=reasons,
        answered_at=answered_at,
    )
