"""Hooks that replace a whole part: the data source, the rollout, the evaluation."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from miles.data.buffer import GroupBuffer
from miles.rollout.client import EngineClient
from miles.rollout.hook_inputs import (
    EvalSkip,
    GenerateState,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles.rollout.hooks import Hook, RolloutHooks
from miles.rollout.noise import EVAL_STREAM, noise_key
from miles.types import Sample


class HookedSource:
    """Implements `DataSource` with a class of the user. Prompts without tokens are encoded."""

    def __init__(self, hook: Hook, args: Any, *, encode: Callable[[Sample], list[int]]) -> None:
        self._hook, self._encode, self._num_saves = hook, encode, 0
        self._source = asyncio.run(hook(args))
        missing = [name for name in ("get_samples", "save", "load") if not callable(getattr(self._source, name, None))]
        if missing:
            raise hook.wrong(f"gives an object without {', '.join(missing)}")

    def next(self, count: int) -> list[list[Sample]]:
        groups: list[list[Sample]] = self._source.get_samples(count)
        if len(groups) != count or not all(groups):
            raise self._hook.wrong(f"gave {len(groups)} groups of samples where {count} were asked for")
        for sample in (sample for group in groups for sample in group):
            sample.tokens = sample.tokens or self._encode(sample)
        return groups

    def note(self, groups: Iterable[tuple[Sample, float]]) -> None:
        """The hooks that see samples tell a source of the user what it wants to know."""

    def state_dict(self) -> dict[str, Any]:
        self._num_saves += 1
        self._source.save(self._num_saves)
        return {"num_saves": self._num_saves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_saves = state["num_saves"]
        self._source.load(self._num_saves)


class RolloutFunction:
    """A class of the user, made once and then called, or an older function `f(args, rollout_id, data_source,
    evaluation)`."""

    def __init__(
        self, hook: Hook, hooks: RolloutHooks, client: EngineClient, source: GroupBuffer, *, max_context_len: int
    ) -> None:
        self._hook, self._hooks, self._client, self._source = hook, hooks, client, source
        self._max_context_len = max_context_len
        self._made: Any = None
        self.counts: dict[str, float] = {}

    async def call(self, given: RolloutFnTrainInput | RolloutFnEvalInput) -> Any:
        args, evaluation = self._hooks.args, isinstance(given, RolloutFnEvalInput)
        if not inspect.isclass(self._hook.function):
            return await self._hook(args, given.rollout_id, self._source, evaluation)
        if self._made is None:
            key = noise_key(args.rollout_seed, 0, 0, 0, stream=EVAL_STREAM if evaluation else self._hook.path)
            state = GenerateState(args, self._client, noise_key=key, max_context_len=self._max_context_len)
            self._made = await self._hook(RolloutFnConstructorInput(args, self._source, state))
        return await self._hook.run(self._made, given)

    async def collect(self, rollout_id: int) -> list[list[Sample]]:
        output = await self.call(RolloutFnTrainInput(rollout_id, self._client.version))
        samples = output.samples if isinstance(output, RolloutFnTrainOutput) else output
        self.counts = dict(output.metrics) if isinstance(output, RolloutFnTrainOutput) else {}
        if not isinstance(samples, list) or not samples or not all(isinstance(group, list) for group in samples):
            raise self._hook.wrong("must return a list of groups of samples")
        return samples

    async def evaluate(self, rollout_id: int) -> RolloutFnEvalOutput | EvalSkip:
        output = await self.call(RolloutFnEvalInput(rollout_id, self._client.version))
        if not isinstance(output, (RolloutFnEvalOutput, EvalSkip)):
            raise self._hook.wrong(f"must return a RolloutFnEvalOutput or an EvalSkip, not a {type(output).__name__}")
        return output
