from __future__ import annotations

import asyncio

import pytest

from miles.errors import EngineError
from miles.rollout.client import EngineClient
from miles.types import FinishReason, SamplingParams
from tests.unit.rollout.fake_generator import FakeGenerator, stopped

SAMPLING = SamplingParams(max_new_tokens=4)


def test_requests_of_one_turn_are_one_submit_in_order_and_each_caller_gets_its_answer() -> None:
    async def run() -> None:
        generator = FakeGenerator(lambda request: stopped(request, text=f"answer to {request.prompt_ids[0]}"))
        client = EngineClient(generator)
        tasks = [asyncio.create_task(client.generate([i], SAMPLING, noise_key=100 + i)) for i in range(5)]
        texts = [result.text for result in await asyncio.gather(*tasks)]
        assert texts == [f"answer to {i}" for i in range(5)]
        assert [[r.prompt_ids for r in submit] for submit in generator.submits] == [[[i] for i in range(5)]]
        assert [r.noise_key for r in generator.submits[0]] == [100, 101, 102, 103, 104]
        assert (await client.generate([9], SAMPLING, noise_key=0)).text == "answer to 9"
        assert len(asyncio.all_tasks()) == 1  # no dispatcher waits when nothing is in flight

    asyncio.run(run())


def test_a_cancelled_caller_aborts_its_request_only() -> None:
    async def run() -> None:
        generator = FakeGenerator(hold=[0, 1])
        client = EngineClient(generator)
        first, second = (asyncio.create_task(client.generate([i], SAMPLING, noise_key=0)) for i in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert generator.aborted == [0]
        generator.release(1)
        assert (await second).finish_reason is FinishReason.STOP
        await client.drain()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_request_cancelled_before_it_was_sent_never_reaches_the_engine() -> None:
    async def run() -> None:
        generator = FakeGenerator()
        client = EngineClient(generator)
        task = asyncio.create_task(client.generate([1], SAMPLING, noise_key=0))
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        assert generator.submits == [] and generator.aborted == []

    asyncio.run(run())


def test_a_dead_engine_fails_every_caller() -> None:
    async def run() -> None:
        generator = FakeGenerator(hold=[0, 1])
        client = EngineClient(generator)
        tasks = [asyncio.create_task(client.generate([i], SAMPLING, noise_key=0)) for i in range(2)]
        await asyncio.sleep(0.01)
        generator.die(EngineError("out of memory"))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["out of memory"] * 2
        assert all(isinstance(outcome, EngineError) for outcome in outcomes)

    asyncio.run(run())


def test_an_unexpected_error_of_the_engine_is_not_lost() -> None:
    async def run() -> None:
        generator = FakeGenerator(hold=[0])
        client = EngineClient(generator)
        task = asyncio.create_task(client.generate([0], SAMPLING, noise_key=0))
        await asyncio.sleep(0.01)
        generator.die(AssertionError("a mistake of ours"))
        with pytest.raises(AssertionError, match="a mistake of ours"):
            await task

    asyncio.run(run())


def test_while_requests_are_stopped_new_ones_end_at_once() -> None:
    async def run() -> None:
        generator = FakeGenerator(hold=[0])
        client = EngineClient(generator)
        running = asyncio.create_task(client.generate([1], SAMPLING, noise_key=0))
        await asyncio.sleep(0)
        just_asked = asyncio.create_task(client.generate([2], SAMPLING, noise_key=0))
        await asyncio.sleep(0)
        async with client.stopped():
            late = await client.generate([3], SAMPLING, noise_key=0)
        results = [await running, await just_asked, late]
        assert [result.finish_reason for result in results] == [FinishReason.ABORT] * 3
        assert [len(submit) for submit in generator.submits] == [1]
        assert (await client.generate([4], SAMPLING, noise_key=0)).finish_reason is FinishReason.STOP

    asyncio.run(run())
