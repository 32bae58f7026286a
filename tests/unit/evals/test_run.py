from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from miles.config.flags import with_values
from miles.config.sections import DataConfig, EvalConfig, RewardConfig, RolloutConfig, RunConfig
from miles.data.prompts import PromptSet
from miles.errors import ConfigError, DataError, RewardError
from miles.evals.run import EvalResult, evaluate, from_function
from miles.evals.suites import EvalSuite, eval_sampling, load_suites
from miles.observe import names
from miles.rollout.client import EngineClient
from miles.rollout.hook_inputs import EvalSkip
from miles.rollout.hooks import RolloutHooks
from miles.rollout.noise import noise_key
from miles.rollout.producer import RolloutContext
from miles.rollout.rewards import RewardRunner
from miles.text.tokenizer import load_tokenizer
from miles.types import FinishReason, GenerationRequest, GenerationResult, Sample, SampleStatus
from tests.unit.rollout.fake_generator import FakeGenerator, stopped
from tests.unit.text.tiny_tokenizer import write_tokenizer

CONFIG = RunConfig(
    data=DataConfig(rollout_seed=5),
    rollout=RolloutConfig(rollout_max_response_len=8, rollout_top_p=1.0),
    reward=RewardConfig(rm_type="math"),
    eval=EvalConfig(n_samples_per_eval_prompt=2, eval_temperature=0.0, eval_top_p=0.5, eval_max_response_len=99),
)


def suite(name: str, labels: list[str]) -> EvalSuite:
    prompts = [Sample(prompt=f"{name} {i}", tokens=[i, i], label=label) for i, label in enumerate(labels)]
    return EvalSuite(name, PromptSet(Path("x.jsonl"), prompts, 0), eval_sampling(CONFIG), 2)


def run(generator: FakeGenerator, suites: list[EvalSuite], config: RunConfig = CONFIG) -> EvalResult:
    context = RolloutContext(config, EngineClient(generator), RewardRunner(config), RolloutHooks(config), 200)
    return asyncio.run(evaluate(suites, context))


def answer_seven(request: GenerationRequest) -> GenerationResult:
    result = stopped(request, text="#### 7", num_tokens=3)
    if request.request_id == 0:
        result.finish_reason = FinishReason.LENGTH
    return result


def test_sets_are_scored_apart_with_every_metric_named() -> None:
    generator = FakeGenerator(answer_seven)
    result = run(generator, [suite("easy", ["7", "8"]), suite("hard", ["8"])])
    assert result.metrics["eval/easy"] == 0.5 and result.metrics["eval/hard"] == 0.0
    assert result.metrics["eval/easy-truncated_ratio"] == 0.25
    assert result.metrics["eval/easy-none_reward_ratio"] == 0.0
    assert result.metrics["eval/easy/response_len/mean"] == 3.0
    assert result.metrics["eval/easy/num_answers"] == 4.0
    for name in result.metrics:
        names.describe(name)
    assert [(s.label, s.reward, s.index) for s in result.samples["easy"]] == [
        ("7", 1, 0),
        ("7", 1, 1),
        ("8", 0, 2),
        ("8", 0, 3),
    ]


def test_an_evaluation_is_one_submit_with_its_own_sampling_and_noise_the_same_each_time() -> None:
    generator = FakeGenerator(answer_seven)
    suites = [suite("easy", ["7"]), suite("hard", ["8"])]
    run(generator, suites)
    (submit,) = generator.submits
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.max_new_tokens) for r in submit} == {(0.0, 0.5, 99)}
    keys = [r.noise_key for r in submit]
    assert len(set(keys)) == 4
    assert not set(keys) & {
        noise_key(5, rollout, group, i) for rollout in range(9) for group in range(9) for i in (0, 1)
    }
    again = FakeGenerator(answer_seven)
    run(again, suites)
    assert [r.noise_key for r in again.submits[0]] == keys
    assert suites[0].data.prompts[0].response == ""  # the set itself is not written to


