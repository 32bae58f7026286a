from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from miles.config.flags import Args, with_values
from miles.config.rules import rule_violations
from miles.config.sections import DataConfig, RewardConfig, RolloutConfig, RunConfig
from miles.data.buffer import GroupBuffer
from miles.data.source import PromptSource
from miles.errors import PluginError, TrainError
from miles.observe import names
from miles.rollout.client import EngineClient
from miles.rollout.filter_hub import common_filters, dynamic_sampling_filters
from miles.rollout.hooks import RolloutHooks
from miles.rollout.producer import Producer, RolloutContext
from miles.rollout.rewards import RewardRunner
from miles.types import GenerationRequest, GenerationResult, Sample
from tests.unit.rollout.fake_generator import FakeGenerator, stopped

STD = "miles.rollout.filter_hub.common_filters.apply_reward_nonzero_std_filter"
OLD_STD = "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
CONFIG = RunConfig(
    data=DataConfig(rollout_seed=5),
    rollout=RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2, dynamic_sampling_filter_path=STD),
    reward=RewardConfig(custom_rm_path="tests.unit.rollout.test_filters.reward_of_text"),
)


def reward_of_text(args: Any, sample: Sample) -> float:
    return float(sample.response)


def boom(args: Any, group: list[Sample]) -> bool:
    return bool(group[5])


ABORTED: list[int] = []
GO_ON = threading.Event()  # holds `abort`, and with it the thread of the hooks, while it is not set
GO_ON.set()


