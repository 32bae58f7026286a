"""The `perf/...` numbers of a step, from its samples and the seconds of its phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from miles.model.flops import forward_flops
from miles.model.spec import ModelSpec
from miles.observe.gpu import Rates
from miles.rollout.metrics import trainable_tokens
from miles.types import Sample, TrainResult

# Phases that cost nothing with one copy of the weights on one device; logged, since logs are compared by these names.
FREE_PHASES = ("sleep", "wake_up")

_NO_MEAN: dict[str, Callable[[list[float]], float]] = {
    **{"train/step": max, "train/num_skipped_steps": sum, "train/num_not_finite": sum},
    **{"train/ratio_min": min, "train/ratio_max": max, "train/train_rollout_logprob_abs_diff_max": max},
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What speeds are compared with: the model, the bytes of a weight, and the measured rates of the device."""

    spec: ModelSpec
    weight_bytes: int
    rates: Rates


def rollout_perf(
    groups: Sequence[Sequence[Sample]], *, seconds: float, num_engine_steps: int, hardware: Hardware
) -> dict[str, float]:
    """Speed of writing and scoring, on one device."""
    samples = [sample for group in groups for sample in group]
    trained = [0 if sample.remove_sample else trainable_tokens(sample) for sample in samples]
    lengths = [sample.response_length for sample in samples]
    bytes_read = decoding_bytes(samples, num_engine_steps=num_engine_steps, hardware=hardware)
    flops = forward_flops(hardware.spec, [len(sample.tokens) for sample in samples], num_head_tokens=sum(lengths))
    return {
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(lengths) / seconds,
        "perf/effective_tokens_per_gpu_per_sec": sum(trained) / seconds,
        "perf/longest_sample_tokens_per_sec": max(lengths) / seconds,
        "perf/longest_effective_sample_tokens_per_sec": max(trained) / seconds,
        "perf/rollout_mfu": flops / seconds / hardware.rates.matrix_flops_per_s,
        "perf/rollout_bandwidth_share": bytes_read / seconds / hardware.rates.copy_bytes_per_s,
    }


def decoding_bytes(samples: Sequence[Sample], *, num_engine_steps: int, hardware: Hardware) -> int:
    """Bytes that writing these answers must read: all weights once per engine step, and for each token the keys and
    values of what stands before it."""
    spec, width = hardware.spec, hardware.weight_bytes
    num_read = sum(
        sample.response_length * sample.prompt_length + sample.response_length * (sample.response_length + 1) // 2
        for sample in samples
    )
    cache_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * width
    return num_engine_steps * spec.num_parameters * width + num_read * cache_bytes


def trainer_perf(
    groups: Sequence[Sequence[Sample]], result: TrainResult, *, seconds: dict[str, float], hardware: Hardware
) -> dict[str, float]:
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
        "perf/mfu_peak_tflops": hardware.rates.matrix_flops_per_s / 1e12,
    }
    if seconds["actor_train"]:  # not where every step was without a trained token
        trained = sum(step["train/tflop"] for step in result.steps) * 1e12 / seconds["actor_train"]
        perf |= {
            "perf/actor_train_tok_per_s": sum(lengths) / seconds["actor_train"],
            "perf/actor_train_tflops": trained / 1e12,
            "perf/actor_train_mfu": trained / hardware.rates.matrix_flops_per_s,
        }
    forward = forward_flops(hardware.spec, lengths, num_head_tokens=num_answer_tokens)
    for phase in ("log_probs", "ref_log_probs"):
        if seconds.get(phase):
            perf[f"perf/{phase}_tflops"] = forward / seconds[phase] / 1e12
    return perf


def of_rollout(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """One record for the optimizer steps of a rollout: their means, but extremes of extremes, sums of what was skipped,
    and the number of the last step."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _NO_MEAN.get(name, fmean)([step[name] for step in steps if name in step]) for name in names}
