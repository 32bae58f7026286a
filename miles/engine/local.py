"""The engine in this process: `EngineCore` in a thread of its own, behind the `Generator` seam.

Commands travel to the thread and are carried out between two steps, so the core is only ever touched by one thread.
Results travel back in batches: a caller that waits is woken once per step. When the thread dies, everyone who waits or
asks later gets an `EngineError` with the reason.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch

from miles.config.sections import EngineConfig
from miles.engine.core import EngineCore
from miles.errors import EngineError
from miles.model.decoder import Decoder
from miles.observe.gate import GATE
from miles.observe.log import get_logger
from miles.text.tokenizer import Tokenizer
from miles.types import GenerationRequest, GenerationResult

logger = get_logger(__name__)


class LocalEngine:
    """Implements `Generator` for a model in this process. `tokenizer` None: answers without text (benchmarks)."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer | None, config: EngineConfig, *, device: torch.device | str
    ) -> None:
        self._core = EngineCore(model, tokenizer=tokenizer, config=config, device=torch.device(device))
        self._changed = threading.Condition()  # guards everything below
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._results: list[GenerationResult] = []
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._paused = False
        self._failure: str | None = None
        half = f"{self._core.cache.num_bytes / 2 / 2**30:.2f} GB"
        logger.info(
            f"KV Cache is allocated. dtype: {self._core.cache.k_caches[0].dtype}, #tokens: {self.num_cache_tokens}, "
            f"K size: {half}, V size: {half}"
        )
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._core.version

    @property
    def num_cache_tokens(self) -> int:
        """Tokens the KV cache holds."""
        return self._core.num_cache_tokens

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        batch = list(requests)
        self._command(lambda: self._core.add(batch))

    def abort(self, request_ids: Iterable[int] | None = None) -> None:
        wanted = None if request_ids is None else list(request_ids)
        self._command(lambda: self._core.abort(wanted))

    def pause(self, mode: str = "retract") -> None:
        def stop() -> None:
            self._core.pause(mode)
            self._paused = True

        self._command(stop).result()

    def resume(self) -> None:
        def go() -> None:
            self._paused = False

        self._command(go).result()

    def release_memory(self, tags: Iterable[str]) -> dict[str, int]:
        freed = self._command(lambda: self._core.release_memory(tags)).result()
        shown = ", ".join(f"{tag} {num_bytes / 2**30:.2f} GB" for tag, num_bytes in freed.items())
        shared = "; the weights are the trainer's own tensors and stay" if "weights" in freed else ""
        logger.info(f"The engine has released {shown}{shared}")
        return freed

    def resume_memory(self, tags: Iterable[str]) -> None:
        self._command(lambda: self._core.resume_memory(tags)).result()

    def set_version(self, version: int) -> None:
        """Call after the weights have changed, before the next answer is asked for. Waits for the step in progress."""
        self._command(lambda: self._core.set_version(version)).result()

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is going on now."""
        return self._command(self._core.stats).result()

    async def results(self) -> list[GenerationResult]:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        sleeper = (loop, woken)
        while True:
            with self._changed:
                if self._results:
                    ready, self._results = self._results, []
                    return ready
                if self._failure is not None:
                    raise EngineError(self._failure)
                self._sleepers.append(sleeper)
            try:
                await woken.wait()
            finally:
                with self._changed:
                    if sleeper in self._sleepers:  # cancelled: its event loop may close before the next result
                        self._sleepers.remove(sleeper)
            woken.clear()

    def close(self) -> None:
        """End the thread after the step in progress. Requests without a result get none: `results` raises."""
        with self._changed:
            self._fail("the rollout engine is closed")
        self._thread.join()

    def _command(self, action: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        with self._changed:
            if self._failure is not None:
                raise EngineError(self._failure)
            self._commands.append((action, done))
            self._changed.notify_all()
        return done

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_something_to_do)
                    if self._failure is not None:
                        return
                    commands, self._commands = self._commands, deque()
                for action, done in commands:
                    self._carry_out(action, done)
                GATE.wait()
                self._deliver(self._core.take_ended() if self._paused else self._core.step())
        except Exception as error:  # fault boundary of the thread: everyone who waits gets the reason
            logger.exception("The rollout engine has died")
            with self._changed:
                self._fail(f"the rollout engine has died: {type(error).__name__}: {error}")

    def _has_something_to_do(self) -> bool:
        can_step = self._core.has_work and not self._paused and not self._core.is_released
        return bool(self._commands) or self._failure is not None or can_step

    def _carry_out(self, action: Callable[[], Any], done: Future[Any]) -> None:
        try:
            done.set_result(action())
        except EngineError as error:  # the caller's mistake
            done.set_exception(error)
        except Exception as error:
            done.set_exception(EngineError(f"the rollout engine has died: {type(error).__name__}: {error}"))
            raise

    def _deliver(self, ended: list[GenerationResult]) -> None:
        if ended:
            with self._changed:
                self._results.extend(ended)
                self._wake()

    def _fail(self, reason: str) -> None:
        """Refuse all work from now on. The first reason stays."""
        self._failure = self._failure or reason
        for _, done in self._commands:
            done.set_exception(EngineError(self._failure))
        self._commands.clear()
        self._wake()
        self._changed.notify_all()

    def _wake(self) -> None:
        for loop, woken in self._sleepers:
            loop.call_soon_threadsafe(woken.set)
        self._sleepers.clear()
