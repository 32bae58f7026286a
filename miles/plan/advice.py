"""Which flags make a run fit, which make it fast, and which models a machine can train."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from miles.config.flags import flatten, spelling, with_values
from miles.config.resolve import samples_per_rollout
from miles.plan.memory import MOMENT_BYTES, Job, estimate
from miles.plan.seconds import step_seconds
from miles.plan.shapes import SHAPES

Changes = dict[str, Any]

MIN_TOKENS, MAX_TOKENS = 256, 32_768


def changed(job: Job, changes: Changes) -> Job:
    return replace(job, config=with_values(job.config, changes))


def flags_text(changes: Changes) -> str:
    """As they are typed: `--adam-state 8bit --no-async-save`."""
    switches = {name: spelling(name) if value else f"--no-{spelling(name)[2:]}" for name, value in changes.items()}
    typed = {name: f"{spelling(name)} {value}" for name, value in changes.items() if not isinstance(value, bool)}
    return " ".join((switches | typed).values())


def _fewer_tokens(job: Job) -> Iterator[Changes]:
    tokens = job.limits.max_tokens
    while (tokens := tokens // 2) >= max(MIN_TOKENS, job.sample_len // 2):
        yield {"max_tokens_per_gpu": tokens}


def _smaller_cache(job: Job) -> Iterator[Changes]:
    memory = estimate(job)
    page = job.config.engine.engine_page_size
    least = -(-memory.min_cache_tokens // page) * page
    tokens = _cache_need(job) // page * page
    while least and tokens >= least:
        yield {"engine_max_total_tokens": tokens}
        tokens = max(tokens // 2 // page * page, least) if tokens > least else 0


def _cache_need(job: Job) -> int:
    """Tokens of the cache when all answers of a rollout are written at one time."""
    rollout = job.config.rollout
    answers = min(job.num_rows, samples_per_rollout(job.config))
    return max(rollout.rollout_batch_size * job.prompt_len + answers * job.answer_len, job.sample_len) + 4096


def _smaller_chunks(job: Job) -> Iterator[Changes]:
    yield from ({"log_probs_chunk_size": size} for size in (1024, 256) if size < job.limits.chunk_size)


def _recompute(job: Job) -> Iterator[Changes]:
    memory, num_layers = job.config.memory, job.spec.num_layers
    if memory.recompute_granularity == "selective" or memory.recompute_method is not None:
        return  # with either no number of layers goes
    if memory.recompute_num_layers is None:
        yield {"recompute_granularity": "selective"}
    yield from ({"recompute_num_layers": half * num_layers // 2} for half in (1, 2))


def _host_moments(job: Job) -> Iterator[Changes]:
    if not job.machine.shares_memory:
        yield {"optimizer_cpu_offload": True}


def _less_on_host(job: Job) -> Iterator[Changes]:
    for name in () if job.machine.shares_memory else ("async_save", "offload_train", "optimizer_cpu_offload"):
        if flatten(job.config)[name]:
            yield {name: False}


def _small_moments(job: Job) -> Iterator[Changes]:
    now = MOMENT_BYTES[job.config.optim.adam_state]
    yield from ({"adam_state": kind} for kind, size in MOMENT_BYTES.items() if size < now)


def _smaller_rank(job: Job) -> Iterator[Changes]:
    rank = job.config.lora.lora_rank
    while (rank := rank // 2) > 0:
        yield {"lora_rank": rank}


# From those that cost least to those that change the numbers.
KNOBS: tuple[Callable[[Job], Iterator[Changes]], ...] = (
    *(_smaller_cache, _fewer_tokens, _smaller_chunks),
    *(_recompute, _host_moments, _less_on_host, _small_moments, _smaller_rank),
)


def remedies(job: Job) -> list[Changes]:
    """Changes that each make the run fit: of one flag where that is enough, else of as few as it takes, in the order
    of their cost. Empty when nothing helps."""
    single = [next((changes for changes in knob(job) if _fits(job, changes)), None) for knob in KNOBS]
    if found := [changes for changes in single if changes is not None]:
        return found
    together: Changes = {}
    for knob in KNOBS:
        for changes in knob(changed(job, together)):
            together |= changes
            if _fits(job, together):
                return [_without_needless(job, together)]
    return []


def _fits(job: Job, changes: Changes) -> bool:
    return estimate(changed(job, changes)).fits


def _without_needless(job: Job, changes: Changes) -> Changes:
    for name in list(changes):
        fewer = {other: value for other, value in changes.items() if other != name}
        if _fits(job, fewer):
            changes = fewer
    return changes


def fastest(job: Job) -> Changes | None:
    """The setting with the shortest step among those that fit, {} when it is the one at hand; the numbers of Adam
    change only when they must. None when none is found."""
    budgets = [MAX_TOKENS >> n for n in range(8) if MAX_TOKENS >> n >= min(job.sample_len, MAX_TOKENS)]
    caches = [_cache_need(job) // part for part in (1, 2, 4, 8)] if job.has_engine else [None]
    best: Changes | None = None
    best_rank = (True, float("inf"))
    fixed, method = job.limits.activations.fixed, job.config.memory.recompute_method
    least: Changes = {"recompute_num_layers": 0} if fixed and fixed.num_layers and method != "uniform" else {}
    choices = itertools.product(
        budgets, caches, MOMENT_BYTES, (False,) if job.machine.shares_memory else (False, True),
        (least, *_recompute(job)),
    )  # fmt: skip
    names = ("max_tokens_per_gpu", "engine_max_total_tokens", "adam_state", "optimizer_cpu_offload")
    settings = [dict(zip(names, choice, strict=True)) | again for *choice, again in choices]
    for changes in [{}, *settings]:
        candidate = changed(job, changes)
        memory = estimate(candidate)
        if memory.fits:
            rank = (candidate.config.optim.adam_state != "float32", step_seconds(candidate, memory).step)
            if rank < best_rank:
                best, best_rank = changes, rank
    if best is None and (ways := remedies(job)):
        best = ways[0] | (fastest(changed(job, ways[0])) or {})
    now = flatten(job.config)
    return None if best is None else {name: value for name, value in best.items() if value != now[name]}


def largest_models(job: Job) -> tuple[str | None, str | None]:
    """The largest known shape that fits with these flags, and the largest that fits with the best ones."""
    by_size = sorted(SHAPES, key=lambda name: SHAPES[name].num_parameters, reverse=True)
    jobs = {name: replace(job, spec=SHAPES[name]) for name in by_size}
    as_set = next((name for name in by_size if estimate(jobs[name]).fits), None)
    return as_set, next((name for name in by_size if fastest(jobs[name]) is not None), None)
