"""Functions of the user that take part in a rollout: loaded, checked and called where they cannot block a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from miles.config.flags import FLAGS, Args
from miles.config.sections import RunConfig
from miles.errors import PluginError
from miles.plugins import HookThread, HookTimeoutError, check_signature, describe_error, load_function
from miles.rollout.filter_hub.common_filters import FilterOutput
from miles.types import Sample, SampleStatus

HOOK_TIMEOUT_S = 600.0


class Hook:
    """One function of the user, plain or async. Whatever it does wrong becomes a `PluginError` with its line."""

    def __init__(self, name: str, path: str, *arguments: str, thread: HookThread) -> None:
        self.flag, self.path, self._thread = FLAGS[name].spelling, path, thread
        self.function = load_function(path, flag=self.flag)
        check_signature(self.function, *arguments, path=path, flag=self.flag)

    async def __call__(self, *arguments: Any) -> Any:
        try:
            return await self._thread.call(self.function, *arguments, timeout_s=HOOK_TIMEOUT_S)
        except HookTimeoutError:
            raise PluginError(f"{self.flag} {self.path} did not return within {HOOK_TIMEOUT_S:g} s") from None
        except Exception as error:  # fault boundary: the user's code can raise anything
            place = describe_error(error, function=self.function)
            raise PluginError(f"{self.flag} {self.path} failed: {place}") from error

    def wrong(self, problem: str) -> PluginError:
        return PluginError(f"{self.flag} {self.path}: {problem}")


class RolloutHooks:
    """The hooks of a rollout that the settings name, each called once on small samples by `probe`."""

    def __init__(self, config: RunConfig) -> None:
        self._args = Args(config)
        self._thread = HookThread("rollout-hooks")
        rollout = config.rollout
        self._filter = self._load("dynamic_sampling_filter_path", rollout.dynamic_sampling_filter_path, "args", "group")

    def _load(self, name: str, path: str | None, *arguments: str) -> Hook | None:
        return None if path is None else Hook(name, path, *arguments, thread=self._thread)

    @property
    def filters(self) -> bool:
        return self._filter is not None

    async def drop_reason(self, group: list[Sample]) -> str | None:
        """Why the dynamic filter drops a scored group; None when it is kept."""
        if self._filter is None:
            return None
        verdict = await self._filter(self._args, group)
        if isinstance(verdict, FilterOutput):
            return None if verdict.keep else verdict.reason or "unnamed"
        return None if verdict else "unnamed"

    def probe(self) -> None:
        """Call each hook once. Raises `PluginError`."""
        asyncio.run(self._probe())

    async def _probe(self) -> None:
        key = self._args.reward_key
        await self.drop_reason(example_group((0.0, 1.0), reward_key=key))

    def close(self) -> None:
        self._thread.close()


def example_group(rewards: Sequence[float], *, reward_key: str | None) -> list[Sample]:
    """A small scored group as hooks will see them."""
    return [
        Sample(
            group_index=0,
            index=index,
            prompt="What is 1 + 1?",
            tokens=[1, 2, 3],
            response="2",
            response_length=1,
            label="2",
            reward=reward if reward_key is None else {reward_key: reward},
            loss_mask=[1],
            rollout_log_probs=[-1.0],
            weight_versions=[0],
            status=SampleStatus.COMPLETED,
        )
        for index, reward in enumerate(rewards)
    ]
