"""`--custom-rm-path`: a reward written by the user."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

from miles.config.flags import Args
from miles.config.sections import RunConfig
from miles.errors import PluginError, RewardError
from miles.plugins import HookThread, HookTimeoutError, check_signature, describe_error, load_function, locate
from miles.rollout.hooks import example_group, problem_of_sample
from miles.rollout.reward_value import checked_reward
from miles.types import Sample

FLAG = "--custom-rm-path"
Scored = float | dict[str, Any] | RewardError


class CustomReward:
    """Calls `f(args, sample)`, or `f(args, samples)` once per group with `--group-rm`.

    The constructor loads the function and checks its signature (`PluginError`). Whatever the function does wrong
    ends in a `RewardError` that names the sample and the user's line.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.reward.custom_rm_path is not None
        self._path = config.reward.custom_rm_path
        self._settings = config.reward
        self._args = Args(config)
        self._function = load_function(self._path, flag=FLAG)
        argument = "samples" if config.reward.group_rm else "sample"
        check_signature(self._function, "args", argument, path=self._path, flag=FLAG)
        self._thread = HookThread("custom-reward")

    def close(self) -> None:
        self._thread.close()

    def probe(self, given: Sample | None) -> None:
        """Score one finished sample before anything expensive is loaded: a prompt answered by its own label."""
        (sample,) = example_group((None,), reward_key=None)
        if given is not None:
            sample.prompt, sample.label, sample.metadata = copy.deepcopy((given.prompt, given.label, given.metadata))
            sample.tokens = [*(given.tokens or [0]), *(given.tokens[-1:] or [0])]
            sample.response = "1" if sample.label is None else str(sample.label)
        try:
            [reward] = asyncio.run(self.score([sample]))
            if isinstance(reward, RewardError):
                raise reward
        except RewardError as error:
            raise PluginError(f"the probe before the run, one answer equal to its label: {error}") from error

    async def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """The reward of each sample: a finite number, a dict whose `--reward-key` is one, or what went wrong."""
        if self._settings.group_rm:
            return await self._score_group(list(samples))
        return list(await asyncio.gather(*(self._score_one(sample) for sample in samples)))

    async def _score_one(self, sample: Sample) -> Scored:
        try:
            reward = await self._call(sample, who=f"sample {sample.index}")
        except RewardError as error:
            return error
        return self._checked(reward, sample)

    async def _score_group(self, samples: list[Sample]) -> list[Scored]:
        who = f"group {samples[0].group_index} (samples {samples[0].index} to {samples[-1].index})"
        given = list(samples)
        try:
            rewards = await self._call(given, who=who)
            self._check_list(rewards, samples, given, who=who)
        except RewardError as error:
            return [error] * len(samples)
        return [self._checked(reward, sample) for reward, sample in zip(rewards, samples, strict=True)]

    def _check_list(self, rewards: Any, samples: list[Sample], given: list[Sample], *, who: str) -> None:
        if [id(sample) for sample in given] != [id(sample) for sample in samples]:
            raise RewardError(
                f"{self._where()} changed the list it was given for {who}, so that rewards and samples no longer "
                "match; sort or filter a copy: sorted(samples, ...)"
            )
        if isinstance(rewards, (list, tuple)) and len(rewards) == len(samples):
            return
        got = f"{len(rewards)}" if isinstance(rewards, (list, tuple)) else f"a {type(rewards).__name__}"
        raise RewardError(
            f"{self._where()} returned {got} for {who}; with --group-rm it must return a list of {len(samples)} "
            "rewards, one per sample in their order"
        )

    def _checked(self, reward: Any, sample: Sample) -> Scored:
        key, who = self._settings.reward_key, f"sample {sample.index}"
        if isinstance(reward, dict) and reward.get("index", sample.index) != sample.index:
            return RewardError(
                f"{self._where()} returned the reward of sample {reward['index']} (its field 'index') for {who}; "
                "rewards must come in the order of the samples"
            )
        try:
            if problem := problem_of_sample(sample, must_have_ended=False):
                raise RewardError(f"{self._where()} {problem.replace('returned', 'left', 1)} for {who}")
            return checked_reward(reward, reward_key=key, source=self._where(), who=who)
        except RewardError as error:
            return error

    async def _call(self, argument: Sample | list[Sample], *, who: str) -> Any:
        timeout_s = self._settings.custom_rm_timeout
        try:
            return await self._thread.call(self._function, self._args, argument, timeout_s=timeout_s)
        except HookTimeoutError:
            raise RewardError(
                f"{self._where()} did not return within {timeout_s} s for {who}; make it faster or raise "
                "--custom-rm-timeout"
            ) from None
        except Exception as error:  # fault boundary: the user's code can raise anything
            place = describe_error(error, function=self._function)
            raise RewardError(f"{FLAG} {self._path} failed for {who}: {place}") from error

    def _where(self) -> str:
        return f"{FLAG} {self._path} ({locate(self._function)})"
