"""`--explain`: every final setting with its source, what has no effect here, and what was decided from the settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miles.config.fields import SATISFIED
from miles.config.flags import FLAGS, flatten
from miles.config.parse import Parsed
from miles.config.resolve import samples_per_rollout
from miles.config.sections import RunConfig

_FOUND_BY_WORKER = {
    "device": "a GPU when there is one",
    "dtype": "float32 on a CPU, bfloat16 on a GPU",
    "num_threads": "by model size",
    "num_rollout": "from --num-epoch and the number of prompts",
    "rollout_max_context_len": "the model's limit",
    "tis_clip": "by correction",
    "tis_clip_low": "by correction",
    "max_tokens_per_gpu": "by model and device",
    "engine_mem_fraction_static": "what the trainer leaves",
    "engine_max_total_tokens": "by memory",
    "engine_max_running_requests": "by device",
    "engine_chunked_prefill_size": "by device",
}


def explain_text(parsed: Parsed) -> str:
    """Plain lines `--flag  value  [source]  remark`, grouped by section, then the decisions."""
    values = flatten(parsed.config)
    remarks = dict(_remarks(parsed.config))
    width = max(len(flag.spelling) for flag in FLAGS.values())
    lines: list[str] = []
    section = ""
    for name, flag in FLAGS.items():
        if flag.section != section:
            section = flag.section
            lines += ["", flag.section_title]
        remark = f"  {remarks[name]}" if name in remarks else ""
        lines.append(f"  {flag.spelling:<{width}}  {shown_value(values[name])}  [{parsed.sources[name]}]{remark}")
    lines += ["", "Decided from these settings", *(f"  {text}" for text in _decisions(parsed.config))]
    return "\n".join(lines[1:]) + "\n"


def shown_value(value: Any) -> str:
    """A value as a person reads it: switches as on and off, unset as "-"."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == () or value == {}:
        return "-"
    return " ".join(str(entry) for entry in value) if isinstance(value, tuple) else str(value)


def _remarks(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Flags that nothing reads with these settings, and those whose value the worker finds."""
    for name, flag in FLAGS.items():
        if flag.effect == SATISFIED:
            yield name, SATISFIED
    for name, text in _FOUND_BY_WORKER.items():
        if flatten(config)[name] in ("auto", None):
            yield name, f"found when the worker starts: {text}"
    for condition, names, reason in _unused(config):
        if condition:
            for name in names:
                yield name, f"{SATISFIED}: {reason}"


def _unused(config: RunConfig) -> list[tuple[bool, tuple[str, ...], str]]:
    algorithm, reward = config.algorithm, config.reward
    evals = tuple(name for name, flag in FLAGS.items() if flag.section == "eval" and name != "eval_interval")
    rewards = tuple(name for name, flag in FLAGS.items() if flag.section == "reward")
    critic = tuple(name for name, flag in FLAGS.items() if flag.section == "critic" and flag.effect != SATISFIED)
    lora = tuple(name for name, flag in FLAGS.items() if flag.section == "lora" and name != "lora_rank")
    custom = reward.custom_rm_path is not None
    constant = config.optim.lr_decay_style == "constant"
    supervised = algorithm.loss_type == "sft_loss"
    return [
        (config.data.num_rollout is not None, ("num_epoch",), "--num-rollout is set"),
        (config.eval.eval_interval is None, evals, "--eval-interval is not set"),
        (custom, ("rm_type", "rm_timeout", "rm_num_workers"), "--custom-rm-path is set"),
        (not custom, ("custom_rm_timeout", "reward_key"), "--custom-rm-path is not set"),
        (not algorithm.use_kl_loss, ("kl_loss_coef",), "--use-kl-loss is off"),
        (
            not algorithm.use_kl_loss and algorithm.kl_coef == 0.0,
            ("ref_load", "kl_loss_type"),
            "neither --use-kl-loss nor --kl-coef is on",
        ),
        (algorithm.policy_objective != "sapo", ("sapo_tau_pos", "sapo_tau_neg"), "--policy-objective is not sapo"),
        (algorithm.overlong_buffer_len is None, ("overlong_penalty_factor",), "--overlong-buffer-len is not set"),
        (not algorithm.use_opsm, ("opsm_delta",), "--use-opsm is off"),
        (not algorithm.use_score_centering, ("score_centering_top_k",), "--use-score-centering is off"),
        (not algorithm.use_opd, ("opd_kl_coef",), "--use-opd is off"),
        (algorithm.advantage_estimator != "ppo", critic, "--advantage-estimator is not ppo"),
        (not config.lora.is_on, lora, "--lora-rank is 0"),
        (constant, ("min_lr", "lr_decay_iters"), "--lr-decay-style is constant"),
        (
            algorithm.disable_rewards_normalization,
            ("disable_grpo_std_normalization",),
            "--disable-rewards-normalization is on",
        ),
        (supervised, ("n_samples_per_prompt", "advantage_estimator", "eps_clip", "eps_clip_high"), "sft_loss"),
        (supervised and config.eval.eval_interval is None, rewards, "sft_loss without evaluation"),
    ]


def _decisions(config: RunConfig) -> Iterator[str]:
    yield (
        "Weights: one copy. Engine and trainer share the device, dtype and every version, so the engine reads the "
        "tensors that the optimizer updates."
    )
    if config.lora.is_on:
        yield (
            f"Training: adapters of rank {config.lora.lora_rank} only. All other weights are frozen; with the adapters "
            "off they are the reference model, unless --ref-load names another."
        )
    total, size = samples_per_rollout(config), config.batch.global_batch_size
    assert size is not None, "explain needs resolved settings"
    steps = total // size
    yield f"Batch: {total} samples in a rollout, {size} in an optimizer step; optimizer steps per rollout: {steps}."
    if config.algorithm.loss_type == "sft_loss":
        yield "Loss: supervised, so no engine writes answers and no reward is asked."
    elif config.algorithm.use_rollout_logprobs:
        yield "Old log-probs: the engine's, as --use-rollout-logprobs says."
    elif steps == 1:
        yield "Old log-probs: the trainer's own, detached. One optimizer step in a rollout needs no extra pass."
    else:
        yield f"Old log-probs: one extra pass of the trainer before the {steps} optimizer steps of a rollout."
    yield from _learning_decisions(config)
    yield f"Checkpoints: saved to {config.run_dir.save}, resumed from {config.run_dir.load}."


def _learning_decisions(config: RunConfig) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.loss_type == "sft_loss":
        return
    if algorithm.off_policy_correction == "auto" and not algorithm.use_tis and not algorithm.use_rollout_logprobs:
        yield "Off-policy correction: tis, from the first sample on that is older than the weights; until then none."
    if rollout.rollout_top_k > 0 or rollout.rollout_top_p < 1 or rollout.rollout_min_p > 0:
        yield "Sampling replay: every model is scored over the tokens that top-k, top-p and min-p left."
