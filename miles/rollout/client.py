"""Awaitable answers on top of a `Generator`: one dispatcher for all requests in flight."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from miles.text.detokenize import Detokenizer
from miles.text.tokenizer import Tokenizer
from miles.types import FinishReason, GenerationRequest, GenerationResult, Generator, SamplingParams


class EngineClient:
    """Sends requests and hands each result to the coroutine that waits for it.

    Requests made in one turn of the event loop are submitted together, in the order they were made: a rollout whose
    answers are all started at once reaches the engine as one batch in a fixed order.
    """

    def __init__(self, generator: Generator, tokenizer: Tokenizer | None = None) -> None:
        self._generator = generator
        self.tokenizer = tokenizer
        self._ids = itertools.count()
        self._unsent: list[tuple[GenerationRequest, asyncio.Future[GenerationResult]]] = []
        self._waiting: dict[int, asyncio.Future[GenerationResult]] = {}
        self._dispatcher: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, noise_key: int
    ) -> GenerationResult:
        """Write one answer. When the waiting coroutine is cancelled, so is the request. Raises `EngineError` when the
        engine dies; a request that fails alone gets a result with finish reason `error`."""
        loop = asyncio.get_running_loop()
        request = GenerationRequest(next(self._ids), prompt_ids, sampling, noise_key)
        if not self._unsent:
            loop.call_soon(self._send)
        future: asyncio.Future[GenerationResult] = loop.create_future()
        self._unsent.append((request, future))
        try:
            return await future
        except asyncio.CancelledError:
            if request.request_id in self._waiting:  # one that has not been sent never will be
                self._generator.abort([request.request_id])
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

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Stop every request now, and each new one until the block ends. Their coroutines get what was written, with
        finish reason `abort`."""
        self._is_stopped = True
        try:
            if self._waiting:
                self._generator.abort()
            await self.drain()
            yield
        finally:
            self._is_stopped = False

    async def drain(self) -> None:
        """Wait until no request is in flight; aborted ones get their result from the engine too."""
        if self._dispatcher is not None:
            await asyncio.shield(self._dispatcher)

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        wanted = [(request, future) for request, future in unsent if not future.done()]
        if self._is_stopped:
            for request, future in wanted:
                future.set_result(GenerationResult(request.request_id, [], [], [], FinishReason.ABORT))
            return
        if not wanted:
            return
        self._waiting |= {request.request_id: future for request, future in wanted}
        self._generator.submit([request for request, _ in wanted])
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.get_running_loop().create_task(self._dispatch())

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
