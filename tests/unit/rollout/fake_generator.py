"""A rollout engine for tests: answers are a function of the request, and the test decides when they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from miles.types import FinishReason, GenerationRequest, GenerationResult

Answer = Callable[[GenerationRequest], GenerationResult]


def stopped(request: GenerationRequest, text: str = "ok", *, num_tokens: int = 2) -> GenerationResult:
    return GenerationResult(
        request_id=request.request_id,
        output_ids=list(range(num_tokens)),
        log_probs=[-0.5] * num_tokens,
        weight_versions=[3] * num_tokens,
        finish_reason=FinishReason.STOP,
        text=text,
        cached_tokens=1,
    )


class FakeGenerator:
    """Implements `Generator`. `hold` requests (by position in the run) are answered only after `release`."""

    def __init__(self, answer: Answer = stopped, *, hold: Iterable[int] = (), cut_off: Answer | None = None) -> None:
        self.version = 3
        self.submits: list[list[GenerationRequest]] = []
        self.aborted: list[int] = []
        self.in_flight: dict[int, GenerationRequest] = {}
        self.died: Exception | None = None
        self._answer = answer
        self._cut_off = cut_off or (lambda r: GenerationResult(r.request_id, [], [], [], FinishReason.ABORT))
        self._hold = set(hold)
        self._ready: list[GenerationResult] = []
        self._changed = asyncio.Event()

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        self.submits.append(list(requests))
        for request in self.submits[-1]:
            self.in_flight[request.request_id] = request
            if request.request_id not in self._hold:
                self._finish(request, self._answer(request))

    async def results(self) -> list[GenerationResult]:
        while not self._ready:
            if self.died is not None:
                raise self.died
            self._changed.clear()
            await self._changed.wait()
        ready, self._ready = self._ready, []
        return ready

    def release(self, request_id: int) -> None:
        self._hold.discard(request_id)
        self._finish(self.in_flight[request_id], self._answer(self.in_flight[request_id]))

    def die(self, error: Exception) -> None:
        self.died = error
        self._changed.set()

    def abort(self, request_ids: Iterable[int] | None = None) -> None:
        for request_id in list(self.in_flight if request_ids is None else request_ids):
            self.aborted.append(request_id)
            if request_id in self.in_flight:
                request = self.in_flight[request_id]
                self._finish(request, self._cut_off(request))

    def pause(self, mode: str = "retract") -> None: ...

    def resume(self) -> None: ...

    def release_memory(self, tags: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(tags, 0)

    def resume_memory(self, tags: Iterable[str]) -> None: ...

    def close(self) -> None: ...

    def _finish(self, request: GenerationRequest, result: GenerationResult) -> None:
        del self.in_flight[request.request_id]
        self._ready.append(result)
        self._changed.set()
