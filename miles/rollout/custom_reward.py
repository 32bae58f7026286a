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
from miles.rollout.reward_value import plain_number, problem_of
from miles.types import Sample, SampleStatus

FLAG = "--custom-rm-path"


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

    def probe(self, example: Sample | None) -> None:
        """Score one finished sample before anything expensive is loaded: a prompt answered by its own label."""
        sample = (
            copy.deepcopy(example) if example is not None else Sample(prompt="What is 1 + 1?", label="2", tokens=[0])
        )
        sample.response = "1" if sample.label is None else str(sample.label)
        sample.group_index, sample.index = max(0, sample.group_index), max(0, sample.index)
        answer_ids = sample.tokens[-1:]
        sample.tokens = [*sample.tokens, *answer_ids]
        sample.response_length = len(answer_ids)
        sample.loss_mask = [1] * len(answer_ids)
        sample.rollout_log_probs = [-1.0] * len(answer_ids)
        sample.weight_versions = [0] * len(answer_ids)
        sample.status = SampleStatus.COMPLETED
        try:
            asyncio.run(self.score([sample]))
        except RewardError as error:
            raise PluginError(f"the probe before the run, one answer equal to its label: {error}") from error

    async def score(self, samples: Sequence[Sample]) -> list[float | dict[str, Any]]:
        """The reward of each sample: a finite number, or a dict whose `--reward-key` is one."""
        if self._settings.group_rm:
            return await self._score_group(list(samples))
        return list(await asyncio.gather(*(self._score_one(sample) for sample in samples)))

    async def _score_one(self, sample: Sample) -> float | dict[str, Any]:
        who = f"sample {sample.index}"
        return self._checked(await self._call(sample, who=who), who=who)

    async def _score_group(self, samples: list[Sample]) -> list[float | dict[str, Any]]:
        who = f"group {samples[0].group_index} (samples {samples[0].index} to {samples[-1].index})"
        rewards = await self._call(samples, who=who)
        if not isinstance(rewards, (list, tuple)) or len(rewards) != len(samples):
            got = f"{len(rewards)}" if isinstance(rewards, (list, tuple)) else f"a {type(rewards).__name__}"
            raise RewardError(
                f"{self._where()} returned {got} for {who}; with --group-rm it must return a list of "
                f"{len(samples)} rewards, one per sample"
            )
        return [self._checked(r, who=f"sample {s.index}") for r, s in zip(rewards, samples, strict=True)]

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

    def _checked(self, reward: Any, *, who: str) -> float | dict[str, Any]:
        key = self._settings.reward_key
        if not isinstance(reward, dict):
            if key is not None:
                raise RewardError(
                    f"{self._where()} returned {reward!r:.60} for {who}; --reward-key {key} asks for a dict"
                )
            self._check_number(reward, who=who)
            return plain_number(reward)
        if key is None:
            raise RewardError(
                f"{self._where()} returned a dict for {who}; say with --reward-key which of "
                f"{', '.join(map(str, reward))} is the reward"
            )
        if key not in reward:
            raise RewardError(
                f"{self._where()} returned a dict without {key!r} (--reward-key) for {who}; it has "
                f"{', '.join(map(str, reward)) or 'nothing'}"
            )
        self._check_number(reward[key], who=f"{who}, field {key!r}")
        return {**reward, key: plain_number(reward[key])}

    def _check_number(self, value: Any, *, who: str) -> None:
        problem = problem_of(value)
        if problem is not None:
            raise RewardError(f"{self._where()} returned {problem} for {who}; expected a finite number")
