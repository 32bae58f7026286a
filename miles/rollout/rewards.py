"""The reward of a run, whatever kind it is: started, probed, scoring groups, counted, closed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from miles.config.sections import RunConfig
from miles.errors import ConfigError, RewardError
from miles.observe.log import get_logger
from miles.rollout.custom_reward import CustomReward, Scored
from miles.rollout.reward_errors import ErrorWatch
from miles.rollout.rm_hub.builtin import BuiltinReward, number_of
from miles.rollout.rm_hub.grader import Pools, Tools
from miles.rollout.rm_hub.pool import DIED, TIMEOUT
from miles.rollout.signals import RewardSignals, show_samples
from miles.types import WATCH, Sample, SampleStatus

logger = get_logger(__name__)


class RewardRunner:
    """Scores samples with the custom reward, or else the built-in one: that of the sample's `metadata["rm_type"]`,
    else `--rm-type`.

    Order of use: construct (loads and checks the hook, `PluginError`; unknown type, `ConfigError`), `start` before
    torch is imported where that is possible, `check_label` while data is loaded, `probe`, then `score_group` for each
    group and `end_batch` after each rollout, `close`.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._settings = config.reward
        self._counted: dict[str, int] = {}
        self._warned = False
        self._signals = RewardSignals(config.reward.reward_key)
        self._custom = CustomReward(config) if config.reward.custom_rm_path is not None else None
        source = "--custom-rm-path" if self._custom is not None else "--rm-type"
        self._errors = ErrorWatch(source)
        self._tools = Tools(config, Pools(config.reward.rm_num_workers), self._errors)
        self._builtin: dict[str, BuiltinReward] = {}
        self._watching = self._load(config.reward.rm_watch_type) if config.reward.rm_watch_type is not None else None
        if self._custom is None:
            assert config.reward.rm_type is not None, "the rules of the config ask for a reward"
            self._check_reward_key(self._load(config.reward.rm_type))

    def _load(self, spec: str) -> BuiltinReward:
        if spec not in self._builtin:
            self._builtin[spec] = BuiltinReward(spec, self._tools)
        return self._builtin[spec]

    def _check_reward_key(self, reward: BuiltinReward) -> None:
        key = self._settings.reward_key
        if key is None or reward.is_open or key in reward.fields:
            return
        fields = f"a dict with {', '.join(reward.fields)}" if reward.fields else "a number"
        raise ConfigError(f"--reward-key {key}: --rm-type {reward.spec} gives {fields}")

    def start(self) -> None:
        """Start the worker processes, if there are any. Returns at once."""
        for reward in self._builtin.values():
            for term in reward.terms:
                term.grader.start()

    @property
    def check_label(self) -> Callable[[Any, dict[str, Any]], str | None] | None:
        """For `load_prompts`: what is wrong with a label, given its metadata. None when any label will do."""
        return self._label_problem if self._builtin else None

    def _label_problem(self, label: Any, metadata: dict[str, Any]) -> str | None:
        try:
            rewards = [] if self._custom is not None else [self.builtin_for(metadata)]
        except ConfigError as error:
            return f"metadata rm_type: {error}"
        rewards += [self._watching] if self._watching is not None else []
        problems = (reward.label_problem(label, metadata) for reward in rewards)
        return next((problem for problem in problems if problem is not None), None)

    def builtin_for(self, metadata: dict[str, Any]) -> BuiltinReward:
        """The built-in reward of a row."""
        spec = metadata.get("rm_type", self._settings.rm_type)
        if not isinstance(spec, str):  # as a hook can leave it; that of the data is checked with its label
            raise ConfigError(f"expected the name of a reward as metadata rm_type, not {spec!r:.60}")
        return self._load(spec)

    def probe(self, example: Sample | None = None) -> None:
        """Call the custom reward once, or ask the built-in ones whether this machine has what they need. `example` is
        an unanswered prompt of the data, so that labels and metadata look as they will. Raises `PluginError` for the
        first and `RewardError` for the others."""
        if self._custom is not None:
            self._custom.probe(example)
        for reward in self._builtin.values():
            for term in reward.terms:
                term.grader.probe()

    async def score_group(self, samples: list[Sample]) -> None:
        """Set the reward of each sample.

        A sample that could not be graded raises `RewardError`, gets 0, or loses its reward and gets the status
        `failed`, as `--rm-on-error` says; too many of them raise `RewardError` in any case.
        """
        self._errors.num_answers += len(samples)
        if self._watching is None:
            scored = await self.grade(samples)
        else:
            apart = [dataclasses.replace(sample, metadata=dict(sample.metadata)) for sample in samples]
            watching = asyncio.gather(*(_score(sample, self._watching) for sample in apart))
            scored, watched = await asyncio.gather(self.grade(samples), watching)
            for sample, reward in zip(samples, watched, strict=True):  # one that cannot grade never stops a run
                sample.metadata[WATCH] = None if isinstance(reward, RewardError) else number_of(reward)
        for sample, reward in zip(samples, scored, strict=True):
            if isinstance(reward, RewardError):
                self._fail(sample, reward)
            else:
                sample.reward = reward

    async def grade(self, samples: list[Sample]) -> Sequence[Scored]:
        """The reward of each sample, or why it has none; nothing is set or counted."""
        if self._custom is not None:
            return await self._custom.score(samples)
        return await asyncio.gather(*(_score(sample, self.builtin_for(sample.metadata)) for sample in samples))

    def find(self, sample: Sample) -> str | None:
        """The answer that is read in a response; None when there is none. A custom reward sees the whole response."""
        return sample.response if self._custom is not None else self.builtin_for(sample.metadata).find(sample.response)

    async def disconnect(self) -> None:
        """Close connections of this event loop."""
        for reward in self._builtin.values():
            for term in reward.terms:
                await term.grader.close()

    def _fail(self, sample: Sample, error: RewardError) -> None:
        if self._settings.rm_on_error == "raise":
            raise error
        self._errors.add(str(error))
        logger.warning(f"{error}; by --rm-on-error {self._settings.rm_on_error}")
        if self._settings.rm_on_error == "zero":
            key = self._settings.reward_key
            sample.reward = 0.0 if key is None else {key: 0.0}
        else:
            sample.reward, sample.status = None, SampleStatus.FAILED

    def end_batch(self, samples: Sequence[Sample], *, training: bool = False) -> None:
        """Look for signs of a bad reward in the scored samples of a rollout (`training`) or an evaluation."""
        if training:
            self._signals.watch(samples)
        if self._custom is not None or self._warned or not samples:
            return
        if any(self.builtin_for(sample.metadata).find(sample.response) is not None for sample in samples):
            return
        self._warned = True
        reward = self.builtin_for(samples[0].metadata)
        logger.warning(
            f"no answer was found in any of {len(samples)} responses, so their rewards say nothing about the answers. "
            f"--rm-type {reward.spec} reads {reward.place}:\n{show_samples(samples)}"
        )

    def take_counts(self) -> dict[str, float]:
        """Grader failures since the last call, and what the watching reward gave, under their metric names."""
        total = {**self._tools.pools.failures(), "failed": self._errors.num_failed}
        new = {kind: number - self._counted.get(kind, 0) for kind, number in total.items()}
        self._counted = total
        counts = self._signals.take()
        if self._custom is None or self._watching is not None or new["failed"]:
            counts["rollout/grader_timeouts"] = float(new.get(TIMEOUT, 0))
            # a worker that raised is among the failed ones
            counts["rollout/grader_errors"] = float(new["failed"] + new.get(DIED, 0))
        return counts

    def close(self) -> None:
        self._tools.pools.close()
        if self._custom is not None:
            self._custom.close()


async def _score(sample: Sample, reward: BuiltinReward) -> Scored:
    try:
        return await reward.score(sample)
    except RewardError as error:
        return error
