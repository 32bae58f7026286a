"""The `perf/...` numbers of a step, from its samples and the seconds of its phases."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from miles.model.flops import forward_flops, training_flops
from miles.model.spec import ModelSpec
from miles.types import Sample

# Phases that cost nothing with one copy of the weights on one device; logged, since logs are compared by these names.
FREE_PHASES = ("sleep", "wake_up")


def rollout_perf(groups: Sequence[Sequence[Sample]], *, seconds: float) -> dict[str, float]:
    """Speed of writing and scoring, on one device."""
    samples = [sample for group in groups for sample in group]
    trained = [_num_trained(sample) for sample in samples]
    lengths = [sample.response_length for sample in samples]
    return {
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(lengths) / seconds,
        "perf/effective_tokens_per_gpu_per_sec": sum(trained) / seconds,
        "perf/longest_sample_tokens_per_sec": max(lengths) / seconds,
        "perf/longest_effective_sample_tokens_per_sec": max(trained) / seconds,
    }


def trainer_perf(groups: Sequence[Sequence[Sample]], *, seconds: dict[str, float], spec: ModelSpec) -> dict[str, float]:
    """Seconds of every phase since the last step, and speed of scoring and training in executed FLOPs."""
    samples = [sample for group in groups for sample in group]
    lengths = [len(sample.tokens) for sample in samples]
    num_answer_tokens = sum(sample.response_length for sample in samples)
    step_s = seconds["rollout"] + seconds["train"]
    perf = {f"perf/{phase}_time": 0.0 for phase in FREE_PHASES}
    perf |= {f"perf/{phase}_time": spent for phase, spent in seconds.items() if phase != "rollout"}
    perf |= {
        "perf/train_wait_time": seconds["rollout"],
        "perf/step_time": step_s,
        "perf/wait_time_ratio": seconds["rollout"] / step_s,
        "perf/actor_train_tok_per_s": sum(lengths) / seconds["actor_train"],
        "perf/actor_train_tflops": _tera(
            training_flops(spec, lengths, num_head_tokens=num_answer_tokens), seconds["actor_train"]
        ),
    }
    forward = forward_flops(spec, lengths, num_head_tokens=num_answer_tokens)
    for phase in ("log_probs", "ref_log_probs"):
        if seconds.get(phase):
            perf[f"perf/{phase}_tflops"] = _tera(forward, seconds[phase])
    return perf


def step_means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """One record for the optimizer steps of a rollout: their means, and the number of the last step."""
    names = dict.fromkeys(name for step in steps for name in step)
    means = {name: fmean(step[name] for step in steps if name in step) for name in names}
    return means | {"train/step": steps[-1]["train/step"]}


def _num_trained(sample: Sample) -> int:
    if sample.remove_sample:
        return 0
    return sample.response_length if sample.loss_mask is None else sum(sample.loss_mask)


def _tera(flops: float, seconds: float) -> float:
    return flops / seconds / 1e12
