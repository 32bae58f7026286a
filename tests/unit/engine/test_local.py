"""The engine in its thread: waiting, pausing, stopping, dying."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles.config.sections import EngineConfig
from miles.engine.local import LocalEngine
from miles.errors import EngineError
from miles.text.tokenizer import load_tokenizer
from miles.types import FinishReason, GenerationResult, Generator
from tests.unit.engine.tiny import make_model, reference_answer, request
from tests.unit.text.tiny_tokenizer import write_tokenizer

MODEL = make_model()


@pytest.fixture
def start() -> Iterator[Callable[..., LocalEngine]]:
    engines = []

    def make(model: Any = MODEL, tokenizer: Any = None, **flags: Any) -> LocalEngine:
        config = EngineConfig(**{"engine_page_size": 4, "engine_max_total_tokens": 400, **flags})
        engines.append(LocalEngine(model, tokenizer, config, device="cpu"))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


async def collect(engine: Generator, count: int) -> dict[int, GenerationResult]:
    results: dict[int, GenerationResult] = {}
    while len(results) < count:
        for result in await asyncio.wait_for(engine.results(), 20):
            results[result.request_id] = result
    return results


def test_answers_are_those_of_the_core(start: Callable[..., LocalEngine]) -> None:
    engine = start()
    requests = [request(i, [2, 3, 4 + i % 3], 6) for i in range(12)]
    engine.submit(requests)
    results = asyncio.run(collect(engine, 12))
    for wanted in requests:
        assert results[wanted.request_id].output_ids == reference_answer(MODEL, wanted)[0]
    assert engine.stats()["finished"] == 12


def test_the_caller_is_woken_once_for_all_answers_of_a_step(start: Callable[..., LocalEngine]) -> None:
    engine = start()
    engine.pause("in_place")
    engine.submit([request(i, [2, 3], 3, ignore_eos=True) for i in range(30)])

    async def run() -> tuple[int, int]:
        loop, wakes = asyncio.get_running_loop(), 0
        call_soon_threadsafe = loop.call_soon_threadsafe

        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return call_soon_threadsafe(*args, **kwargs)

        loop.call_soon_threadsafe = count  # type: ignore[method-assign]
        waiting = asyncio.create_task(engine.results())
        await asyncio.sleep(0.05)
        engine.resume()
        return len(await waiting), wakes

    assert asyncio.run(run()) == (30, 1)


def test_pause_returns_between_steps_and_resume_goes_on(start: Callable[..., LocalEngine]) -> None:
    engine = start()
    requests = [request(i, [2 + i, 3], 80, ignore_eos=True) for i in range(3)]
    for mode in ("in_place", "retract"):
        engine.submit(requests)
        engine.pause(mode)
        steps = engine.stats()["steps"]
        time.sleep(0.05)
        assert engine.stats()["steps"] == steps
        engine.resume()
        results = asyncio.run(collect(engine, 3))
        for wanted in requests:
            assert results[wanted.request_id].output_ids == reference_answer(MODEL, wanted)[0]


def test_pause_abort_ends_everything_at_once(start: Callable[..., LocalEngine]) -> None:
    engine = start(engine_max_running_requests=2)
    engine.submit([request(i, [2 + i, 3], 80, ignore_eos=True) for i in range(5)])
    engine.pause("abort")
    results = asyncio.run(collect(engine, 5))  # also while it is paused
    assert {result.finish_reason for result in results.values()} == {FinishReason.ABORT}
    engine.submit([request(9, [2, 3], 1)])
    engine.resume()
    assert asyncio.run(collect(engine, 1))[9].finish_reason is not FinishReason.ABORT


def test_requests_wait_while_the_cache_is_released(start: Callable[..., LocalEngine]) -> None:
    engine = start()
    requests = [request(i, [2 + i, 3], 60, temperature=0.0, ignore_eos=True) for i in range(3)]
    engine.submit(requests[:2])
    freed = engine.release_memory(["kv_cache", "weights", "cuda_graph"])
    assert freed == {"kv_cache": engine._core.num_cache_tokens * 256 + 4 * 256, "weights": 0, "cuda_graph": 0}
    engine.submit(requests[2:])
    steps = engine.stats()["steps"]
    time.sleep(0.05)
    assert engine.stats()["steps"] == steps
    engine.resume_memory(iter(["kv_cache"]))
    results = asyncio.run(collect(engine, 3))
    for wanted in requests:
        assert results[wanted.request_id].output_ids == reference_answer(MODEL, wanted)[0]


def test_an_unknown_pause_mode_is_the_callers_error_only(start: Callable[..., LocalEngine]) -> None:
    engine = start()
    with pytest.raises(EngineError, match="expected abort, retract or in_place"):
        engine.pause("now")
    engine.submit([request(0, [2, 3], 2)])
    assert 0 in asyncio.run(collect(engine, 1))


def test_abort_of_some(start: Callable[..., LocalEngine]) -> None:
    engine = start()
    engine.pause("in_place")
    engine.submit([request(i, [2, 3], 5, ignore_eos=True) for i in range(4)])
    engine.abort([1, 3])
    engine.resume()
    results = asyncio.run(collect(engine, 4))
    assert [results[i].finish_reason for i in range(4)] == [
        FinishReason.LENGTH, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.ABORT
    ]  # fmt: skip


def test_versions(start: Callable[..., LocalEngine]) -> None:
    engine = start()
    assert engine.version == 0
    engine.set_version(7)
    assert engine.version == 7
    engine.submit([request(0, [2, 3], 3, ignore_eos=True)])
    assert asyncio.run(collect(engine, 1))[0].weight_versions == [7, 7, 7]


def test_everyone_who_waits_hears_why_the_engine_died(
    start: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field notes 4 and 7: no hang, and the last error is named."""
    engine = start(make_model())

    def broken(plan: Any) -> Any:
        raise MemoryError("no memory for 12 bytes")

    monkeypatch.setattr(engine._core.runner, "launch", broken)

    async def run() -> list[Any]:
        waiters = [asyncio.create_task(engine.results()) for _ in range(3)]
        await asyncio.sleep(0.02)
        engine.submit([request(0, [2, 3], 3)])
        return await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 20)

    errors = asyncio.run(run())
    assert [type(error) for error in errors] == [EngineError] * 3
    assert all("MemoryError: no memory for 12 bytes" in str(error) for error in errors)
    for ask in (lambda: engine.submit([request(1, [2], 1)]), engine.pause, engine.stats, lambda: engine.set_version(1)):
        with pytest.raises(EngineError, match="no memory for 12 bytes"):
            ask()
    with pytest.raises(EngineError, match="no memory for 12 bytes"):
        asyncio.run(engine.results())


