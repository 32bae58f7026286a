"""One step of the engine: schedule, launch, commit. Read this first.

No thread and no clock here: whoever owns an `EngineCore` calls `step` until it has no work (`local.py` does so in a
thread). A step computes one token for every running answer and, beside them, chunks of new prompts; what is left
behind is in the table (`request.py`), the blocks (`blocks.py`) and the cache (`memory.py`).

On a GPU a step is committed after the next one has been launched, so that the host's work takes no time of its own.
An answer whose end shows only then has one token too many on its way; it is dropped.

Shapes: R rows that got a token in a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from miles.config.sections import EngineConfig
from miles.engine.batch import Plan
from miles.engine.blocks import BlockPool
from miles.engine.damage import find_damage
from miles.engine.intake import Intake
from miles.engine.memory import KvCache, cache_tokens, check_page_size
from miles.engine.prefix import PrefixIndex
from miles.engine.request import LiveRequest, RequestTable, StopSets
from miles.engine.runner import Runner
from miles.engine.sampler import Drawing
from miles.engine.scheduler import Scheduler
from miles.errors import EngineError
from miles.model.decoder import Decoder
from miles.model.invariance import require_invariance
from miles.ops.kernels import HEAD_SIZES
from miles.plan.memory import DEFAULT_PREFILL_TOKENS, DEFAULT_ROWS
from miles.text.tokenizer import Tokenizer
from miles.types import FinishReason, GenerationRequest, GenerationResult

_MAX_EXAMINED = 8  # failed rows of a step that are computed again to find the layer
_MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that has been launched: the places its tokens will take, and the requests that the rows had then."""

    plan: Plan
    places_R: np.ndarray
    orders_R: np.ndarray
    drawing: Drawing