def program(base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> None:
    """An agent that is only there for the `abort` beside it."""


async def abort(args: Any) -> None:
    ABORTED.append(args.rollout_batch_size)
    GO_ON.wait(2)


async def keep_async(args: Any, group: list[Sample]) -> bool:
    return args.n_samples_per_prompt == 2


def by_prompt(rewards: dict[int, tuple[float, float]]) -> Any:
    """Two answers of prompt p get these rewards; others 0 and 1."""
    members: dict[int, int] = {}

    def answer(request: GenerationRequest) -> GenerationResult:
        prompt = request.prompt_ids[0]
        member = members[prompt] = members.get(prompt, -1) + 1
        return stopped(request, text=str(rewards.get(prompt, (0.0, 1.0))[member % 2]))

    return answer


def make_producer(generator: FakeGenerator, num_prompts: int = 12, **values: Any) -> tuple[Producer, GroupBuffer]:
    config = with_values(CONFIG, values)
    prompts = [Sample(prompt=f"p{i}", tokens=[i], label=str(i)) for i in range(num_prompts)]
    buffer = GroupBuffer(PromptSource(prompts, n_samples_per_prompt=2, seed=5, shuffle=False))
    context = RolloutContext(config, EngineClient(generator), RewardRunner(config), RolloutHooks(config), 5000)
    return Producer(context, buffer), buffer


def scored(reward: Any, **fields: Any) -> Sample:
    return Sample(reward=reward, **fields)


def verdict(group: list[Sample], reward_key: str | None = None) -> common_filters.FilterOutput:
    args = Args(with_values(CONFIG, {"reward_key": reward_key}))
    return common_filters.apply_reward_nonzero_std_filter(args, group)


def test_field_note_17_a_shaped_reward_does_not_save_a_group_of_wrong_answers() -> None:
    shaped = [scored({"score": score, "acc": 0}) for score in (0, -0.2, -0.5, -1)]
    assert verdict(shaped, "score") == common_filters.FilterOutput(False, "zero_std_0.0")
    shaped[2].reward = {"score": 0.5, "acc": 1}
    assert verdict(shaped, "score").keep
    assert verdict([scored(1), scored(1.0)]).reason == "zero_std_1.0"


def test_field_note_17_with_a_weighted_sum_its_first_part_decides() -> None:
    config = with_values(CONFIG, {"custom_rm_path": None, "rm_type": "exact+0.5*f1"})
    rewards = RewardRunner(config)
    group = [Sample(prompt="p", label="blue sky", response=text) for text in ("blue sea", "x")]
    try:
        asyncio.run(rewards.score_group(group))
    finally:
        rewards.close()
    assert group[0].reward != group[1].reward
    assert verdict(group).reason == "zero_std_0.0"


def test_the_older_public_path_is_the_same_filter() -> None:
    assert dynamic_sampling_filters.check_reward_nonzero_std is common_filters.apply_reward_nonzero_std_filter
    RolloutHooks(with_values(CONFIG, {"dynamic_sampling_filter_path": OLD_STD})).probe()


def test_dropped_groups_are_replaced_counted_by_reason_and_what_is_trained_on_follows_the_data() -> None:
    generator = FakeGenerator(by_prompt({0: (1.0, 1.0), 2: (0.0, 0.0)}))
    producer, buffer = make_producer(generator)
    groups = asyncio.run(producer.collect(0))
    assert [group[0].group_index for group in groups] == [1, 3]
    counts = producer.counts
    assert counts["rollout/dynamic_filter/drop_zero_std_1.0"] == 1.0
    assert counts["rollout/dynamic_filter/drop_zero_std_0.0"] == 1.0
    assert counts["rollout/raw_reward_unfiltered"] == (1 + 1 + 0 + 1) / 4  # of the first two groups
    assert counts["rollout/num_groups_submitted"] == 5.0
    assert buffer.drop_rate == 0.5
    for name in counts:
        names.describe(name)


def test_admission_does_not_depend_on_when_groups_finish() -> None:
    """Group 0 is slow; the ones behind it would be enough, but it comes first."""

    async def run() -> list[int]:
        generator = FakeGenerator(by_prompt({}), hold=[0])
        producer, buffer = make_producer(generator, over_sampling_batch_size=4)
        collecting = asyncio.create_task(producer.collect(0))
        await asyncio.sleep(0.05)
        assert not collecting.done()
        generator.release(0)
        groups = await collecting
        assert [group[0].group_index for group in buffer.next(2)] == [2, 3]  # not needed: they come next
        return [group[0].group_index for group in groups]

    assert asyncio.run(run()) == [0, 1]


def test_surplus_requests_are_stopped_at_once_and_their_prompts_come_again_untouched() -> None:
    async def run() -> None:
        generator = FakeGenerator(by_prompt({}), hold=[5, 6])
        agent = {"custom_agent_function_path": f"{__name__}.program"}
        producer, buffer = make_producer(generator, over_sampling_batch_size=4, **agent)
        ABORTED.clear()
        groups = await producer.collect(0)
        assert [group[0].group_index for group in groups] == [0, 1]
        assert ABORTED == [2]  # the function beside the agent was told, once
        assert sorted(generator.aborted) == [5, 6] and generator.in_flight == {}
        assert len(asyncio.all_tasks()) == 1
        assert producer.counts["rollout/num_aborted"] == 2.0
        assert producer.counts["rollout/wasted_token_ratio"] == 4 / 12
        assert len(buffer) == 2
        again = await producer.collect(1)
        assert [group[0].group_index for group in again] == [2, 3]
        assert all(s.tokens[:1] == [s.group_index] and s.response_length == 2 for group in again for s in group)

    asyncio.run(run())


def test_an_abort_that_does_not_return_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles.rollout.hooks.LET_GO_S", 0.05)
    generator = FakeGenerator(by_prompt({}), hold=[5, 6])
    producer, _ = make_producer(generator, over_sampling_batch_size=4, custom_agent_function_path=f"{__name__}.program")
    GO_ON.clear()
    try:
        with pytest.raises(PluginError, match=rf"--custom-agent-function-path {__name__}.abort was told .* 0.05 s"):
            asyncio.run(producer.collect(0))
    finally:
        GO_ON.set()


def test_auto_submits_by_the_drop_rate_and_a_resumed_run_knows_it() -> None:
    generator = FakeGenerator(by_prompt({}))
    producer, buffer = make_producer(generator)
    buffer.load_state_dict({**buffer.state_dict(), "drop_rate": 0.5})
    asyncio.run(producer.collect(0))
    assert [len(submit) for submit in generator.submits] == [8]  # 4 groups are expected to do
    assert buffer.state_dict()["drop_rate"] == 0.35


def test_a_dropped_group_is_replaced_while_others_are_still_written() -> None:
    async def run() -> None:
        generator = FakeGenerator(by_prompt({0: (1.0, 1.0)}), hold=[2])
        producer, _ = make_producer(generator)
        collecting = asyncio.create_task(producer.collect(0))
        await asyncio.sleep(0.05)
        asked = [request.prompt_ids[0] for submit in generator.submits[1:] for request in submit[::2]]
        assert asked == [2, 3]  # by one drop among so few groups, one more is not expected to do
        generator.release(2)
        groups = await collecting
        assert [group[0].group_index for group in groups] == [1, 2]

    asyncio.run(run())


def test_a_filter_that_drops_everything_ends_the_run() -> None:
    generator = FakeGenerator(by_prompt({prompt: (0.0, 0.0) for prompt in range(12)}))
    producer, _ = make_producer(generator)
    with pytest.raises(TrainError, match=r"dropped [67]\d groups \([67]\d for zero_std_0.0\).*too hard or too easy"):
        asyncio.run(producer.collect(0))


def test_filters_are_plain_or_async_and_found_wrong_before_the_run() -> None:
    name = "dynamic_sampling_filter_path"
    RolloutHooks(with_values(CONFIG, {name: "tests.unit.rollout.test_filters.keep_async"})).probe()
    with pytest.raises(PluginError, match=r"-filter-path .*boom failed: .*test_filters.py:\d+: Index"):
        RolloutHooks(with_values(CONFIG, {name: "tests.unit.rollout.test_filters.boom"})).probe()
    with pytest.raises(PluginError, match="did you mean common_filters|has no function"):
        RolloutHooks(with_values(CONFIG, {name: STD + "x"}))


def test_rules_of_over_sampling() -> None:
    def complaints(**values: Any) -> str:
        return " ".join(rule_violations(with_values(CONFIG, values)))

    assert "over-sampling" not in complaints(over_sampling_batch_size=3)
    assert "must be at least --rollout-batch-size 2" in complaints(over_sampling_batch_size=1)
    plain = {"dynamic_sampling_filter_path": None, "over_sampling_batch_size": 3}
    assert "needs --dynamic-sampling-filter-path or --partial-rollout" in complaints(**plain)
    assert "--mask-offpolicy-in-partial-rollout needs" in complaints(mask_offpolicy_in_partial_rollout=True)
