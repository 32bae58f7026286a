from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from miles.errors import RewardError
from miles.rollout.rm_hub import remote_reward
from miles.types import Sample
from tests.unit.rollout.rm_hub.graders import make_reward

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_reward, "FIRST_WAIT_S", 0.01)


def score(handler: Handler, *responses: str, **settings: Any) -> list[Any]:
    """Rewards, or the errors, of these responses by a service with this handler."""

    async def run() -> list[Any]:
        app = web.Application()
        app.router.add_post("/score", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            with make_reward("remote_rm", rm_url=f"http://127.0.0.1:{port}/score", **settings) as reward:
                samples = [Sample(prompt="q", response=text, label="5") for text in responses]
                scored = await asyncio.gather(*(reward.score(s) for s in samples), return_exceptions=True)
                await reward.terms[0].grader.close()
                return list(scored)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


async def length(request: web.Request) -> web.Response:
    body = await request.json()
    assert body["prompt"] == "q" and body["label"] == "5"
    return web.json_response(len(body["response"]))


def test_the_reply_is_the_reward() -> None:
    assert score(length, "ab", "abc") == [2, 3]

    async def as_dict(request: web.Request) -> web.Response:
        return web.json_response({"score": 0.5, "style": "good"})

    assert score(as_dict, "x", reward_key="score") == [{"score": 0.5, "style": "good"}]


def test_what_may_pass_is_tried_again() -> None:
    seen: list[int] = []

    async def sometimes(request: web.Request) -> web.Response:
        seen.append(1)
        if len(seen) == 1:
            return web.Response(status=503)
        if len(seen) == 2:
            assert request.transport is not None
            request.transport.abort()
        if len(seen) == 3:
            await asyncio.sleep(1.0)
        return web.json_response(1)

    assert score(sometimes, "x", custom_rm_timeout=0.3) == [1]
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("status", "text", "num_tries", "expected"),
    [
        (500, "down", 3, "status 500: 'down' .tried 3 times"),
        (404, "no such model", 1, "status 404: 'no such model' .tried 1 times"),
        (200, "<html>", 1, "its reply is not JSON"),
        (200, '"good"', 1, "returned the str 'good'"),
        (200, "null", 1, "returned None"),
        (200, '{"a": 1}', 1, "say with --reward-key which of a is the reward"),
    ],
)
def test_failures_are_errors(status: int, text: str, num_tries: int, expected: str) -> None:
    seen: list[int] = []

    async def fail(request: web.Request) -> web.Response:
        seen.append(1)
        return web.Response(status=status, text=text)

    [error] = score(fail, "x", rm_retries=2)
    assert isinstance(error, RewardError)
    with pytest.raises(RewardError, match=expected):
        raise error
    assert len(seen) == num_tries


def test_no_more_requests_are_open_than_allowed() -> None:
    open_now, most = 0, 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        return web.json_response(1)

    assert score(slow, *"abcdefghijkl", rm_concurrency=3) == [1] * 12
    assert most == 3


def test_a_service_that_is_not_there_is_an_error() -> None:
    with make_reward("remote_rm", rm_url="http://127.0.0.1:9/", rm_retries=1) as reward:

        async def run() -> None:
            try:
                await reward.score(Sample(response="x"))
            finally:
                await reward.terms[0].grader.close()

        with pytest.raises(RewardError, match=r"--rm-url http://127.0.0.1:9/: ClientConnector.*tried 2 times"):
            asyncio.run(run())
