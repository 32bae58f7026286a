"""Hooks that replace a whole part: the data source, the rollout, the evaluation."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from miles.data.buffer import GroupBuffer
from miles.errors import PluginError
from miles.observe.log import get_logger
from miles.rollout.client import EngineClient
from miles.rollout.hook_inputs import (
    CheckpointEvalFn,
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

logger = get_logger(__name__)


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
        self._state: GenerateState | None = None
        self._made: Any = None
        self.counts: dict[str, float] = {}

    def _begin(self, rollout_id: int, *, stream: str) -> GenerateState:
        """The engine as the hook sees it, with draws that do not depend on what it was asked before."""
        args = self._hooks.args
        if self._state is None:
            self._state = GenerateState(args, self._client, noise_key=0, max_context_len=self._max_context_len)
        self._state.draw_from(noise_key(args.rollout_seed, rollout_id, 0, 0, stream=stream))
        return self._state

    async def _call(self, state: GenerateState, given: RolloutFnTrainInput | RolloutFnEvalInput) -> Any:
        hook = self._hook
        if not inspect.isclass(hook.function):
            return await hook(state.args, given.rollout_id, self._source, isinstance(given, RolloutFnEvalInput))
        if self._made is None:
            self._made = await hook(RolloutFnConstructorInput(state.args, self._source, state))
        if isinstance(given, RolloutFnEvalInput) and hook.reads_folder:
            return await hook.run(self._made.evaluate_checkpoint, given.hf_dir, given)
        return await hook.run(self._made, given)

    async def collect(self, rollout_id: int) -> list[list[Sample]]:
        state = self._begin(rollout_id, stream=self._hook.path)
        output = await self._call(state, RolloutFnTrainInput(rollout_id, self._client.version))
        samples = output.samples if isinstance(output, RolloutFnTrainOutput) else output
        self.counts = dict(output.metrics) if isinstance(output, RolloutFnTrainOutput) else {}
        if not isinstance(samples, list) or not samples or not all(isinstance(group, list) for group in samples):
            raise self._hook.wrong("must return a list of groups of samples")
        for place, group in enumerate(samples):
            for number, sample in enumerate(group):
                who = f"samples[{place}][{number}]"
                self._hook.check(sample, who=who, key=state.args.reward_key, whole_rollout=True)
        return samples

    async def evaluate(self, rollout_id: int, hf_dir: str | None) -> RolloutFnEvalOutput | EvalSkip:
        """Every evaluation draws the same, so that two of them differ by the weights only."""
        state = self._begin(0, stream=EVAL_STREAM)
        output = await self._call(state, RolloutFnEvalInput(rollout_id, state, self._client.version, hf_dir))
        if not isinstance(output, (RolloutFnEvalOutput, EvalSkip)):
            raise self._hook.wrong(f"must return a RolloutFnEvalOutput or an EvalSkip, not a {type(output).__name__}")
        sets = output.data.values() if isinstance(output, RolloutFnEvalOutput) else ()
        if not all(isinstance(one, dict) and len(one.get("rewards", ())) for one in sets):
            raise self._hook.wrong("returned a set without rewards")
        return output

    async def dispose(self) -> None:
        """Tell a `CheckpointEvalFn` that the run has ended. What goes wrong in it is not how the run ended."""
        if not isinstance(self._made, CheckpointEvalFn):
            return
        try:
            await self._hook.let_go(self._made.dispose)
        except PluginError as error:
            logger.warning(str(error))