def test_finished_answers_survive_the_death_of_the_engine(
    start: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(make_model())
    engine.submit([request(0, [2, 3], 2)])
    while engine.stats()["finished"] == 0:
        time.sleep(0.001)
    monkeypatch.setattr(engine._core.runner, "launch", lambda plan: 1 / 0)
    engine.submit([request(1, [2, 3], 2)])
    engine._thread.join(20)

    async def run() -> list[GenerationResult]:
        results = await engine.results()
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await engine.results()
        return results

    assert [result.request_id for result in asyncio.run(run())] == [0]


def test_close_ends_the_thread_and_frees_who_waits(start: Callable[..., LocalEngine]) -> None:
    engine = start()

    async def run() -> None:
        waiting = asyncio.create_task(engine.results())
        await asyncio.sleep(0.02)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(waiting, 20)

    asyncio.run(run())
    engine.close()
    assert not any(thread.name == "engine" and thread is engine._thread for thread in threading.enumerate())
    with pytest.raises(EngineError, match="closed"):
        engine.submit([request(0, [2], 1)])


def test_a_cancelled_wait_leaves_nothing_behind(start: Callable[..., LocalEngine]) -> None:
    engine = start()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.results(), 0.02)

    asyncio.run(give_up())
    engine.submit([request(0, [2, 3], 2)])
    assert 0 in asyncio.run(collect(engine, 1))


def test_text_and_stop_strings(start: Callable[..., LocalEngine], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", generation_eos=[0, 2]))
    model = make_model(vocab_size=tokenizer.vocab_size, eos_token_ids=(5,))
    engine = start(model, tokenizer)
    prompt = tokenizer.encode("the answer is")
    plain = request(0, prompt, 40, ignore_eos=True)
    engine.submit([plain])
    first = asyncio.run(collect(engine, 1))[0]
    assert first.output_ids == reference_answer(model, plain)[0]
    assert first.text == tokenizer.decode(first.output_ids)
    stop = tokenizer.decode(first.output_ids)[3:6]
    engine.submit(
        [
            request(1, prompt, 40, noise_key=0, ignore_eos=True, stop=(stop, "never")),
            request(2, prompt, 40, noise_key=0, ignore_eos=True, skip_special_tokens=False),
            *(request(i, prompt, 40) for i in range(3, 40)),
        ]
    )
    results = asyncio.run(collect(engine, 39))
    cut = results[1]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == first.text[: first.text.index(stop)]
    assert cut.output_ids == first.output_ids[: len(cut.output_ids)] and len(cut.output_ids) < 40
    assert tokenizer.decode(cut.output_ids[:-1]).find(stop) < 0 <= tokenizer.decode(cut.output_ids).find(stop)
    assert results[2].text == tokenizer.decode(first.output_ids, skip_special_tokens=False)
    # end tokens are those of the model's files (5), of generation_config (0, 2) and of the tokenizer (2)
    ends = {r.output_ids[-1] for r in results.values() if r.finish_reason is FinishReason.STOP and r is not cut}
    assert ends and ends <= {0, 2, 5}
    assert not any(set(result.output_ids[:-1]) & {0, 2, 5} for i, result in results.items() if i > 2)
