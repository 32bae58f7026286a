"""Classes and functions in the place of a rollout or an evaluation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from miles.config.flags import Args, with_values
from miles.config.sections import RunConfig
from miles.errors import MilesError, PluginError
from miles.rollout.client import EngineClient
from miles.rollout.hook_inputs import (
    CheckpointEvalFn,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
)
from miles.rollout.hooks import RolloutHooks
from miles.rollout.replace import HookedSource, RolloutFunction
from miles.rollout.reward_value import reward_value
from miles.text.tokenizer import Tokenizer
from miles.types import Sample
from tests.unit.rollout.fake_generator import FakeGenerator

HERE = "tests.unit.rollout.test_replace."


def old(args: Any, rollout_id: int) -> None: ...


class NotCalled:
    def __init__(self, input: RolloutFnConstructorInput) -> None: ...


class TakesNothing:
    async def __call__(self, step: Any) -> None: ...


class NoMethod(CheckpointEvalFn): ...


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("old", r"is called as f\(args, rollout_id, data_source, evaluation\) but is defined as"),
        ("NotCalled", "is a class without the method __call__"),
        ("TakesNothing", r"is called as f\(input\) but is defined as"),
        ("NoMethod", "is a class without the method evaluate_checkpoint"),
    ],
)
def test_what_cannot_be_called_is_found_at_the_start(name: str, problem: str) -> None:
    with pytest.raises(PluginError, match=f"--eval-function-path {HERE}{name}:? {problem}"):
        RolloutHooks(with_values(RunConfig(), {"eval_function_path": HERE + name}))


class Asks:
    """Asks twice: in the state that it was made with, and in that of the evaluation."""

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.state = input.state

    async def __call__(self, step: Any) -> Any:
        state = step.generate_state if isinstance(step, RolloutFnEvalInput) else self.state
        for one in (self.state, state):
            await one.generate([1], {"max_new_tokens": 2})
        return [[Sample(reward=1.0)]]


async def unknown_version(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> list[list[Any]]:
    sample = Sample(tokens=[1, 2], response_length=1, weight_versions=[None])  # type: ignore[list-item]
    return [[Sample(reward=1.0)], [Sample(reward=1), sample]]


async def no_reward(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> list[list[Any]]:
    return [[Sample(reward=float("nan")), Sample()]]


async def unscored(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> list[list[Any]]:
    return [[Sample(reward=float("nan")), Sample(reward={"score": float("nan")})]]


async def no_samples(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> list[list[Any]]:
    return [[{"reward": 1.0}]]


async def one_index(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> list[list[Any]]:
    return [[Sample(reward=1.0)], [Sample(reward=0.0)]]


async def own_metric(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> RolloutFnTrainOutput:
    return RolloutFnTrainOutput([[Sample(reward=1.0)]], {"rollout/custom_x": 1, "mine": 1.0})


class Folder(CheckpointEvalFn):
    disposed = 0

    async def evaluate_checkpoint(self, hf_dir: str, step: RolloutFnEvalInput) -> Any:
        seen = (hf_dir, step.hf_dir, step.rollout_id, step.weight_version, self.input.args.rollout_seed)
        return RolloutFnEvalOutput({"mine": {"rewards": [1.0], "seen": seen}})

    async def dispose(self) -> None:
        Folder.disposed += 1
        raise ValueError("nothing to close")


def run(name: str, flag: str, use: Any) -> FakeGenerator:
    hooks, engine = RolloutHooks(with_values(RunConfig(), {flag: HERE + name})), FakeGenerator()
    hook = hooks.rollout or hooks.evaluation
    assert hook is not None

    async def used() -> None:
        source: Any = None
        await use(RolloutFunction(hook, hooks, EngineClient(engine), source, max_context_len=9))

    try:
        asyncio.run(used())
    finally:
        hooks.close()
    return engine


def keys(engine: FakeGenerator) -> list[int]:
    return [request.noise_key for requests in engine.submits for request in requests]


def test_draws_of_a_rollout_do_not_depend_on_the_ones_before_it() -> None:
    async def both(function: RolloutFunction) -> None:
        await function.collect(4)
        await function.collect(5)

    whole = keys(run("Asks", "rollout_function_path", both))
    resumed = keys(run("Asks", "rollout_function_path", lambda function: function.collect(5)))
    assert resumed == whole[2:] and len(set(whole)) == 4


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("unknown_version", r"returned None in weight_versions, .* a list of whole numbers for samples\[1\]\[1\]"),
        ("no_samples", r"returned a dict, not a Sample for samples\[0\]\[0\]"),
        ("no_reward", r"returned None for the reward of samples\[0\]\[1\]; expected a finite number"),
        ("one_index", r"gave 2 groups with group_index \[-1, -1\]: each must have one of its own"),
        ("own_metric", "returned the unknown metric 'mine'; use rollout/custom_<name> or eval/<name>"),
    ],
)
def test_what_a_rollout_function_returns_is_checked(name: str, problem: str) -> None:
    with pytest.raises(MilesError, match=f"--rollout-function-path {HERE}{name} {problem}"):
        run(name, "rollout_function_path", lambda function: function.collect(0))


def test_a_reward_that_is_not_finite_says_that_there_is_none() -> None:
    async def use(function: RolloutFunction) -> None:
        function._hooks.args = Args(with_values(RunConfig(), {"reward_key": "score"}))
        ((one, other),) = await function.collect(0)
        assert math.isnan(reward_value(one, "score")) and math.isnan(reward_value(other, "score"))

    run("unscored", "rollout_function_path", use)


def test_every_evaluation_draws_the_same() -> None:
    async def twice(function: RolloutFunction) -> None:
        for rollout_id in (0, 3):
            with pytest.raises(PluginError, match="must return a RolloutFnEvalOutput or an EvalSkip, not a list"):
                await function.evaluate(rollout_id, None)

    first, second, *again = keys(run("Asks", "eval_function_path", twice))
    assert again == [first, second] and first != second


def test_a_checkpoint_evaluation_gets_the_folder_and_is_disposed_of(caplog: pytest.LogCaptureFixture) -> None:
    async def use(function: RolloutFunction) -> None:
        await function.dispose()  # not made yet
        assert Folder.disposed == 0
        output = await function.evaluate(7, "weights")
        assert isinstance(output, RolloutFnEvalOutput)
        assert output.data["mine"]["seen"] == ("weights", "weights", 7, 3, 42)
        await function.dispose()

    run("Folder", "eval_function_path", use)
    assert Folder.disposed == 1 and "ValueError: nothing to close" in caplog.text


class Given:
    output: Any = None

    def __init__(self, input: RolloutFnConstructorInput) -> None: ...

    async def __call__(self, step: Any) -> Any:
        return Given.output


@pytest.mark.parametrize(
    ("data", "metrics", "problem"),
    [
        ({"mine": {"rewards": []}}, {}, "returned a set without rewards"),
        ({"mine": {"rewards": 1.0}}, {}, "returned a set without rewards"),
        ({"mine": {"rewards": [float("nan")]}}, {}, "returned nan for eval/mine; expected a finite number"),
        ({"a/b": {"rewards": [1.0]}}, {}, "returned the unknown metric 'eval/a/b'"),
        (
            {"mine": {"rewards": [1.0], "samples": [7]}},
            {},
            r"returned a int, not a Sample for samples\[0\]",
        ),
        ({}, {"x": 1.0}, "returned the unknown metric 'x'"),
        ([1.0], {}, "must return a RolloutFnEvalOutput or an EvalSkip"),
    ],
)
def test_what_an_evaluation_returns_is_checked(data: Any, metrics: Any, problem: str) -> None:
    Given.output = RolloutFnEvalOutput(data, metrics)
    with pytest.raises(MilesError, match=f"--eval-function-path {HERE}Given {problem}"):
        run("Given", "eval_function_path", lambda function: function.evaluate(0, None))


def test_samples_of_an_evaluation_are_kept_with_any_reward() -> None:
    """The numbers are in `rewards`: a dict without a `--reward-key` says which is which to a reader only."""
    Given.output = RolloutFnEvalOutput({"mine": {"rewards": (1.0,), "samples": (Sample(reward={"acc": 1.0}),)}})

    async def use(function: RolloutFunction) -> None:
        output = await function.evaluate(0, None)
        assert isinstance(output, RolloutFnEvalOutput) and output.data["mine"]["samples"][0].reward == {"acc": 1.0}

    run("Given", "eval_function_path", use)


class Source:
    groups: Any = None

    def __init__(self, args: Any) -> None: ...

    def get_samples(self, count: int) -> Any:
        return Source.groups

    async def save(self, number: int) -> None: ...

    def load(self, number: int) -> None:
        raise KeyError(number)


def sample(**values: Any) -> Sample:
    return Sample(**{"prompt": "1+1", "group_index": 0, "index": 0} | values)


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        (None, r"must return 1 lists of samples from get_samples\(1\), not None"),
        ([[sample()] * 2], r"gave groups\[0\] two samples with the same index"),
        ([[Sample(prompt="a"), Sample(prompt="b")]], r"gave groups\[0\] two samples with the same index"),
        ([[sample(), sample(index=1, group_index=1)]], r"gave 1 groups with group_index \[0, 1\]"),
        ([[sample(index=None)]], "returned a NoneType as index"),
        ([[{"prompt": "a"}]], "returned a dict, not a Sample"),
        ([[sample(prompt=5)]], "failed: the chat template cannot render"),
    ],
)
def test_what_a_data_source_gives_is_checked(groups: Any, problem: str, tokenizer: Tokenizer) -> None:
    Source.groups = groups
    with hooked_source(tokenizer) as source, pytest.raises(PluginError, match=f"--data-source-path .* {problem}"):
        source.next(1)


def test_a_data_source_can_give_arrays_and_messages(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "1+1"}]
    Source.groups = [[sample(tokens=np.array([1, 2])), sample(prompt=messages, index=1)]]
    with hooked_source(tokenizer) as source:
        ((given, rendered),) = source.next(1)
        assert given.tokens == [1, 2] and rendered.tokens == tokenizer.encode(tokenizer.render(messages))
        with pytest.raises(PluginError, match="has the async save; it must be a plain function"):
            source.state_dict()
        with pytest.raises(PluginError, match="test_replace.py:[0-9]+: KeyError: 4"):
            source.load_state_dict({"num_saves": 4})


@contextmanager
def hooked_source(tokenizer: Tokenizer) -> Iterator[HookedSource]:
    hooks = RolloutHooks(with_values(RunConfig(), {"data_source_path": HERE + "Source"}))
    assert hooks.source is not None
    try:
        yield HookedSource(hooks.source, hooks.args, tokenizer)
    finally:
        hooks.close()
