from __future__ import annotations

import asyncio

from miles.rollout.group import write_group
from miles.types import RAW_ACCURACY, Sample, SampleStatus


def test_field_note_24_an_answer_of_several_rows_has_the_reward_of_its_last() -> None:
    group = [Sample(index=0, response="first"), Sample(index=1, response="other")]
    scored: list[str] = []

    async def generate(sample: Sample) -> None:
        sample.status = SampleStatus.COMPLETED
        if sample.index == 0:
            group.append(Sample(index=0, response="last", status=SampleStatus.COMPLETED))

    async def score(samples: list[Sample]) -> None:
        for sample in samples:
            scored.append(sample.response)
            sample.reward = float(len(sample.response))
            sample.metadata[RAW_ACCURACY] = 1.0
            if sample.response == "other":
                sample.reward, sample.status = None, SampleStatus.FAILED

    written = asyncio.run(write_group(group, generate=generate, score=score))
    assert sorted(scored) == ["last", "other"]
    assert [(s.response, s.reward, s.metadata[RAW_ACCURACY]) for s in written.samples] == [
        ("first", 4.0, 1.0),
        ("last", 4.0, 1.0),
    ]
    assert [s.response for s in written.failed] == ["other"]
