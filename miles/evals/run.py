"""Evaluate the current weights: on the engine that trains, with draws of its own."""

from __future__ import annotations

import copy
import re
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from miles.evals.passk import pass_metrics
from miles.evals.suites import EvalSuite
from miles.rollout.group import WrittenGroup, write_group
from miles.rollout.hook_inputs import EvalSkip, RolloutFnEvalOutput
from miles.rollout.metrics import has_repetition, mean, summary
from miles.rollout.noise import EVAL_STREAM, noise_key
from miles.rollout.producer import RolloutContext, check_failures, run_all_or_none
from miles.rollout.reward_value import checked_reward, raw_accuracy, reward_value
from miles.types import Sample, SampleStatus


@dataclass(frozen=True, slots=True)
class EvalResult:
    """`metrics` under their names; `samples` by set, with the ones that failed, for saving."""

    metrics: dict[str, float]
    samples: dict[str, list[Sample]]


async def evaluate(suites: Sequence[EvalSuite], context: RolloutContext) -> EvalResult:
    """Answer and score every prompt of every set, all in one batch.

    An answer is drawn with the same noise in every evaluation of a run, so that two of them differ by the weights
    only, and never with the noise of a training answer. Raises `EngineError` and `RewardError` like a rollout.
    """
    config, client, limit = context.config, context.client, context.max_context_len
    samples = {suite.name: _unanswered(suite) for suite in suites}
    samplings = {suite.name: suite.sampling for suite in suites}

    def start(name: str, group: list[Sample]) -> Coroutine[Any, Any, WrittenGroup]:
        first = group[0].index

        def write(sample: Sample) -> Coroutine[Any, Any, str | None]:
            stream = f"{EVAL_STREAM}/{name}"
            key = noise_key(config.data.rollout_seed, 0, sample.group_index, sample.index - first, stream=stream)
            return context.hooks.write(
                client, group, sample, samplings[name], noise_key=key, max_context_len=limit, evaluation=True
            )

        return write_group(group, generate=write, score=context.rewards.score_group)

    groups = [start(name, group) for name, of_set in samples.items() for group in of_set]
    written = await run_all_or_none(groups, client=client, progress=context.progress)
    check_failures(written, what="evaluation")
    context.rewards.end_batch([sample for group in written for sample in group.samples])
    flat = {name: [sample for group in of_set for sample in group] for name, of_set in samples.items()}
    # an answer of several rows is what its last one says
    answers = {
        name: [list({s.index: s for s in group}.values()) for group in of_set] for name, of_set in samples.items()
    }
    metrics: dict[str, float] = {}
    reward_key = config.eval.eval_reward_key or config.reward.reward_key
    for name, of_set in answers.items():
        counted = [sample for group in of_set for sample in group]
        for sample in counted:
            if isinstance(sample.reward, dict):
                source, who = "the reward", f"sample {sample.index} of set {name} (--eval-reward-key)"
                checked_reward(sample.reward, reward_key=reward_key, source=source, who=who)
        metrics |= _metrics(f"eval/{name}", counted, reward_key=reward_key)
        rights = [_rights(group, reward_key) for group in of_set]
        metrics |= {f"eval/{name}-{kind}": value for kind, value in pass_metrics(rights).items()}
    return EvalResult(metrics, flat)


def from_function(output: RolloutFnEvalOutput | EvalSkip) -> EvalResult:
    """The result of an evaluation by a hook: the mean reward of each set, and its own metrics."""
    if isinstance(output, EvalSkip):
        reason = re.sub("[^a-z0-9]+", "_", str(output.reason).lower()).strip("_")[:60]
        return EvalResult({f"eval/skipped_{reason or 'custom'}": 1.0}, {})
    means = {f"eval/{name}": mean(data["rewards"]) for name, data in output.data.items()}
    return EvalResult(means | output.metrics, {name: data.get("samples", []) for name, data in output.data.items()})


def _unanswered(suite: EvalSuite) -> list[list[Sample]]:
    groups = []
    for group_index, prompt in enumerate(suite.data.prompts):
        group = [copy.deepcopy(prompt) for _ in range(suite.num_answers)]
        for member, sample in enumerate(group):
            sample.group_index = group_index
            sample.index = group_index * suite.num_answers + member
        groups.append(group)
    return groups


def _rights(group: Sequence[Sample], reward_key: str | None) -> tuple[int, int]:
    """Answers of a prompt, and those that are right; what could not be graded is not."""
    scored = [sample for sample in group if sample.reward is not None]
    return len(group), sum(raw_accuracy(sample, reward_key) >= 1 for sample in scored)


def _metrics(name: str, samples: Sequence[Sample], *, reward_key: str | None) -> dict[str, float]:
    rewards = [reward_value(sample, reward_key) for sample in samples if sample.reward is not None]
    return {
        name: sum(rewards) / len(samples),
        f"{name}-none_reward_ratio": 1 - len(rewards) / len(samples),
        f"{name}-truncated_ratio": mean(sample.status is SampleStatus.TRUNCATED for sample in samples),
        **summary(f"{name}/response_len", [sample.response_length for sample in samples]),
        f"{name}/repetition_frac": mean(has_repetition(sample.response) for sample in samples),
        f"{name}/num_answers": float(len(samples)),
    }
