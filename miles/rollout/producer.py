"""Collects the scored groups of a rollout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from miles.config.sections import RunConfig
from miles.errors import EngineError, TrainError
from miles.observe.log import get_logger
from miles.rollout.client import EngineClient
from miles.rollout.generate_hub.single_turn import generate
from miles.rollout.group import WrittenGroup, write_group
from miles.rollout.noise import noise_key
from miles.rollout.rewards import RewardRunner
from miles.types import DataSource, GenerationResult, Sample, SamplingParams

logger = get_logger(__name__)

MAX_FAILED_SHARE = 0.1  # of the answers of a rollout; one failed answer is always tolerated
Progress = Callable[[int, int], None]  # groups finished, groups in all


class Producer:
    """Writes and scores rollouts. All requests of a rollout reach the engine in one submit, in the order of the data.

    `counts` has the `rollout/num_failed`, `rollout/num_aborted` and `perf/reward_time` of the last rollout.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        client: EngineClient,
        source: DataSource,
        rewards: RewardRunner,
        max_context_len: int,
        progress: Progress | None = None,
    ) -> None:
        self._config = config
        self._client = client
        self._source = source
        self._rewards = rewards
        self._max_context_len = max_context_len
        self._progress = progress
        self._sampling = rollout_sampling(config)
        self.counts: dict[str, float] = {}

    async def collect(self, rollout_id: int) -> list[list[Sample]]:
        """The groups of a rollout, in the order of the data, each with its scored answers.

        An answer that failed is counted and left out of its group. Raises `EngineError` when more than a tenth
        failed, `RewardError` when the reward did. When this coroutine is cancelled or fails, its requests are aborted
        and nothing of it is left running.
        """
        groups = self._source.next(self._config.rollout.rollout_batch_size)
        written = await run_all_or_none(
            [self._write(rollout_id, group) for group in groups], client=self._client, progress=self._progress
        )
        check_failures(written, what=f"rollout {rollout_id}")
        self.counts = {
            "perf/reward_time": time.perf_counter() - max(group.answered_at for group in written),
            "rollout/num_failed": float(sum(len(group.failed) for group in written)),
            "rollout/num_aborted": float(sum(len(group.aborted) for group in written)),
        }
        self._rewards.end_batch([sample for group in written for sample in group.samples], training=True)
        kept = [group.samples for group in written if group.samples]
        if not kept:
            raise TrainError(f"rollout {rollout_id}: all answers were aborted; there is nothing to train on")
        return kept

    def _write(self, rollout_id: int, group: list[Sample]) -> Coroutine[Any, Any, WrittenGroup]:
        first = group[0].index
        seed = self._config.data.rollout_seed

        def write(sample: Sample) -> Coroutine[Any, Any, GenerationResult]:
            key = noise_key(seed, rollout_id, sample.group_index, sample.index - first)
            return generate(self._client, sample, self._sampling, noise_key=key, max_context_len=self._max_context_len)

        return write_group(group, generate=write, score=self._rewards.score_group)


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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.drain()
        raise


def check_failures(groups: list[WrittenGroup], *, what: str) -> None:
    """Warn about failed answers; raise `EngineError` when they are too many to go on."""
    reasons = [reason for group in groups for reason in group.reasons]
    num_answers = sum(len(group.samples) + len(group.failed) + len(group.aborted) for group in groups)
    if not reasons:
        return
    shown = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    message = f"{what}: {len(reasons)} of {num_answers} answers failed: {shown}"
    if len(reasons) > max(1, MAX_FAILED_SHARE * num_answers):
        raise EngineError(f"{message}. More than {MAX_FAILED_SHARE:.0%} is too many to go on")
    logger.warning(f"{message}; their groups go on without them")
