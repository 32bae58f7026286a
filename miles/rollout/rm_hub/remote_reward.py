"""`remote_rm`: a service grades. It gets a POST with `prompt`, `response` and `label`, and answers with the reward."""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import aiohttp

from miles.errors import RewardError
from miles.rollout.rm_hub.grader import Grader, Reward
from miles.types import Sample

FIRST_WAIT_S = 0.5  # before the second try; doubled for each further one
MAX_WAIT_S = 30.0
_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}


class RemoteGrader(Grader):
    """The reply is JSON: a number, or an object for `--reward-key`.

    A request that times out, cannot connect or gets a status that may pass is tried again `--rm-retries` times, each
    time after twice as long a pause, or after what `Retry-After` asks for. At most `--rm-concurrency` are open.
    """

    place = "the whole response"

    _loop: asyncio.AbstractEventLoop | None = None
    _session: aiohttp.ClientSession
    _slots: asyncio.Semaphore

    def find(self, response: str) -> str | None:
        return response

    def label_problem(self, label: Any, metadata: dict[str, Any]) -> str | None:
        return (
            "remote_rm needs --rm-url, the address of the service" if self.tools.config.reward.rm_url is None else None
        )

    async def compare(self, answer: str, sample: Sample) -> Reward:
        settings = self.tools.config.reward
        assert settings.rm_url is not None, "label_problem and the rules of the config ask for --rm-url"
        self._open()
        body = {"prompt": sample.prompt, "response": answer, "label": sample.label}
        wait_s, problem = FIRST_WAIT_S, ""
        for attempt in range(settings.rm_retries + 1):
            if attempt:
                await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))  # so that many do not come back at once
                wait_s = min(2 * wait_s, MAX_WAIT_S)
            try:
                async with self._slots, self._session.post(os.path.expandvars(settings.rm_url), json=body) as reply:
                    text = await reply.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if reply.status == 200:
                return _reward_in(text, settings.rm_url)
            problem = f"status {reply.status}: {text[:200]!r}"
            if reply.status not in _TRY_AGAIN:
                break
            wait_s = max(wait_s, min(_retry_after(reply), MAX_WAIT_S))
        raise RewardError(f"--rm-url {settings.rm_url}: {problem} (tried {attempt + 1} times)")

    def _open(self) -> None:
        """Sessions belong to an event loop: the lab, the probe and a run have one each."""
        if self._loop is not asyncio.get_running_loop():
            settings = self.tools.config.reward
            self._loop = asyncio.get_running_loop()
            self._slots = asyncio.Semaphore(settings.rm_concurrency)
            timeout = aiohttp.ClientTimeout(total=settings.custom_rm_timeout)
            connector = aiohttp.TCPConnector(limit=settings.rm_concurrency)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)

    async def close(self) -> None:
        if self._loop is asyncio.get_running_loop():
            await self._session.close()
            self._loop = None


def _retry_after(reply: aiohttp.ClientResponse) -> float:
    seconds = reply.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdigit() else 0.0


def _reward_in(text: str, url: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RewardError(f"--rm-url {url}: its reply is not JSON ({error}): {text[:200]!r}") from error