class EngineCore:
    """Requests in, results out. Raises `ConfigError` when the cache cannot hold anything useful."""

    def __init__(
        self,
        model: Decoder,
        *,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        device: torch.device,
        overlaps: bool | None = None,
    ) -> None:
        spec, dtype, page_size = model.spec, model.head_weight.dtype, config.engine_page_size
        check_page_size(page_size, device=device)
        if config.engine_enable_deterministic_inference:
            require_invariance(model, flag="--engine-enable-deterministic-inference")
        num_rows = config.engine_max_running_requests or DEFAULT_ROWS[device.type]
        self.num_cache_tokens = cache_tokens(spec, config, num_rows=num_rows, dtype=dtype, device=device)
        num_blocks = self.num_cache_tokens // page_size + 1
        has_kernels = device.type == "cuda" and spec.head_dim in HEAD_SIZES
        self.table = RequestTable(num_rows=num_rows, page_size=page_size)
        self.scheduler = Scheduler(
            table=self.table,
            pool=BlockPool(num_blocks=num_blocks, index=PrefixIndex(num_blocks=num_blocks, page_size=page_size)),
            prefill_tokens=config.engine_chunked_prefill_size or DEFAULT_PREFILL_TOKENS[device.type],
            share_prompts=not config.engine_disable_radix_cache,
            longest_first=has_kernels,
        )
        self.cache = KvCache(spec, num_blocks=num_blocks, page_size=page_size, dtype=dtype, device=device)
        self.runner = Runner(
            model,
            table=self.table,
            cache=self.cache,
            device=device,
            overlaps=has_kernels if overlaps is None else overlaps,
            graphs=has_kernels and not config.engine_disable_cuda_graph,
            invariant=config.engine_enable_deterministic_inference,
        )
        eos_token_ids = frozenset(spec.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else frozenset())
        self.stop_sets = StopSets(vocab_size=spec.vocab_size, eos_token_ids=eos_token_ids)
        self.intake = Intake(spec, tokenizer=tokenizer, stop_sets=self.stop_sets, cache_tokens=self.num_cache_tokens)
        self._model = model
        self.version = 0
        self.counts = dict.fromkeys(("steps", "computed_tokens", "drawn_tokens", "finished", "failed"), 0)
        self._cache_address = self.cache.address
        self._ended: list[GenerationResult] = []
        self._flight: Flight | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._ended or self._flight or self.scheduler.waiting or self.table.occupied.any())

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
        if self._flight is not None and self.scheduler.must_retract:
            self._land()
        plan = None if self.is_released else self.scheduler.schedule()
        flight = None if plan is None else self._launch(plan)
        self._land()
        self._flight = flight
        if flight is not None and not flight.drawing.is_late:
            self._land()
        return self.take_ended()

    def take_ended(self) -> list[GenerationResult]:
        """Results that no step has returned yet."""
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_ids: Iterable[int] | None = None) -> None:
        """End these requests, or all, with what they have written."""
        self._land()
        wanted = None if request_ids is None else set(request_ids)
        for live in self.scheduler.withdraw(wanted):
            self._end(live, FinishReason.ABORT)

    def pause(self, mode: str) -> None:
        """Prepare running requests for a stop of unknown length; see `Generator.pause`."""
        self._land()
        if mode == "abort":
            self.abort()
        elif mode == "retract":
            self.scheduler.retract_all()
        elif mode != "in_place":
            raise EngineError(f"pause mode {mode!r} is unknown: expected abort, retract or in_place")

    def release_memory(self, tags: Iterable[str]) -> dict[str, int]:
        """Retract what runs and give memory back; see `Generator.release_memory`."""
        wanted = _known_tags(tags)
        self.pause("retract")
        freed = dict.fromkeys(wanted, 0)  # `weights`: the trainer's own tensors, which stay where they are
        if "cuda_graph" in wanted:
            freed["cuda_graph"] = self.runner.drop_graphs()
        if "kv_cache" in wanted:
            self.scheduler.set_version(self.version)  # forgets what the cache held
            freed["kv_cache"] = self.cache.release()
        return freed

    def resume_memory(self, tags: Iterable[str]) -> None:
        """Take released memory back. Graphs know the addresses of the cache: when it moves they are made again."""
        if "kv_cache" in _known_tags(tags) and self.is_released:
            self.cache.allocate()
            if self.cache.address != self._cache_address:
                self._cache_address = self.cache.address
                self.runner.drop_graphs()

    @property
    def is_released(self) -> bool:
        """Whether the cache is away: requests wait until it is back."""
        return self.cache.num_bytes == 0

    def set_version(self, version: int) -> None:
        """The weights have changed: name them, and never serve keys and values of the old ones to a new request."""
        self._land()
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

    def _launch(self, plan: Plan) -> Flight:
        rows_R = plan.drawn_rows_R
        flight = Flight(plan, self.table.length[rows_R], self.table.order[rows_R], self.runner.launch(plan))
        self.scheduler.advance(plan)
        self.table.reserve(rows_R)
        self.counts["steps"] += 1
        self.counts["computed_tokens"] += int(plan.num_new_B.sum())
        return flight

    def _land(self) -> None:
        """Wait for the step that is on its way, if there is one, and commit it."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._commit(flight)

    def _commit(self, flight: Flight) -> None:
        table, rows_R, drawn = self.table, flight.plan.drawn_rows_R, flight.drawing.wait()
        lives_R = table.occupied[rows_R] & (table.order[rows_R] == flight.orders_R)
        for number, (i, found) in enumerate(drawn.failures.items()):
            if lives_R[i]:
                self._fail(int(rows_R[i]), int(flight.places_R[i]), found, looks=number < _MAX_EXAMINED)
                lives_R[i] = False
        picked_R = np.flatnonzero(lives_R)  # of what was drawn
        rows_R, places_R, tokens_R = rows_R[picked_R], flight.places_R[picked_R], drawn.tokens_R[picked_R]
        table.fill(rows_R, places_R, tokens_R, drawn.log_probs_R[picked_R], self.version)
        self.counts["drawn_tokens"] += len(rows_R)
        stopped_R = self.stop_sets.hits(table.stop_set[rows_R], tokens_R)
        for i in np.flatnonzero(table.scanned[rows_R]).tolist():
            live = table.live[rows_R[i]]
            if live.kept is not None:
                live.kept.append(drawn.kept[int(picked_R[i])])
            if live.top is not None:
                live.top.append(drawn.top[int(picked_R[i])])
            if live.request.sampling.stop:
                stopped_R[i] |= live.detokenizer.append([int(tokens_R[i])])
        for i in np.flatnonzero(stopped_R | (places_R + 1 >= table.limit[rows_R])).tolist():
            table.length[rows_R[i]] = places_R[i] + 1  # what is on its way is dropped
            reason = FinishReason.STOP if stopped_R[i] else FinishReason.LENGTH
            self._end(self.scheduler.release(int(rows_R[i])), reason)

    def _fail(self, row: int, place: int, found: str, *, looks: bool) -> None:
        self.table.length[row] = place
        cause = "others of this step say why"
        if looks:
            cause = find_damage(self._model, self.table.tokens[row, :place])
        live, unused = self.scheduler.release_damaged(row)
        self.cache.clear_blocks(unused)
        self._end(live, FinishReason.ERROR, error=f"{found} at token position {place}; {cause}")

    def _end(self, live: LiveRequest, reason: FinishReason, *, error: str | None = None) -> None:
        self.stop_sets.give_back(live.stop_set)
        self.counts["finished"] += 1
        self.counts["failed"] += reason is FinishReason.ERROR
        self._ended.append(live.result(reason, error=error))


def _known_tags(tags: Iterable[str]) -> tuple[str, ...]:
    tags = tuple(tags)
    if unknown := [tag for tag in tags if tag not in _MEMORY_TAGS]:
        raise EngineError(f"memory tag {unknown[0]!r} is unknown: expected {', '.join(_MEMORY_TAGS)}")
    return tags
