from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.config.sections import EngineConfig
from miles.data.buffer import GroupBuffer
from miles.data.source import PromptSource
from miles.engine.local import LocalEngine
from miles.rollout.admission import Admission
from miles.rollout.client import EngineClient
from miles.rollout.generate_hub.single_turn import drop_stop_beginning, generate
from miles.rollout.producer import mask_old_tokens
from miles.types import BEGUN, FinishReason, GenerationRequest, GenerationResult, Sample, SampleStatus, SamplingParams
from tests.unit.engine.tiny import make_model
from tests.unit.rollout.fake_generator import FakeGenerator
from tests.unit.rollout.test_filters import by_prompt, make_producer


def cut_off(request: GenerationRequest) -> GenerationResult:
    return GenerationResult(request.request_id, [7], [-0.25], [3], FinishReason.ABORT)


def through_a_checkpoint(buffer: GroupBuffer) -> None:
    buffer.load_state_dict(json.loads(json.dumps(buffer.state_dict())))


def test_an_unfinished_group_goes_on_in_a_later_rollout_with_versions_and_log_probs_of_each_token() -> None:
    async def run() -> None:
        generator = FakeGenerator(by_prompt({}), hold=[0, 1], cut_off=cut_off)
        options: dict[str, Any] = {
            "partial_rollout": True,
            "mask_offpolicy_in_partial_rollout": True,
            "dynamic_sampling_filter_path": None,
        }
        producer, buffer = make_producer(generator, over_sampling_batch_size=3, **options)
        producer._client.text_of = lambda ids, sampling: "1.0"
        first = await producer.collect(0)
        assert [group[0].group_index for group in first] == [1, 2]  # the ones that finished first
        through_a_checkpoint(buffer)
        assert len(buffer) == 1
        generator.version = 4
        generator._hold = {10, 11}  # neither of the continued group nor of the next
        second = await producer.collect(1)
        assert [group[0].group_index for group in second] == [0, 3]
        sample = second[0][0]
        assert (sample.tokens, sample.response_length) == ([0, 7, 0, 1], 3)
        assert sample.rollout_log_probs == [-0.25, -0.5, -0.5] and sample.weight_versions == [3, 3, 3]
        assert sample.loss_mask == [0, 0, 0] and sample.metadata[BEGUN] == 0
        keys = [r.noise_key for r in generator.submits[0]]
        assert [r.noise_key for r in generator.submits[1]][:2] == keys[:2]
        assert list(generator.submits[1][0].prompt_ids) == [0, 7]
        assert producer.counts["rollout/num_groups_continued"] == 1.0

    asyncio.run(run())


def test_tokens_of_older_weights_are_masked() -> None:
    sample = Sample(response_length=3, loss_mask=[1, 1, 0], weight_versions=[3, 4, 4])
    mask_old_tokens([[sample]], version=4)
    assert sample.loss_mask == [0, 1, 0]


def test_the_beginning_of_a_stop_string_is_written_again() -> None:
    sample = Sample(tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 1, 1], rollout_log_probs=[-1.0, -2.0, -3.0])
    drop_stop_beginning(sample, ("a", "bc"))
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([1, 2], 1, [1])
    assert sample.rollout_log_probs == [-1.0] and sample.weight_versions is None


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), partial=st.booleans(), size=st.integers(1, 4))
def test_no_group_is_lost_and_none_is_trained_twice(seed: int, partial: bool, size: int) -> None:
    """Random order of finishing, random verdicts, random restarts from a checkpoint or from the one before."""
    prompts = [Sample(prompt=f"p{i}", tokens=[i]) for i in range(5)]
    buffer = GroupBuffer(PromptSource(prompts, n_samples_per_prompt=1, seed=1, shuffle=True))
    used: list[int] = []
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 5)):
        before = buffer.state_dict()
        trained, dropped = one_rollout(chance, buffer, wanted=size, partial=partial)
        if chance.random() < 0.5:  # the run ends before the step is saved, and starts again
            buffer.load_state_dict(json.loads(json.dumps(before)))
            continue
        used += trained + dropped
        if chance.random() < 0.5:
            through_a_checkpoint(buffer)
    parked = [group[0].group_index for group in buffer.next(len(buffer))]
    (following,) = buffer.next(1)
    assert sorted(used + parked) == list(range(following[0].group_index))
    if not partial:
        assert used == sorted(used)


def one_rollout(
    chance: random.Random, buffer: GroupBuffer, *, wanted: int, partial: bool
) -> tuple[list[int], list[int]]:
    admission, jobs, running = Admission(wanted, in_order=not partial), [], []
    while (outcome := admission.outcome()) is None:
        if admission.missing > 0:
            groups = buffer.next(admission.missing + chance.randint(0, 3))
            running += admission.submit(len(groups))
            jobs += groups
        number = running.pop(chance.randint(0, len(running) - 1))
        admission.finish(number, passes=chance.randint(0, 2) > 0)
    buffer.park(jobs[number] for number in outcome.surplus)
    trained, dropped = ([jobs[n][0].group_index for n in numbers] for numbers in (outcome.chosen, outcome.dropped))
    assert len(trained) == wanted
    return (trained, dropped) if partial else (sorted(trained + dropped), [])


def test_a_continued_answer_equals_the_one_written_at_one_go(tokenizer: Any) -> None:
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, return_kept_tokens=True, top_k=20)

    def fresh() -> Sample:
        return Sample(tokens=[5, 6, 7], index=0)

    async def run(client: EngineClient, sample: Sample, sampling: SamplingParams) -> Sample:
        await generate(client, sample, sampling, noise_key=99, max_context_len=64)
        return sample

    engine = LocalEngine(
        make_model(vocab_size=tokenizer.vocab_size), tokenizer, EngineConfig(engine_max_total_tokens=256), device="cpu"
    )
    try:
        whole = asyncio.run(run(EngineClient(engine, tokenizer), fresh(), sampling))
        begun = asyncio.run(run(EngineClient(engine, tokenizer), fresh(), with_length(sampling, 10)))
        begun.status = SampleStatus.ABORTED
        continued = asyncio.run(run(EngineClient(engine, tokenizer), begun, sampling))
    finally:
        engine.close()
    assert (continued.tokens, continued.response) == (whole.tokens, whole.response)
    assert continued.loss_mask == [1] * 24 and continued.status is SampleStatus.TRUNCATED
    torch.testing.assert_close(
        torch.tensor(continued.rollout_log_probs), torch.tensor(whole.rollout_log_probs), rtol=0, atol=2e-5
    )
    assert [k.tolist() for k in continued.kept_token_ids or []] == [k.tolist() for k in whole.kept_token_ids or []]


def with_length(sampling: SamplingParams, length: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=length, ignore_eos=True, return_kept_tokens=True, top_k=sampling.top_k)