def test_an_answer_that_failed_counts_as_none_and_as_zero() -> None:
    def answer(request: GenerationRequest) -> GenerationResult:
        if request.request_id == 1:
            return GenerationResult(request.request_id, [], [], [], FinishReason.ERROR, error="no room")
        return answer_seven(request)

    result = run(FakeGenerator(answer), [suite("easy", ["7", "7"])])
    assert result.metrics["eval/easy"] == 0.75
    assert result.metrics["eval/easy-none_reward_ratio"] == 0.25


def test_eval_flags_default_to_those_of_the_rollout() -> None:
    rollout = RolloutConfig(rollout_temperature=0.7, rollout_top_k=5, rollout_stop=("x",), rollout_max_response_len=3)
    sampling = eval_sampling(RunConfig(rollout=rollout))
    assert (sampling.temperature, sampling.top_k, sampling.stop, sampling.max_new_tokens) == (0.7, 5, ("x",), 3)
    greedy = eval_sampling(RunConfig(rollout=rollout, eval=EvalConfig(eval_temperature=0.0)))
    assert greedy.temperature == 0.0


def test_sets_are_loaded_with_their_own_keys_and_errors_name_their_flag(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t"))
    file = tmp_path / "e.jsonl"
    file.write_text("".join(json.dumps({"q": f"{i} + 2", "a": i}) + "\n" for i in range(5)))

    def load(name: str, **keys: str) -> list[EvalSuite]:
        config = RunConfig(eval=EvalConfig(eval_prompt_data=(name, f"{file}@[:2]"), **keys))
        return load_suites(config, tokenizer, max_context_len=50, check_label=None)

    (loaded,) = load("small", eval_input_key="q", eval_label_key="a")
    assert (loaded.name, [s.label for s in loaded.data.prompts]) == ("small", [0, 1])
    with pytest.raises(
        DataError, match=r"--eval-prompt-data small: 2 of 2 rows.*\n.*no column 'question' \(--eval-input-key\)"
    ):
        load("small", eval_input_key="question")
    with pytest.raises(ConfigError, match="use no slash"):
        load("a/b", eval_input_key="q")


async def two_numbers(args: object, sample: Sample) -> dict[str, float]:
    return {"shaped": 0.25, "acc": float("7" in sample.response)}


def test_an_evaluation_can_report_another_field_of_the_reward_than_training() -> None:
    flags = {"custom_rm_path": f"{__name__}.two_numbers", "rm_type": None, "reward_key": "shaped"}
    config = with_values(CONFIG, flags)
    assert run(FakeGenerator(answer_seven), [suite("easy", ["7"])], config).metrics["eval/easy"] == 0.25
    config = with_values(config, {"eval_reward_key": "acc"})
    assert run(FakeGenerator(answer_seven), [suite("easy", ["7"])], config).metrics["eval/easy"] == 1.0
    config = with_values(config, {"eval_reward_key": "accuracy"})
    with pytest.raises(RewardError, match=r"dict without 'accuracy' .* for sample 0 of set easy \(--eval-reward-key\)"):
        run(FakeGenerator(answer_seven), [suite("easy", ["7"])], config)


def fork(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """A first row that is wrong and a last one that says 7."""
    ended = {"response_length": 2, "tokens": [*sample.tokens, 8, 9], "status": SampleStatus.COMPLETED}
    return [dataclasses.replace(sample, response=f"#### {number}", **ended) for number in (6, 7)]


def test_an_answer_of_several_rows_counts_once() -> None:
    config = with_values(CONFIG, {"custom_generate_function_path": f"{__name__}.fork"})
    result = run(FakeGenerator(), [suite("easy", ["7", "8"])], config)
    assert result.metrics["eval/easy"] == 0.5 and result.metrics["eval/easy/num_answers"] == 4.0
    assert result.metrics["eval/easy-avg@2"] == 0.5 and len(result.samples["easy"]) == 8


@pytest.mark.parametrize(
    ("reason", "name"),
    [("Warm up!", "warm_up"), ("a\nb/c", "a_b_c"), ("", "custom"), (None, "none"), ("x" * 99, "x" * 60)],
)
def test_any_reason_to_leave_an_evaluation_out_makes_a_short_name(reason: Any, name: str) -> None:
    assert from_function(EvalSkip(reason)).metrics == {f"eval/skipped_{name}": 1.0}
