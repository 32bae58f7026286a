"""Collects the scored groups of a rollout."""

from __future__ import annotations

import asyncio
import copy
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.config.sections import RunConfig
from miles.data.buffer import GroupBuffer
from miles.errors import EngineError, TrainError
from miles.observe.log import get_logger
from miles.rollout.admission import Admission, Outcome
from miles.rollout.client import EngineClient
from miles.rollout.group import WrittenGroup, write_group
from miles.rollout.hooks import RolloutHooks
from miles.rollout.noise import noise_key
from miles.rollout.reward_value import raw_accuracy, reward_value
from miles.rollout.rewards import RewardRunner
from miles.types import BEGUN, Sample, SampleStatus, SamplingParams

logger = get_logger(__name__)

MAX_DROPPED_BATCHES = 30  # dropping more than so many times what is wanted ends the run
MAX_DROP_RATE = 0.9  # that --over-sampling-batch-size auto plans for
DROP_RATE_STEP = 0.3  # weight of the last rollout in it; the first one says all there is to know
PRIOR_BATCHES = 2  # that the drop rate so far weighs, against the groups of this rollout
PARTIAL_SPARE = 1.5  # groups begun for one wanted, with --partial-rollout
SPARE_DEVIATIONS = 0.8  # and some that may be dropped: what is left over goes on in the next rollout
MAX_FAILED_SHARE = 0.1  # of the answers of a rollout; one failed answer is always tolerated
Progress = Callable[[int, int], None]  # groups finished, groups in all


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What writes and scores answers, in a rollout and in an evaluation. `max_context_len` counts tokens."""

    config: RunConfig
    client: EngineClient
    rewards: RewardRunner
    hooks: RolloutHooks
    max_context_len: int
    progress: Progress | None = None


@dataclass(slots=True)
class _Job:
    """A group that is being written. `untouched` is what it was, should nobody need it."""

    group: list[Sample]
    untouched: list[Sample] | None
    task: asyncio.Task[None] | None = None
    written: WrittenGroup | None = None
    drop_reason: str | None = None


class Producer:
    """Writes and scores rollouts. All requests of a batch reach the engine in one submit, in the order of the data.

    `counts` has the numbers of the last rollout that its samples do not tell.
    """

    def __init__(self, context: RolloutContext, source: GroupBuffer) -> None:
        self._config, self._client, self.source = context.config, context.client, source
        self._rewards, self._hooks = context.rewards, context.hooks
        self._max_context_len, self._progress = context.max_context_len, context.progress
        self._sampling = rollout_sampling(context.config)
        self._partial = context.config.rollout.partial_rollout
        self.counts: dict[str, float] = {}

    async def collect(self, rollout_id: int) -> list[list[Sample]]:
        """The groups of a rollout, in the order of the data, each with its scored answers.

        An answer that failed is counted and left out of its group. Raises `EngineError` when more than a tenth
        failed, `RewardError` when the reward did, `TrainError` when nothing is left to train on. When this coroutine
        is cancelled or fails, its requests are aborted and nothing of it is left running.
        """
        admission = Admission(self._config.rollout.rollout_batch_size, in_order=not self._partial)
        jobs: list[_Job] = []
        try:
            outcome = await self._until_known(rollout_id, admission, jobs)
            await self._stop(jobs)
        except BaseException:
            await cancel_all([job.task for job in jobs if job.task is not None], self._client)
            raise
        chosen = [jobs[number] for number in outcome.chosen]
        dropped = [jobs[number] for number in outcome.dropped]
        spare = [jobs[number] for number in outcome.surplus]
        # with partial rollout a group that ended while the rollout was stopped may have to be dropped too
        late = [job for job in spare if self._partial and job.drop_reason is not None]
        spare, dropped = [job for job in spare if job not in late], dropped + late
        check_failures(_written(chosen + dropped), what=f"rollout {rollout_id}")
        self.counts = self._count(jobs, chosen, dropped, spare)
        self._park(spare, rollout_id)
        self._note_pass_rates(chosen + dropped)
        if self._hooks.filters:
            self._note_drops(num_dropped=len(dropped), num_kept=len(chosen))
        self._rewards.end_batch([s for group in _written(chosen + dropped) for s in group.samples], training=True)
        kept = [group.samples for group in _written(chosen) if group.samples]
        if not kept:
            raise TrainError(f"rollout {rollout_id}: all answers were aborted; there is nothing to train on")
        if self._config.rollout.mask_offpolicy_in_partial_rollout:
            mask_old_tokens(kept, version=self._client.version)
        kept.sort(key=lambda group: group[0].group_index)
        await self._hooks.finish(kept, [group.samples for group in _written(chosen + dropped)], self.source)
        return kept

    async def _until_known(self, rollout_id: int, admission: Admission, jobs: list[_Job]) -> Outcome:
        """Submit groups and wait, until enough of them have passed the filter."""
        finished: asyncio.Queue[int] = asyncio.Queue()
        wanted = self._config.rollout.rollout_batch_size
        gives_back = self._hooks.filters and not self._partial
        while (outcome := admission.outcome()) is None:
            if count := self._batch_size(admission):
                if admission.num_dropped >= MAX_DROPPED_BATCHES * wanted:
                    raise TrainError(_all_dropped(jobs, rollout_id))
                check_failures(_written(jobs), what=f"rollout {rollout_id}", warn=False)
                groups = self.source.next(count)
                numbers = admission.submit(len(groups))
                jobs += [_Job(group, copy.deepcopy(group) if gives_back else None) for group in groups]
                for number in numbers:
                    jobs[number].task = asyncio.create_task(self._work(rollout_id, number, jobs[number], finished))
            number = await finished.get()
            task = jobs[number].task
            assert task is not None
            await task  # raises what it raised
            admission.finish(number, passes=jobs[number].drop_reason is None)
            if self._progress is not None:
                self._progress(admission.num_finished, admission.num_submitted)
        return outcome

    def _batch_size(self, admission: Admission) -> int:
        """Groups to submit now: as many as should make up for those that will be dropped, as soon as that is known.

        Waiting until all are decided would leave the engine with a few long answers, and again at the end of each
        further batch; beginning more to be sure would waste them.
        """
        wanted, missing = self._config.rollout.rollout_batch_size, admission.missing
        given = self._config.rollout.over_sampling_batch_size
        if given is not None:
            return given if missing > 0 else 0
        prior = PRIOR_BATCHES * wanted
        dropped = (self.source.drop_rate * prior + admission.num_dropped) / (prior + admission.num_finished)
        dropped = min(dropped, MAX_DROP_RATE)
        if self._partial:
            missing = math.ceil(max(0, missing) * PARTIAL_SPARE)
            deviation = math.sqrt(missing * dropped) / (1 - dropped)  # of the groups until so many have passed
            return math.ceil(missing / (1 - dropped) + SPARE_DEVIATIONS * deviation)
        expected = admission.num_passed + (1 - dropped) * (admission.num_submitted - admission.num_finished)
        return math.ceil(max(0.0, wanted - expected) / (1 - dropped) - 1e-9)

    async def _work(self, rollout_id: int, number: int, job: _Job, finished: asyncio.Queue[int]) -> None:
        try:
            job.written = await self._write(rollout_id, job.group)
            if self._hooks.filters and not job.written.aborted:
                samples = job.written.samples
                job.drop_reason = await self._hooks.drop_reason(samples) if samples else "no_answer"
        finally:
            finished.put_nowait(number)

    def _write(self, rollout_id: int, group: list[Sample]) -> Coroutine[Any, Any, WrittenGroup]:
        seed = self._config.data.rollout_seed
        member = {sample.index: position for position, sample in enumerate(group)}
        begun = group[0].metadata.get(BEGUN, rollout_id)  # an answer that goes on keeps its noise

        def write(sample: Sample) -> Coroutine[Any, Any, str | None]:
            key = noise_key(seed, begun, sample.group_index, member[sample.index])
            return self._hooks.write(
                self._client, group, sample, self._sampling, noise_key=key, max_context_len=self._max_context_len
            )

        return write_group(group, generate=write, score=self._rewards.score_group, goes_on=self._partial)

    async def _stop(self, jobs: list[_Job]) -> None:
        """End what is still running: the rollout has enough."""
        running = [job.task for job in jobs if job.task is not None and not job.task.done()]
        if not running:
            return
        async with self._client.stopped():
            await asyncio.sleep(0)  # the waiting coroutines take over what was written
            if not self._partial:
                for task in running:
                    task.cancel()
            await self._hooks.stop_agents()
            for ended in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended

    def _park(self, spare: list[_Job], rollout_id: int) -> None:
        """Give groups back that nobody needed: with what they have (partial rollout), or as they were."""
        if not self._partial:
            self.source.park(job.untouched for job in spare if job.untouched is not None)
            return
        for job in spare:
            for sample in job.group:
                sample.metadata.setdefault(BEGUN, rollout_id)
        self.source.park(job.group for job in spare)

    def _note_pass_rates(self, jobs: list[_Job]) -> None:
        key = self._config.reward.reward_key
        scored = [group.samples for group in _written(jobs) if group.samples]
        self.source.note((group[0], statistics.fmean(raw_accuracy(s, key) for s in group)) for group in scored)

    def _note_drops(self, *, num_dropped: int, num_kept: int) -> None:
        rate, step = self.source.drop_rate, DROP_RATE_STEP if self.source.drop_rate else 1.0
        self.source.drop_rate = rate + step * (num_dropped / (num_dropped + num_kept) - rate)

    def _count(self, jobs: list[_Job], chosen: list[_Job], dropped: list[_Job], spare: list[_Job]) -> dict[str, float]:
        written, cut_off = _written(chosen + dropped), [sample for job in spare for sample in job.group]
        aborted = [s for s in cut_off if s.status in (SampleStatus.ABORTED, SampleStatus.PENDING)]
        now = time.perf_counter()
        counts = {
            "perf/reward_time": now - max((group.answered_at for group in _written(chosen)), default=now),
            "rollout/num_failed": float(sum(len(group.failed) for group in written)),
            "rollout/num_aborted": float(sum(len(group.aborted) for group in written) + len(aborted)),
        }
        if not (self._hooks.filters or self._partial):
            return counts
        num_tokens = sum(sample.response_length for job in jobs for sample in job.group)
        num_wasted = 0 if self._partial else sum(sample.response_length for sample in cut_off)
        reasons = Counter(f"rollout/dynamic_filter/drop_{job.drop_reason}" for job in dropped)
        counts |= {name: float(count) for name, count in sorted(reasons.items())}
        counts["rollout/num_groups_submitted"] = float(len(jobs))
        counts["rollout/wasted_token_ratio"] = num_wasted / max(1, num_tokens)
        if self._partial:  # the groups that finish first say too little about the others
            begun = [group for group in _written(chosen) if any(BEGUN in s.metadata for s in group.samples)]
            counts["rollout/num_groups_continued"] = float(len(begun))
            return counts
        first = _written(jobs[: self._config.rollout.rollout_batch_size])
        key = self._config.reward.reward_key
        rewards = [reward_value(sample, key) for group in first for sample in group.samples]
        if rewards:
            counts["rollout/raw_reward_unfiltered"] = statistics.fmean(rewards)
        return counts


def mask_old_tokens(groups: Iterable[Iterable[Sample]], *, version: int) -> None:
    """Leave tokens of older weights out of the loss."""
    for sample in (sample for group in groups for sample in group):
        assert sample.loss_mask is not None and sample.weight_versions is not None
        pairs = zip(sample.loss_mask, sample.weight_versions, strict=True)
        sample.loss_mask = [mask if written == version else 0 for mask, written in pairs]


def _written(jobs: Iterable[_Job]) -> list[WrittenGroup]:
    return [job.written for job in jobs if job.written is not None]


def _all_dropped(jobs: list[_Job], rollout_id: int) -> str:
    reasons = Counter(job.drop_reason for job in jobs if job.drop_reason is not None)
    shown = ", ".join(f"{count} for {reason}" for reason, count in reasons.most_common(3))
    return (
        f"rollout {rollout_id}: --dynamic-sampling-filter-path dropped {sum(reasons.values())} groups ({shown}) before "
        "enough were left: the prompts are too hard or too easy for this model, or the reward is wrong; try the run "
        "without the filter and look at rollout/zero_std"
    )


def rollout_sampling(config: RunConfig) -> SamplingParams:
    rollout, algorithm = config.rollout, config.algorithm
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        min_p=rollout.rollout_min_p,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
        skip_special_tokens=rollout.rollout_skip_special_tokens,
        return_kept_tokens=True,  # sampling replay: where tokens were cut, the trainer scores over the same ones
        num_top_log_probs=algorithm.score_centering_top_k if algorithm.use_score_centering else 0,
    )


async def run_all_or_none(
    groups: list[Coroutine[Any, Any, WrittenGroup]], *, client: EngineClient, progress: Progress | None
) -> list[WrittenGroup]:
    """Run the groups together. When one raises, or the caller is cancelled, the others are cancelled, their requests
    aborted and the engine's last word on them awaited."""
    tasks = [asyncio.ensure_future(group) for group in groups]
    num_done = 0

    def report(_: asyncio.Future[WrittenGroup]) -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress(num_done, len(tasks))

    for task in tasks:
        task.add_done_callback(report)
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_all(tasks, client)
        raise


async def cancel_all(tasks: Sequence[asyncio.Future[Any]], client: EngineClient) -> None:
    """Cancel the tasks and wait for the engine's last word on their requests."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.drain()


def check_failures(groups: list[WrittenGroup], *, what: str, warn: bool = True) -> None:
    """Warn about failed answers, unless that comes later; raise `EngineError` when they are too many to go on."""
    reasons = [reason for group in groups for reason in group.reasons]
    num_answers = sum(len(group.samples) + len(group.failed) + len(group.aborted) for group in groups)
    if not reasons:
        return
    shown = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    message = f"{what}: {len(reasons)} of {num_answers} answers failed: {shown}"
    if len(reasons) > max(1, MAX_FAILED_SHARE * num_answers):
        raise EngineError(f"{message}. More than {MAX_FAILED_SHARE:.0%} is too many to go on")
    if warn:
        logger.warning(f"{message}; their groups go on without them")
