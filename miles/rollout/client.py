"""Awaitable answers on top of a `Generator`: one dispatcher for all requests in flight."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from miles.text.detokenize import Detokenizer
from miles.text.tokenizer import Tokenizer
from miles.types import GenerationRequest, GenerationResult, Generator, SamplingParams


class EngineClient:
    """Sends requests and hands each result to the coroutine that waits for it.

    Requests made in one turn of the event loop are submitted together, in the order they were made: a rollout whose
    answers are all started at once reaches the engine as one batch in a fixed order.
    """

    def __init__(self, generator: Generator, tokenizer: Tokenizer | None = None) -> None:
        self._generator = generator
        self.tokenizer = tokenizer
        self._ids = itertools.count()
        self._unsent: list[GenerationRequest] = []
        self._waiting: dict[int, asyncio.Future[GenerationResult]] = {}
        self._dispatcher: asyncio.Task[None] | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, noise_key: int
    ) -> GenerationResult:
        """Write one answer. When the waiting coroutine is cancelled, so is the request. Raises `EngineError` when the
        engine dies; a request that fails alone gets a result with finish reason `error`."""
        loop = asyncio.get_running_loop()
        request = GenerationRequest(next(self._ids), prompt_ids, sampling, noise_key)
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.append(request)
        future = self._waiting[request.request_id] = loop.create_future()
        try:
            return await future
        except asyncio.CancelledError:
            self._abort(request)
            raise

    @property
    def version(self) -> int:
        """Of the weights that the next token is drawn with."""
        return self._generator.version

    def text_of(self, ids: Sequence[int], sampling: SamplingParams) -> str:
        """The text of an answer, as the engine gives it for one that was written at one go."""
        assert self.tokenizer is not None, "an engine without a tokenizer gives no text"
        whole = Detokenizer(self.tokenizer, sampling.stop, skip_special_tokens=sampling.skip_special_tokens)
        whole.append(ids)
        return whole.text

    async def stop(self) -> None:
        """Stop every request now. Each one's coroutine gets what was written, with finish reason `abort`."""
        if self._waiting:
            self._generator.abort()
        await self.drain()

    async def drain(self) -> None:
        """Wait until no request is in flight; aborted ones get their result from the engine too."""
        if self._dispatcher is not None:
            await asyncio.shield(self._dispatcher)

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        for request in unsent:
            if self._waiting[request.request_id].cancelled():
                del self._waiting[request.request_id]
        requests = [request for request in unsent if request.request_id in self._waiting]
        if not requests:
            return
        self._generator.submit(requests)
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.get_running_loop().create_task(self._dispatch())

    def _abort(self, request: GenerationRequest) -> None:
        if request.request_id in self._waiting and request not in self._unsent:  # unsent ones are dropped when sending
            self._generator.abort([request.request_id])

    async def _dispatch(self) -> None:
        try:
            while self._waiting:
                for result in await self._generator.results():
                    future = self._waiting.pop(result.request_id)
                    if not future.done():
                        future.set_result(result)
        except Exception as error:  # nothing is caught here: every waiting coroutine raises it
            waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)
