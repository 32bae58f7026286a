"""What contradicts the promises of the flags in `numerics_section.py`."""

from __future__ import annotations

from collections.abc import Iterator

from miles.config.resolve import samples_per_rollout
from miles.config.sections import RunConfig

PAGE_MULTIPLE = 16


def numerics_violations(config: RunConfig) -> Iterator[str]:
    numerics, engine = config.numerics, config.engine
    if numerics.recompute_logprobs_via_prefill and not numerics.true_on_policy_mode:
        yield "--recompute-logprobs-via-prefill needs --true-on-policy-mode"
    if numerics.true_on_policy_mode:
        yield from _true_on_policy(config)
    in_any_batch = engine.engine_enable_deterministic_inference or numerics.true_on_policy_mode
    if in_any_batch and engine.engine_page_size % PAGE_MULTIPLE:
        yield (
            f"--engine-page-size {engine.engine_page_size} must be a multiple of {PAGE_MULTIPLE} for "
            "--engine-enable-deterministic-inference and --true-on-policy-mode"
        )
    if numerics.deterministic_mode or in_any_batch:
        yield from _repeatable(config, in_any_batch=in_any_batch)


def _true_on_policy(config: RunConfig) -> Iterator[str]:
    mode, size = "--true-on-policy-mode", config.batch.global_batch_size
    num_steps = config.batch.num_steps_per_rollout or (samples_per_rollout(config) // size if size else 1)
    if config.algorithm.loss_type == "sft_loss" or config.debug.debug_train_only:
        yield f"{mode} would be ignored: without written answers there is nothing that the trainer must equal"
    if config.lora.lora_dropout > 0:
        yield f"{mode} with --lora-dropout: a layer that drops entries is another function than the engine's"
    if config.algorithm.use_rollout_logprobs and num_steps > 1:
        yield (
            f"{mode} with several optimizer steps and --use-rollout-logprobs: leave the latter out. The trainer's own "
            "log-probs of the old policy are the same numbers, and are compared before the first step changes it"
        )


def _repeatable(config: RunConfig, *, in_any_batch: bool) -> Iterator[str]:
    if config.rollout.partial_rollout:
        yield (
            "--partial-rollout cannot repeat bit for bit: which answers go on later depends on the clock; leave it "
            "out, or --true-on-policy-mode, --deterministic-mode and --engine-enable-deterministic-inference"
        )
    hooks = config.hooks
    late = {
        "--dynamic-sampling-filter-path": config.rollout.dynamic_sampling_filter_path,
        "--custom-generate-function-path": hooks.custom_generate_function_path,
        "--rollout-function-path": hooks.rollout_function_path,
    }
    for name in (name for name, path in late.items() if path is not None):
        if not in_any_batch:
            yield (
                f"--deterministic-mode with {name} needs --engine-enable-deterministic-inference too: requests are "
                "sent while others run, at a time that depends on the clock"
            )
