"""Hooks that replace a whole part: the data source, the rollout, the evaluation."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable
from typing import Any

from miles.data.buffer import GroupBuffer
from miles.errors import PluginError
from miles.observe import names
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
from miles.rollout.reward_value import checked_number, plain
from miles.text.tokenizer import Tokenizer
from miles.types import Sample

logger = get_logger(__name__)


class HookedSource:
    """Implements `DataSource` with a class of the user. Prompts without tokens are encoded, messages by the chat
    template."""

    def __init__(self, hook: Hook, args: Any, tokenizer: Tokenizer) -> None:
        self._hook, self._tokenizer, self._num_saves, self._reward_key = hook, tokenizer, 0, args.reward_key
        self._source = asyncio.run(hook(args))
        missing = [name for name in ("get_samples", "save", "load") if not callable(getattr(self._source, name, None))]
        if missing:
            raise hook.wrong(f"gives an object without {', '.join(missing)}")

    def next(self, count: int) -> list[list[Sample]]:
        hook = self._hook
        groups: list[list[Sample]] = hook.at_once(self._source.get_samples, count)
        if not isinstance(groups, list) or [*map(type, groups)] != [list] * count or not all(groups):
            raise hook.wrong(f"must return {count} lists of samples from get_samples({count}), not {groups!r:.60}")
        for place, group in enumerate(groups):
            for sample in group:
                if isinstance(sample, Sample):
                    sample.tokens = plain(sample.tokens) or hook.at_once(self._encode, sample.prompt)
                hook.check(sample, who=f"groups[{place}]", key=self._reward_key, ended=False)
            if len({sample.index for sample in group}) < len(group):
                raise hook.wrong(f"gave groups[{place}] two samples with the same index: each needs its own")
        hook.check_group_indices(groups)
        return groups

    def _encode(self, prompt: Any) -> list[int]:
        return self._tokenizer.encode(prompt if isinstance(prompt, str) else self._tokenizer.render(prompt))

    def note(self, groups: Iterable[tuple[Sample, float]]) -> None:
        """The hooks that see samples tell a source of the user what it wants to know."""

    def state_dict(self) -> dict[str, Any]:
        self._num_saves += 1
        self._hook.at_once(self._source.save, self._num_saves)
        return {"num_saves": self._num_saves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_saves = state["num_saves"]
        self._hook.at_once(self._source.load, self._num_saves)


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
        metrics = output.metrics if isinstance(output, RolloutFnTrainOutput) else {}
        self.counts = {name: self._number(name, value) for name, value in (metrics or {}).items()}
        self._hook.check_groups(samples, key=state.args.reward_key)
        return samples

    async def evaluate(self, rollout_id: int, hf_dir: str | None) -> RolloutFnEvalOutput | EvalSkip:
        """Every evaluation draws the same, so that two of them differ by the weights only."""
        state = self._begin(0, stream=EVAL_STREAM)
        output = await self._call(state, RolloutFnEvalInput(rollout_id, state, self._client.version, hf_dir))
        if isinstance(output, EvalSkip):
            return output
        if not isinstance(output, RolloutFnEvalOutput) or not isinstance(output.data, dict):
            raise self._hook.wrong(f"must return a RolloutFnEvalOutput or an EvalSkip, not a {type(output).__name__}")
        data = {name: self._checked_set(name, given) for name, given in output.data.items()}
        metrics = {name: self._number(name, value) for name, value in (output.metrics or {}).items()}
        return RolloutFnEvalOutput(data, metrics)

    def _checked_set(self, name: Any, given: Any) -> dict[str, Any]:
        """What a hook says of an evaluation set, with plain numbers."""
        one: dict[str, Any] = {"rewards": None, "samples": []} | (given if isinstance(given, dict) else {})
        rewards, samples, key = plain(one["rewards"]), one["samples"], self._hooks.args.reward_key
        if not rewards or not isinstance(rewards, (list, tuple)) or not isinstance(samples, (list, tuple)):
            raise self._hook.wrong(f"returned a set without rewards, or with samples that are no list: {name!r}")
        for number, sample in enumerate(samples):
            who = f"samples[{number}] of set {name!r}"
            if key is None and isinstance(sample, Sample) and isinstance(sample.reward, dict):
                self._hook.check_values(sample, who=who, ended=False)  # its number is in the list only
            else:
                self._hook.check(sample, who=who, key=key, ended=False)
        return one | {"rewards": [self._number(f"eval/{name}", reward) for reward in rewards]}

    def _number(self, name: Any, value: Any) -> float:
        """A metric of a hook as a plain number."""
        if names.find(str(name)) is None:
            raise self._hook.wrong(f"returned the unknown metric {name!r}; use rollout/custom_<name> or eval/<name>")
        return checked_number(value, source=f"{self._hook.flag} {self._hook.path}", who=str(name))

    async def dispose(self) -> None:
        """Tell a `CheckpointEvalFn` that the run has ended. What goes wrong in it is not how the run ended."""
        if not isinstance(self._made, CheckpointEvalFn):
            return
        try:
            await self._hook.let_go(self._made.dispose)
        except PluginError as error:
            logger.warning(str(error))
