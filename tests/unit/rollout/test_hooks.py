from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch

from miles.config.flags import with_values
from miles.config.sections import RunConfig
from miles.errors import MilesError, PluginError
from miles.observe.samples import SCHEMA, to_row
from miles.rollout.client import EngineClient
from miles.rollout.filter_hub.common_filters import FilterOutput
from miles.rollout.group import write_group
from miles.rollout.hook_inputs import GenerateState
from miles.rollout.hooks import RolloutHooks, example_group, problem_of_sample
from miles.rollout.to_train import to_train_samples
from miles.types import Sample, SampleStatus, SamplingParams
from tests.unit.rollout.fake_generator import FakeGenerator

HERE = "tests.unit.rollout.test_hooks."


def pending(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return sample


def short_mask(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    done = example_group((1.0,), reward_key=None)[0]
    done.loss_mask = [1, 1]
    return done


def nothing(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    return []


def two_rows(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = True) -> list[Sample]:
    assert not evaluation and sampling_params["max_new_tokens"] == 4
    row = dataclasses.replace(example_group((1.0,), reward_key=None)[0], reward=None, response=str(sample.index))
    return [row, dataclasses.replace(row, response=f"{sample.index} again")]


def one_list(args: Any, samples: list[Sample]) -> list[float]:
    return [0.0] * len(samples)


def takes_none(args: Any, rollout_id: None, buffer: list[Any], n: int) -> None:
    return None


async def takes_late(args: Any, rollout_id: None, buffer: list[Any], n: int) -> list[Any]:
    return []


def takes_copies(args: Any, rollout_id: None, buffer: list[Any], n: int) -> list[Any]:
    return buffer[:n]


def forgets(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    row = example_group((1.0,), reward_key=None)[0]
    row.metadata = {"mine": 1, "prompt_row": "none"}
    return row


def wrong_count(args: Any, samples: list[Sample]) -> dict[str, list[float]]:
    return {"rewards": [1.0]}


def one_number(args: Any, samples: list[Sample]) -> dict[str, float]:
    return {"rewards": 1.0}


def numbered(args: Any, samples: list[Sample]) -> dict[int, list[float]]:
    return {0: [1.0] * len(samples)}


def no_number(args: Any, samples: list[Sample]) -> dict[str, list[float]]:
    return {"rewards": [float("nan")] * len(samples)}


def no_raw_reward(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    return {"raw_reward": [None] * len(samples)}


def nested(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    return {"loss_masks": [np.array([[1]])] * len(samples)}


def too_long(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    return {"response_lengths": [5] * len(samples), "loss_masks": [[0, 0, 0, 1, 1]] * len(samples)}


def one_log_prob_more(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    return {"rollout_log_probs": [np.array([-1.0, -2.0])] * len(samples)}


def arrays(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    return {
        "rollout_log_probs": [np.array([-1.5])] * len(samples),
        "tokens": [[1, *np.array([2, 3])]] * len(samples),
        "response_lengths": np.ones(len(samples), np.int32),
        "loss_masks": [torch.tensor([True])] * len(samples),
    }


def own_reward(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    sample.tokens, sample.response_length, sample.status = [1, 2], 1, SampleStatus.COMPLETED
    sample.reward = {6: np.float32(0.5), 7: "good"}[sample.index]
    return sample


def unknown_column(args: Any, samples: list[Sample]) -> dict[str, list[float]]:
    return {"reward": [1.0] * len(samples)}


def write(function: str | None, *, last: str | None = None) -> list[Sample]:
    """What the run's function makes of two samples, or of the first when the `last` one has its own."""
    path = None if function is None else HERE + function
    hooks = RolloutHooks(with_values(RunConfig(), {"custom_generate_function_path": path}))
    group = [Sample(group_index=3, index=i, tokens=[1]) for i in (6, 7)]
    group[1].generate_function_path = last

    async def score(samples: list[Sample]) -> None:
        for sample in samples:
            sample.reward = 1.0

    async def run() -> list[Sample]:
        client = EngineClient(FakeGenerator())
        sampling = SamplingParams(max_new_tokens=4)
        written = await write_group(
            group,
            generate=lambda s: hooks.write(client, group, s, sampling, noise_key=1, max_context_len=9),
            score=score,
        )
        return written.samples

    try:
        return asyncio.run(run())
    finally:
        hooks.close()


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("pending", "status is still pending for sample 6"),
        ("short_mask", "returned 2 loss_mask for 1 tokens for sample 6"),
        ("nothing", "returned nothing for sample 6"),
        ("own_reward", "returned the str 'good' for the reward of sample 7; expected a finite number"),
    ],
)
def test_what_a_generate_hook_returns_is_checked(function: str, problem: str) -> None:
    with pytest.raises(MilesError, match=f"--custom-generate-function-path {HERE}{function} .*{problem}"):
        write(function)


def test_a_reward_of_a_generate_hook_becomes_plain() -> None:
    reward = write("own_reward", last=HERE + "two_rows")[0].reward
    assert reward == 0.5 and type(reward) is float


def test_a_prompt_can_become_several_rows_of_its_group_in_a_fixed_order() -> None:
    rows = write("two_rows")
    assert [(r.index, r.group_index, r.response) for r in rows] == [
        (6, 3, "6"),
        (6, 3, "6 again"),
        (7, 3, "7"),
        (7, 3, "7 again"),
    ]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("tokens", [1, 2, [3, 4]], "[3, 4] in tokens, which must be a list of whole numbers"),
        ("tokens", [1, 2, 2.5], "2.5 in tokens, which must be a list of whole numbers"),
        ("loss_mask", np.array([np.nan]), "nan in loss_mask, which must be a list of whole numbers"),
        ("rollout_log_probs", np.float32(-1), "a float as rollout_log_probs, which must be a list of numbers"),
        ("weight_versions", [None], "None in weight_versions, which must be a list of whole numbers"),
        (
            "tokens",
            [1, 2, -(2**40)],
            "-1099511627776 to 2 in tokens, whose numbers must be from -2147483648 to 2147483647",
        ),
        ("loss_mask", [-1], "-1 to -1 in loss_mask, whose numbers must be from 0 to 1"),
        ("kept_token_ids", 7, "no list of kept_token_ids for 1 tokens"),
        ("status", "completed", "a str as status, which must be a SampleStatus"),
        ("metadata", None, "a NoneType as metadata, which must be a dict"),
        ("response", 5, "a int as response, which must be a str"),
        ("index", "1", "a str as index, which must be a int"),
        ("metadata", {(1, 2): 3}, "metadata, a label, a reward or a response that cannot be stored (keys must be str"),
        ("response", "\ud800", "metadata, a label, a reward or a response that cannot be stored ('utf-8' codec"),
    ],
)
def test_values_of_a_sample_are_checked(name: str, value: Any, problem: str) -> None:
    sample = example_group((1.0,), reward_key=None)[0]
    setattr(sample, name, value)
    assert str(problem_of_sample(sample)).startswith(f"returned {problem}")


def test_other_kinds_of_numbers_can_be_stored() -> None:
    sample = example_group((1.0,), reward_key=None)[0]
    sample.tokens, sample.loss_mask = [1.0, True, np.int64(3)], np.array([True])  # type: ignore[list-item,assignment]
    sample.weight_versions, sample.rollout_log_probs = [np.True_], [0]  # type: ignore[list-item]
    sample.kept_token_ids = [[3, 4]]  # type: ignore[list-item]
    assert problem_of_sample(sample) is None
    same = pyarrow.Table.from_pylist([to_row(sample)], schema=SCHEMA).to_pylist()[0]
    assert (same["tokens"], same["loss_mask"], same["weight_versions"]) == ([1, 1, 3], [1], [1])
    assert (same["rollout_log_probs"], same["kept_token_ids"]) == ([0.0], [[3, 4]])


@pytest.mark.parametrize(("function", "first"), [(None, ["ok"]), ("forgets", ["2"])])
def test_a_sample_can_name_what_writes_it(function: str | None, first: list[str]) -> None:
    rows = write(function, last=HERE + "two_rows")
    assert [row.response for row in rows] == [*first, "7", "7 again"]
    with pytest.raises(PluginError, match="has no function two_row; did you mean"):
        write(function, last=HERE + "two_row")
    with pytest.raises(PluginError, match="5: expected an import path"):
        write(function, last=5)


@pytest.mark.parametrize(
    ("flag", "function", "problem"),
    [
        ("custom_reward_post_process_path", "one_list", "failed|must return two lists"),
        ("custom_convert_samples_to_train_data_path", "wrong_count", "returned 1 rewards for 3 samples"),
        ("custom_convert_samples_to_train_data_path", "one_number", "returned no list of rewards for 3 samples"),
        ("custom_convert_samples_to_train_data_path", "numbered", "returned 0; known columns: tokens"),
        ("custom_convert_samples_to_train_data_path", "no_number", "gave sample 0 .'reward': nan"),
        ("custom_convert_samples_to_train_data_path", "no_raw_reward", "gave sample 0 .* 'raw_reward': None"),
        ("custom_convert_samples_to_train_data_path", "nested", r"returned \[1\] in loss_mask, which must be a list"),
        ("custom_convert_samples_to_train_data_path", "too_long", "a response_length of 5 for sample 0"),
        ("custom_convert_samples_to_train_data_path", "one_log_prob_more", "2 rollout_log_probs for 1 tokens"),
        ("custom_convert_samples_to_train_data_path", "unknown_column", "returned reward; known columns: tokens"),
    ],
)
def test_what_a_hook_gives_the_trainer_is_checked(flag: str, function: str, problem: str) -> None:
    hooks = RolloutHooks(with_values(RunConfig(), {flag: HERE + function}))
    samples = example_group((0.0, 1.0, 1.0), reward_key=None)
    with pytest.raises(PluginError, match=problem):
        asyncio.run(hooks.to_train(samples, to_train_samples([samples])))
    hooks.close()


def test_a_hook_can_give_the_trainer_arrays() -> None:
    hooks = RolloutHooks(with_values(RunConfig(), {"custom_convert_samples_to_train_data_path": HERE + "arrays"}))
    samples = example_group((0.0, 1.0), reward_key=None)
    one, other = asyncio.run(hooks.to_train(samples, to_train_samples([samples])))
    hooks.close()
    for row in (one, other):
        assert row.rollout_log_probs == [-1.5] and row.tokens == [1, 2, 3] and row.loss_mask == [1]
        assert all(type(value) is int for value in (*row.tokens, *row.loss_mask, row.response_length))
    assert one.tokens is not other.tokens  # the hook gave one list for both


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("takes_none", "returned a NoneType; expected a list of groups"),
        ("takes_late", "has the async takes_late; it must be a plain function"),
        ("takes_copies", "must delete from the buffer what it returns"),
    ],
)
def test_what_a_buffer_filter_returns_is_checked(function: str, problem: str) -> None:
    hooks = RolloutHooks(with_values(RunConfig(), {"buffer_filter_path": HERE + function}))
    with pytest.raises(PluginError, match=f"--buffer-filter-path {HERE}{function} .*{problem}"):
        hooks.take_parked([[Sample(index=i)] for i in range(3)], 2)
    hooks.close()


def masks_one(args: Any, groups: list[list[Sample]]) -> None:
    groups[0][0].loss_mask, groups[0][1].reward = np.array([0]), np.float32(2)


def cuts_mask(args: Any, groups: list[list[Sample]]) -> None:
    groups[0][1].loss_mask = []


def empties(args: Any, groups: list[list[Sample]]) -> None:
    groups[0].clear()


def chooses(args: Any, groups: list[list[Sample]]) -> list[Any]:
    return groups[:1]


def chooses_all(args: Any, all_groups: list[list[Sample]], data_source: Any) -> list[Any]:
    return all_groups[:1]


def test_what_a_sample_filter_leaves_is_checked() -> None:
    def after(function: str) -> list[list[Sample]]:
        hooks = RolloutHooks(with_values(RunConfig(), {"rollout_sample_filter_path": HERE + function}))
        groups = [example_group((0.0, 1.0), reward_key=None)]
        try:
            asyncio.run(hooks.finish(groups, groups, None))
        finally:
            hooks.close()
        return groups

    one, other = after("masks_one")[0]
    assert one.loss_mask == [0] and type(one.loss_mask) is list and type(other.reward) is float
    for function, problem in {
        "cuts_mask": r"returned 0 loss_mask for 1 tokens for samples\[0\]\[1\]",
        "empties": "no group may be empty",
        "chooses": "returned a list, which nothing reads",
    }.items():
        with pytest.raises(PluginError, match=f"--rollout-sample-filter-path {HERE}{function} .*{problem}"):
            after(function)
    hooks = RolloutHooks(with_values(RunConfig(), {"rollout_sample_filter_path": HERE + "chooses"}))
    with pytest.raises(PluginError, match="returned a list, which nothing reads"):
        hooks.probe()  # before a model is loaded
    hooks.close()
    hooks = RolloutHooks(with_values(RunConfig(), {"rollout_all_samples_process_path": HERE + "chooses_all"}))
    groups = [example_group((0.0, 1.0), reward_key=None)]
    asyncio.run(hooks.finish(groups, groups, None))  # this one only looks
    hooks.close()


VERDICTS: list[Any] = []


def next_verdict(args: Any, group: list[Sample]) -> Any:
    return VERDICTS.pop()


def test_a_verdict_is_a_truth_value() -> None:
    hooks = RolloutHooks(with_values(RunConfig(), {"dynamic_sampling_filter_path": HERE + "next_verdict"}))

    def reason(verdict: Any) -> str | None:
        VERDICTS.append(verdict)
        return asyncio.run(hooks.drop_reason(example_group((0.0, 1.0), reward_key=None)))

    assert [reason(verdict) for verdict in (True, np.True_, 1, FilterOutput(False, "a/b"))] == [None, None, None, "a_b"]
    for verdict in (None, {"keep": False}, (False, "why"), np.array([1, 0]), FilterOutput("no")):  # type: ignore[arg-type]
        with pytest.raises(PluginError, match="expected True, False or a FilterOutput"):
            reason(verdict)
    hooks.close()


def test_a_wrong_request_of_a_hook_is_its_mistake() -> None:
    async def ask(prompt: Any, **sampling: Any) -> None:
        state = GenerateState(None, EngineClient(FakeGenerator()), noise_key=1, max_context_len=9)
        await state.generate(prompt, {"max_new_tokens": 1, **sampling})

    for prompt, sampling in (("text", {}), ([1.5], {}), ([1], {"stop": "END"}), ([1], {"stop": None})):
        with pytest.raises(TypeError, match="stop must be a list of texts|cannot be interpreted as an integer"):
            asyncio.run(ask(prompt, **sampling))


def test_a_row_leads_back_to_its_prompt_whatever_a_hook_writes_into_its_metadata() -> None:
    hooks = RolloutHooks(with_values(RunConfig(), {"custom_generate_function_path": HERE + "forgets"}))
    group = [Sample(index=6, tokens=[1], metadata={"prompt_row": 4, "prompt_set": 1})]

    async def run() -> None:
        sampling = SamplingParams(max_new_tokens=4)
        await hooks.write(EngineClient(FakeGenerator()), group, group[0], sampling, noise_key=1, max_context_len=9)

    asyncio.run(run())
    hooks.close()
    assert group[0].metadata == {"mine": 1, "prompt_row": 4, "prompt_set": 1}


def test_a_reward_that_came_with_the_answer_stays() -> None:
    group = [Sample(index=i, tokens=[1], reward=reward) for i, reward in enumerate((0.25, None))]
    scored: list[int] = []

    async def done(sample: Sample) -> None:
        sample.status = SampleStatus.COMPLETED

    async def score(samples: list[Sample]) -> None:
        scored.extend(sample.index for sample in samples)

    asyncio.run(write_group(group, generate=done, score=score))
    assert scored == [1] and group[0].reward == 0.25
