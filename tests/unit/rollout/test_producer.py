from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles.config.flags import with_values
from miles.config.sections import DataConfig, RewardConfig, RolloutConfig, RunConfig
from miles.data.buffer import GroupBuffer
from miles.data.source import PromptSource
from miles.errors import EngineError, RewardError
from miles.rollout.client import EngineClient
from miles.rollout.hooks import RolloutHooks
from miles.rollout.noise import noise_key
from miles.rollout.producer import Producer, RolloutContext, rollout_sampling
from miles.rollout.rewards import RewardRunner
from miles.types import FinishReason, GenerationRequest, GenerationResult, Sample, SampleStatus
from tests.unit.rollout.fake_generator import FakeGenerator, stopped

CONFIG = RunConfig(
    data=DataConfig(rollout_seed=5),
    rollout=RolloutConfig(
        rollout_batch_size=3, n_samples_per_prompt=2, rollout_max_response_len=8, rollout_stop=("x",)
    ),
    reward=RewardConfig(rm_type="random"),
)


def make_producer(generator: FakeGenerator, **extra: Any) -> Producer:
    prompts = [Sample(prompt=f"p{i}", tokens=[i] * (i + 1), label=str(i)) for i in range(4)]
    source = GroupBuffer(PromptSource(prompts, n_samples_per_prompt=2, seed=5, shuffle=False))
    settings = {"rewards": RewardRunner(CONFIG), "hooks": RolloutHooks(CONFIG), "max_context_len": 10, **extra}
    return Producer(RolloutContext(CONFIG, EngineClient(generator), **settings), source)


def failed(request: GenerationRequest, reason: str = "cache too small") -> GenerationResult:
    return GenerationResult(request.request_id, [], [], [], FinishReason.ERROR, error=reason)


def test_a_rollout_is_one_submit_in_the_order_of_the_data_with_a_key_per_answer() -> None:
    generator = FakeGenerator()
    groups = asyncio.run(make_producer(generator).collect(7))
    (submit,) = generator.submits
    assert [list(r.prompt_ids) for r in submit] == [[0], [0], [1, 1], [1, 1], [2, 2, 2], [2, 2, 2]]
    assert [r.noise_key for r in submit] == [noise_key(5, 7, group, i) for group in range(3) for i in range(2)]
    assert submit[0].sampling.stop == ("x",)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]
    sample = groups[1][0]
    assert (sample.tokens, sample.response_length, sample.response) == ([1, 1, 0, 1], 2, "ok")
    assert (sample.loss_mask, sample.rollout_log_probs, sample.weight_versions) == ([1, 1], [-0.5] * 2, [3, 3])
    assert sample.status is SampleStatus.COMPLETED and sample.reward in (0, 1)


def test_training_asks_the_engine_for_what_the_trainer_needs() -> None:
    plain = rollout_sampling(CONFIG)
    assert plain.return_kept_tokens and plain.num_top_log_probs == 0
    centred = with_values(CONFIG, {"use_score_centering": True, "score_centering_top_k": 16, "rollout_top_p": 0.9})
    sampling = rollout_sampling(centred)
    assert sampling.return_kept_tokens and sampling.cuts_tokens and sampling.num_top_log_probs == 16


def test_an_answer_is_no_longer_than_the_context_allows() -> None:
    generator = FakeGenerator()
    asyncio.run(make_producer(generator, max_context_len=5).collect(0))
    assert [r.sampling.max_new_tokens for r in generator.submits[0]] == [4, 4, 3, 3, 2, 2]


def test_a_group_is_scored_while_others_are_still_written() -> None:
    async def run() -> None:
        generator = FakeGenerator(hold=[4])
        producer = make_producer(generator, progress=lambda done, total: seen.append((done, total)))
        collecting = asyncio.create_task(producer.collect(0))
        await asyncio.sleep(0.02)
        assert seen == [(1, 3), (2, 3)]
        generator.release(4)
        await collecting
        assert seen[-1] == (3, 3)

    seen: list[tuple[int, int]] = []
    asyncio.run(run())


def test_a_failed_answer_is_counted_and_its_group_goes_on_without_it(caplog: pytest.LogCaptureFixture) -> None:
    generator = FakeGenerator(lambda r: failed(r) if r.request_id == 3 else stopped(r))
    producer = make_producer(generator)
    groups = asyncio.run(producer.collect(0))
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2], [4, 5]]
    assert producer.counts.pop("perf/reward_time") >= 0.0
    assert producer.counts == {"rollout/num_failed": 1.0, "rollout/num_aborted": 0.0}
    assert "rollout 0: 1 of 6 answers failed: sample 3: cache too small" in caplog.text


def test_many_failed_answers_end_the_run_with_their_reasons() -> None:
    generator = FakeGenerator(lambda r: failed(r, f"reason {r.request_id}") if r.request_id < 5 else stopped(r))
    with pytest.raises(EngineError) as caught:
        asyncio.run(make_producer(generator).collect(0))
    assert "5 of 6 answers failed: sample 0: reason 0; sample 1: reason 1; sample 2: reason 2; and 2 more" in str(
        caught.value
    )


def test_a_cancelled_rollout_aborts_its_requests_and_leaves_nothing_running() -> None:
    async def run() -> None:
        generator = FakeGenerator(hold=[1, 4])
        collecting = asyncio.create_task(make_producer(generator).collect(0))
        await asyncio.sleep(0.02)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        assert sorted(generator.aborted) == [1, 4]
        assert generator.in_flight == {}
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_failing_reward_aborts_the_rest_of_the_rollout() -> None:
    class Rewards(RewardRunner):
        async def score_group(self, samples: list[Sample]) -> None:
            raise RewardError("no number")

    async def run() -> None:
        generator = FakeGenerator(hold=[5])
        with pytest.raises(RewardError, match="no number"):
            await make_producer(generator, rewards=Rewards(CONFIG)).collect(0)
        assert generator.aborted == [5]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_dead_engine_ends_the_rollout() -> None:
    async def run() -> None:
        generator = FakeGenerator(hold=range(6))
        collecting = asyncio.create_task(make_producer(generator).collect(0))
        await asyncio.sleep(0.01)
        generator.die(EngineError("the engine thread has died"))
        with pytest.raises(EngineError, match="the engine thread has died"):
            await collecting
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
