"""One step of the engine: schedule, run, commit. Read this first.

No thread and no clock here: whoever owns an `EngineCore` calls `step` until it has no work (`local.py` does so in a
thread). A step computes one token for every running answer and, beside them, chunks of new prompts; what is left
behind is in the table (`request.py`), the blocks (`blocks.py`) and the cache (`memory.py`).

Shapes: R rows that got a token in a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from miles.config.sections import EngineConfig
from miles.engine.batch import Plan
from miles.engine.blocks import BlockPool
from miles.engine.intake import Intake
from miles.engine.memory import KvCache, cache_tokens
from miles.engine.prefix import PrefixIndex
from miles.engine.request import LiveRequest, RequestTable, StopSets
from miles.engine.runner import Runner
from miles.engine.sampler import Drawn
from miles.engine.scheduler import Scheduler
from miles.errors import EngineError
from miles.model.decoder import Decoder
from miles.text.tokenizer import Tokenizer
from miles.types import FinishReason, GenerationRequest, GenerationResult

_DEFAULT_ROWS = {"cpu": 256, "cuda": 512}
_DEFAULT_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}


class EngineCore:
    """Requests in, results out. Raises `EngineError` when the cache cannot hold anything useful."""

    def __init__(
        self, model: Decoder, *, tokenizer: Tokenizer | None, config: EngineConfig, device: torch.device
    ) -> None:
        spec, dtype, page_size = model.spec, model.head_weight.dtype, config.engine_page_size
        num_rows = config.engine_max_running_requests or _DEFAULT_ROWS[device.type]
        self.num_cache_tokens = cache_tokens(spec, config, num_rows=num_rows, dtype=dtype, device=device)
        num_blocks = self.num_cache_tokens // page_size + 1
        self.table = RequestTable(num_rows=num_rows, page_size=page_size)
        self.scheduler = Scheduler(
            table=self.table,
            pool=BlockPool(num_blocks=num_blocks, index=PrefixIndex(num_blocks=num_blocks, page_size=page_size)),
            prefill_tokens=config.engine_chunked_prefill_size or _DEFAULT_PREFILL_TOKENS[device.type],
            share_prompts=not config.engine_disable_radix_cache,
        )
        self.cache = KvCache(spec, num_blocks=num_blocks, page_size=page_size, dtype=dtype, device=device)
        self.runner = Runner(model, table=self.table, cache=self.cache, device=device)
        eos_token_ids = frozenset(spec.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else frozenset())
        self.stop_sets = StopSets(vocab_size=spec.vocab_size, eos_token_ids=eos_token_ids)
        self.intake = Intake(spec, tokenizer=tokenizer, stop_sets=self.stop_sets, cache_tokens=self.num_cache_tokens)
        self.version = 0
        self.counts = dict.fromkeys(("steps", "computed_tokens", "drawn_tokens", "finished", "failed"), 0)
        self._ended: list[GenerationResult] = []

    @property
    def has_work(self) -> bool:
        return bool(self._ended or self.scheduler.waiting or self.table.occupied.any())

    def add(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests in this order; one that can never be served gets its result at once."""
        for request in requests:
            live, refusal = self.intake.accept(request)
            if refusal is None:
                self.scheduler.waiting.append(live)
            else:
                self._end(live, FinishReason.ERROR, error=refusal)

    def step(self) -> list[GenerationResult]:
        """Compute one token for every running request; the results that this (or an abort before) ended."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._commit(plan, self.runner.run(plan))
        return self.take_ended()

    def take_ended(self) -> list[GenerationResult]:
        """Results that no step has returned yet."""
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_ids: Iterable[int] | None = None) -> None:
        """End these requests, or all, with what they have written."""
        wanted = None if request_ids is None else set(request_ids)
        for live in self.scheduler.withdraw(wanted):
            self._end(live, FinishReason.ABORT)

    def pause(self, mode: str) -> None:
        """Prepare running requests for a stop of unknown length; see `Generator.pause`."""
        if mode == "abort":
            self.abort()
        elif mode == "retract":
            self.scheduler.retract_all()
        elif mode != "in_place":
            raise EngineError(f"pause mode {mode!r} is unknown: expected abort, retract or in_place")

    def set_version(self, version: int) -> None:
        """The weights have changed: name them, and never serve keys and values of the old ones to a new request."""
        self.version = version
        self.scheduler.set_version(version)

    def stats(self) -> dict[str, int]:
        """Counts since the start, and requests, rows and blocks now."""
        return self.counts | {
            "retractions": self.scheduler.num_retractions,
            "waiting": len(self.scheduler.waiting),
            "running": int(self.table.occupied.sum()),
            "free_blocks": self.scheduler.pool.num_free,
            "usable_blocks": self.scheduler.pool.num_usable,
        }

    def _commit(self, plan: Plan, drawn: Drawn) -> None:
        self.scheduler.advance(plan)
        table, rows_R, tokens_R, log_probs_R = self.table, plan.drawn_rows_R, drawn.tokens_R, drawn.log_probs_R
        self.counts["steps"] += 1
        self.counts["computed_tokens"] += int(plan.num_new_B.sum())
        places_R = np.arange(len(rows_R))  # in what was drawn
        if drawn.failures:
            self._fail(rows_R, drawn.failures)
            healthy_R = np.array([i not in drawn.failures for i in places_R.tolist()])
            places_R = places_R[healthy_R]
            rows_R, tokens_R, log_probs_R = rows_R[healthy_R], tokens_R[healthy_R], log_probs_R[healthy_R]
        table.append(rows_R, tokens_R, log_probs_R, self.version)
        self.counts["drawn_tokens"] += len(rows_R)
        stopped_R = self.stop_sets.hits(table.stop_set[rows_R], tokens_R)
        for i in np.flatnonzero(table.scanned[rows_R]).tolist():
            live = table.live[rows_R[i]]
            if live.kept is not None:
                live.kept.append(drawn.kept[int(places_R[i])])
            if live.top is not None:
                live.top.append(drawn.top[int(places_R[i])])
            if live.request.sampling.stop:
                stopped_R[i] |= live.detokenizer.append([int(tokens_R[i])])
        ended_R = stopped_R | (table.length[rows_R] >= table.limit[rows_R])
        for row, stopped in zip(rows_R[ended_R].tolist(), stopped_R[ended_R].tolist(), strict=True):
            self._end(self.scheduler.release(row), FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _fail(self, rows_R: np.ndarray, failures: dict[int, str]) -> None:
        for i, found in failures.items():
            place = int(self.table.length[rows_R[i]])
            live, unused = self.scheduler.release_damaged(int(rows_R[i]))
            self.cache.clear_blocks(unused)
            self._end(live, FinishReason.ERROR, error=f"{found} at token position {place}: the weights are damaged")

    def _end(self, live: LiveRequest, reason: FinishReason, *, error: str | None = None) -> None:
        self.counts["finished"] += 1
        self.counts["failed"] += reason is FinishReason.ERROR
        self._ended.append(live.result(reason, error=error))
