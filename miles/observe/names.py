"""Every metric: its unit and what it means. A name that is not here fails where it is logged.

`<...>` in a name stands for one part that varies and has no slash in it: `rollout/zero_std/count_<reward>`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    unit: str
    meaning: str


def _stats(name: str, unit: str, meaning: str) -> dict[str, Metric]:
    return {f"{name}/{kind}": Metric(unit, f"{meaning}: {kind}") for kind in ("mean", "median", "max", "min")}


_ROLLOUT: dict[str, Metric] = {
    **_stats("rollout/response_len", "tokens", "trainable tokens of an answer (sum of its loss mask)"),
    "rollout/response_lengths": Metric("tokens", "mean length of the answers, masked tokens included"),
    "rollout/total_lengths": Metric("tokens", "mean length of prompt and answer"),
    "rollout/raw_reward": Metric("reward", "mean of the rewards as graded"),
    "rollout/rewards": Metric("advantage", "mean of the rewards after normalisation in their group"),
    "rollout/truncated": Metric("share", "answers that met a length limit, as the trainer saw them"),
    "rollout/truncated_ratio": Metric("share", "answers that met a length limit, as the engine reported them"),
    "rollout/repetition_frac": Metric("share", "answers longer than 10,000 characters whose end repeats itself"),
    "rollout/log_probs": Metric("nat", "old log-prob of a token: mean over an answer's tokens, then over answers"),
    "rollout/rollout_log_probs": Metric("nat", "the engine's log-prob of a token, averaged alike"),
    "rollout/ref_log_probs": Metric("nat", "the reference model's log-prob of a token, averaged alike"),
    "rollout/teacher_log_probs": Metric("nat", "the teacher's log-prob of a token, averaged alike"),
    "rollout/opd_reverse_kl": Metric("nat", "policy minus teacher log-prob of a token, averaged alike"),
    "rollout/values": Metric("reward", "the critic's value of a token, averaged alike"),
    "rollout/no_signal_group_ratio": Metric("share", "groups without any advantage: they teach nothing"),
    "rollout/no_signal_ratio": Metric("share", "answers without any advantage"),
    "rollout/max_sample_age": Metric("versions", "age of the oldest trained token when it was trained on"),
    "rollout/entropy": Metric("nat", "entropy of the old policy per token, averaged alike"),
    "rollout/advantages": Metric("advantage", "advantage of a token, averaged alike"),
    "rollout/returns": Metric("reward", "return of a token, averaged alike"),
    "rollout/zero_std/count_<reward>": Metric("groups", "groups whose rewards are all equal to this one"),
    "rollout/zero_std/all_zero_percentage": Metric("share", "groups whose rewards are all 0"),
    "rollout/zero_std/all_one_percentage": Metric("share", "groups whose rewards are all 1"),
    **_stats("rollout/weight_version", "version", "oldest weight version of an answer"),
    "rollout/weight_version/mixed_version_ratio": Metric("share", "answers written with more than one weight version"),
    "rollout/prefix_cache_hit_rate": Metric("share", "prompt tokens served from the prefix index"),
    "rollout/avg_cached_tokens_per_sample": Metric("tokens", "prompt tokens of an answer served from the prefix index"),
    "rollout/custom_<name>": Metric("", "a number of --rollout-function-path"),
    "rollout/error_cat/<category>": Metric("share", "answers in this category of the reward"),
    "rollout/dynamic_filter/drop_<reason>": Metric("groups", "groups dropped in this rollout for this reason"),
    "rollout/raw_reward_unfiltered": Metric(
        "reward", "mean over the first groups that were submitted, all completed, before the filter"
    ),
    "rollout/num_groups_submitted": Metric("groups", "groups that the engine was asked for in this rollout"),
    "rollout/num_groups_continued": Metric("groups", "groups that an earlier rollout had begun"),
    "rollout/wasted_token_ratio": Metric("share", "tokens written in this rollout that nobody needs"),
    "rollout/num_turns": Metric("turns", "turns of an answer with tools"),
    "rollout/tool_token_ratio": Metric("share", "response tokens that tools wrote; they are not trained on"),
    "rollout/model_token_ratio": Metric("share", "response tokens that the model wrote"),
    "rollout/num_failed": Metric("answers", "answers that could not be written or graded"),
    "rollout/num_unscored": Metric("answers", "answers without a finite reward; they get advantage 0"),
    "rollout/num_aborted": Metric("answers", "answers cut off because the rollout had enough"),
    "rollout/num_retracted": Metric("answers", "answers put back and recomputed because the KV cache was full"),
    "rollout/num_prompts_too_long": Metric("prompts", "prompts left out so far because they are too long"),
    "rollout/grader_timeouts": Metric("answers", "answers whose grading met its deadline; they count as wrong"),
    "rollout/grader_errors": Metric("answers", "answers whose grader raised or died; wrong, 0 or dropped"),
    "rollout/watch_reward": Metric("reward", "mean of the reward of --rm-watch-type, which is not trained on"),
    "rollout/duplicate_ratio": Metric("share", "answers equal to an earlier answer of their group"),
    "rollout/epoch": Metric("epochs", "passes over the prompts begun, counted from 0"),
    "rollout/step": Metric("rollouts", "rollout id"),
    "passrate/pass@<k>": Metric("share", "unbiased estimate that at least one of k answers has reward 1"),
}

_TRAIN: dict[str, Metric] = {
    "train/loss": Metric("loss", "what was minimised"),
    "train/pg_loss": Metric("loss", "clipped policy-gradient loss"),
    "train/sft_loss": Metric("nat", "negative log-prob of the target tokens"),
    "train/entropy_loss": Metric("nat", "entropy of the policy per token"),
    "train/kl_loss": Metric("nat", "estimate of the KL to the reference model"),
    "train/pg_clipfrac": Metric("share", "tokens where the clipped loss exceeds the unclipped one"),
    "train/ppo_kl": Metric("nat", "mean of old minus new log-prob"),
    "train/ess_ratio": Metric("share", "effective sample size of an answer's token weights, over its length"),
    "train/ois": Metric("ratio", "mean ratio of new to old probability"),
    "train/ratio_min": Metric("ratio", "lowest ratio of new to old probability"),
    "train/ratio_max": Metric("ratio", "highest ratio of new to old probability"),
    "train/tis": Metric("weight", "mean off-policy weight of a token"),
    "train/tis_abs": Metric("ratio", "mean distance from 1 of the ratio that the weights are made of"),
    "train/tis_clipfrac": Metric("share", "tokens whose off-policy weight met a limit"),
    "train/tis_ess": Metric("share", "effective sample size of an answer's off-policy weights, over its length"),
    "train/veto_frac": Metric("share", "tokens of answers that --veto-threshold dropped"),
    "train/opsm_clipfrac": Metric("share", "tokens that --use-opsm dropped"),
    "train/opd_reverse_kl": Metric("nat", "KL of the policy to the teacher over the teacher's most likely tokens"),
    "train/custom_<name>": Metric("custom", "what a loss or a correction of the user returned by this name"),
    "train/value_loss": Metric("loss", "clipped squared error of the critic"),
    "train/value_clipfrac": Metric("share", "tokens where the clipped squared error exceeds the plain one"),
    "train/critic_grad_norm": Metric("norm", "L2 norm of the critic's gradient before clipping"),
    "train/critic_lr": Metric("rate", "learning rate of the critic"),
    "train/check_ppo_kl": Metric("nat", "first step: mean log-ratio of answers packed together and alone"),
    "train/check_clipfrac": Metric("share", "first step: tokens of these whose ratio is outside of the clip range"),
    "train/check_gap_max": Metric("nat", "first step: largest distance of their two log-probs"),
    "train/train_rollout_logprob_abs_diff": Metric("nat", "mean distance of the trainer's and the engine's log-prob"),
    "train/train_rollout_logprob_abs_diff_p99": Metric("nat", "99th percentile of that distance"),
    "train/train_rollout_logprob_abs_diff_max": Metric("nat", "maximum of that distance"),
    "train/train_rollout_kl": Metric("nat", "k3 estimate of the KL between engine and trainer"),
    "train/grad_norm": Metric("norm", "L2 norm of the gradient before clipping"),
    "train/lr-pg_<i>": Metric("rate", "learning rate of this parameter group"),
    "train/num_tokens": Metric("tokens", "trained tokens of the optimizer step"),
    "train/num_samples": Metric("answers", "answers of the optimizer step"),
    "train/num_micro_batches": Metric("batches", "forward and backward passes of the optimizer step"),
    "train/num_skipped_steps": Metric(
        "steps", "optimizer steps that updated nothing (no trained token, or --on-not-finite skip)"
    ),
    "train/num_not_finite": Metric("answers", "answers that are nan or inf and were skipped by --on-not-finite"),
    "train/tflop": Metric(
        "TFLOP", "matrix products and attention of the step, forward and backward; layers computed again count once"
    ),
    "train/step": Metric("steps", "optimizer step, counted from 0"),
}

_PERF_PHASES = {
    "rollout": "writing and grading the answers of a rollout",
    "generate": "writing the answers",
    "reward": "grading after the last answer was written",
    "sleep": "moving the trainer's states to the host",
    "wake_up": "taking the trainer's states back",
    "data_preprocess": "packing and moving the batch",
    "log_probs": "scoring the answers with the old policy",
    "ref_log_probs": "scoring the answers with the reference model",
    "teacher_log_probs": "scoring the answers with the teacher",
    "values": "scoring the answers with the critic",
    "critic_train": "forward, backward and optimizer of the critic",
    "actor_train": "forward, backward and optimizer",
    "train": "all of training",
    "train_wait": "waiting of the trainer for a rollout",
    "update_weights": "giving the engine the new weights",
    "finalize_and_resume_engines": "releasing the engine's memory before training and taking it back after it",
    "eval": "evaluating",
    "save_model": "saving a checkpoint",
    "export_hf": "exporting a Hugging Face folder",
    "paused": "pauses for heat, which are part of the other times",
    "step": "waiting and training: the whole step",
}

_PERF: dict[str, Metric] = {
    **{f"perf/{phase}_time": Metric("s", meaning) for phase, meaning in _PERF_PHASES.items()},
    "perf/tool_time": Metric("s", "time of the tool calls of an answer, part of the rollout's"),
    "perf/wait_time_ratio": Metric("share", "waiting of the trainer over the step"),
    "perf/tokens_per_gpu_per_sec": Metric("tokens/s", "tokens of all answers over rollout time and devices"),
    "perf/effective_tokens_per_gpu_per_sec": Metric("tokens/s", "the same for trainable tokens"),
    "perf/longest_sample_tokens_per_sec": Metric("tokens/s", "tokens of the longest answer over rollout time"),
    "perf/longest_effective_sample_tokens_per_sec": Metric("tokens/s", "the same for trainable tokens"),
    "perf/log_probs_tflops": Metric("TFLOP/s", "scoring with the old policy; a shared prompt counts for each answer"),
    "perf/ref_log_probs_tflops": Metric("TFLOP/s", "scoring with the reference model, counted alike"),
    "perf/actor_train_tflops": Metric("TFLOP/s", "speed of forward and backward"),
    "perf/actor_train_tok_per_s": Metric("tokens/s", "trained tokens, prompts included, over training time"),
    "perf/mfu_peak_tflops": Metric("TFLOP/s", "rate of a large matrix product, measured at start"),
    "perf/rollout_mfu": Metric("share", "FLOPs of prompts and answers over rollout time and the measured matrix rate"),
    "perf/rollout_bandwidth_share": Metric("share", "bytes that decoding must read over time and measured copy rate"),
    "perf/actor_train_mfu": Metric("share", "executed FLOPs of training, attention included, over that rate"),
    "perf/offloaded_gb": Metric("GB", "memory of the GPU that --offload-train has freed while answers are written"),
    "perf/peak_memory_gb": Metric("GB", "highest memory of the worker so far"),
}

_EVAL_PER_SET = {
    "": Metric("reward", "mean reward of the set; a missing reward counts 0"),
    "-none_reward_ratio": Metric("share", "answers without a reward"),
    "-truncated_ratio": Metric("share", "answers that met a length limit"),
    "-pass@<k>": Metric("share", "unbiased estimate that at least one of k answers has reward 1"),
    "-pass@<k>_ci95": Metric("share", "half of its 95 percent interval over prompts"),
    "-avg@<k>": Metric("share", "answers with reward 1: mean over prompts with k answers each"),
    "-avg@<k>_ci95": Metric("share", "half of its 95 percent interval over prompts"),
}

_EVAL: dict[str, Metric] = {
    "eval/step": Metric("rollouts", "rollouts trained on when the evaluation began"),
    "eval/duration_seconds": Metric("s", "time of the evaluation"),
    **{f"eval/<set>{suffix}": metric for suffix, metric in _EVAL_PER_SET.items()},
    **_stats("eval/<set>/response_len", "tokens", "length of an answer of the set"),
    "eval/<set>/repetition_frac": Metric("share", "answers longer than 10,000 characters whose end repeats itself"),
    "eval/<set>/truncated_ratio": Metric("share", "answers that met a length limit"),
    "eval/<set>/num_answers": Metric("answers", "answers graded"),
    "eval/skipped_<reason>": Metric("evaluations", "1 where --eval-function-path left one out with EvalSkip"),
}

METRICS: dict[str, Metric] = {**_ROLLOUT, **_TRAIN, **_PERF, **_EVAL}


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<[^>]+>", name)
    return re.compile(r"[^/]+".join(re.escape(part) for part in parts))


# The longest literal text first: `eval/<set>-truncated_ratio` is more exact than `eval/<set>`.
_PATTERNS = [
    (_pattern(name), METRICS[name])
    for name in sorted(METRICS, key=lambda name: -len(re.sub(r"<[^>]+>", "", name)))
    if "<" in name
]


@functools.cache
def find(name: str) -> Metric | None:
    """The metric of this name; None when there is none."""
    return METRICS.get(name) or next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def describe(name: str) -> Metric:
    """Unit and meaning of a metric. An unknown name is a mistake of the code that logs it: `AssertionError`."""
    metric = find(name)
    assert metric is not None, f"metric {name!r} has no unit and meaning: add it to observe/names.py"
    return metric
