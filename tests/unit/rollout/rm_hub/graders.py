"""Built-in rewards without a run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from miles.config.sections import RewardConfig, RunConfig
from miles.rollout.reward_errors import ErrorWatch
from miles.rollout.rm_hub.builtin import BuiltinReward
from miles.rollout.rm_hub.grader import Pools, Tools
from miles.types import Sample


@contextmanager
def make_reward(spec: str, **settings: Any) -> Iterator[BuiltinReward]:
    pools = Pools(2)
    errors = ErrorWatch("--rm-type")
    errors.num_answers = 1000
    try:
        yield BuiltinReward(spec, Tools(RunConfig(reward=RewardConfig(rm_type=spec, **settings)), pools, errors))
    finally:
        pools.close()


def grade(reward: BuiltinReward, pairs: list[tuple[Any, str]], metadata: dict[str, Any] | None = None) -> list[Any]:
    """Rewards of pairs (label, response)."""
    return score(reward, [Sample(label=label, response=text, metadata=metadata or {}) for label, text in pairs])


def score(reward: BuiltinReward, samples: list[Sample]) -> list[Any]:
    async def run() -> list[Any]:
        try:
            return list(await asyncio.gather(*(reward.score(sample) for sample in samples)))
        finally:
            for term in reward.terms:
                await term.grader.close()

    return asyncio.run(run())
