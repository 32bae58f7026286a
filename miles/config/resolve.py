"""Turns "default: ..." into values, and says which settings make a run what it is.

Needs no torch. What depends on the machine or the data is left for the worker, which resolves it on the object that
finds it: device and dtype when `auto`, threads, cache size, micro-batch tokens, and rollouts from epochs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.config.fields import SATISFIED
from miles.config.flags import FLAGS, flatten, with_values
from miles.config.sections import AlgorithmConfig, RunConfig


def samples_per_rollout(config: RunConfig) -> int:
    """Samples that one rollout gives the trainer; supervised rows have one answer each."""
    answers = 1 if config.algorithm.loss_type == "sft_loss" else config.rollout.n_samples_per_prompt
    return config.rollout.rollout_batch_size * answers


def reads_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether the log-probs of a reference model are needed."""
    return algorithm.use_kl_loss or algorithm.kl_coef != 0.0


def scores_policy(algorithm: AlgorithmConfig, *, num_steps: int) -> bool:
    """Whether the old policy needs a pass before a rollout's `num_steps` optimizer steps: for the ratio, or for a
    penalty that is part of the advantages."""
    for_ratio = num_steps > 1 and not algorithm.use_rollout_logprobs
    for_penalty = algorithm.kl_coef != 0.0 or (algorithm.use_opd and algorithm.opd_log_prob_top_k == 0)
    return algorithm.loss_type != "sft_loss" and (for_ratio or for_penalty)


def resolve(config: RunConfig) -> tuple[RunConfig, frozenset[str]]:
    """The settings with every default that can be known now, and the names that were filled in.

    Expects settings that no rule of `rules.py` objects to.
    """
    steps = config.batch.num_steps_per_rollout or 1
    defaults: dict[str, Any] = {
        "eps_clip_high": config.algorithm.eps_clip,
        "global_batch_size": samples_per_rollout(config) // steps,
        "eval_input_key": config.data.input_key,
        "eval_label_key": config.data.label_key,
        "eval_temperature": config.rollout.rollout_temperature,
        "eval_top_p": config.rollout.rollout_top_p,
        "eval_top_k": config.rollout.rollout_top_k,
        "eval_max_response_len": config.rollout.rollout_max_response_len,
        "offload_rollout": bool(config.engine.offload_rollout_level),
    }
    filled = _fill(config, defaults)
    if config.model.dtype == "auto" and config.model.device != "auto":
        filled["dtype"] = "float32" if config.model.device == "cpu" else "bfloat16"
    if config.optim.lr == 0:  # a control run that must not learn; a schedule would rise to these
        filled.update({name: 0.0 for name in ("min_lr", "lr_warmup_init") if flatten(config)[name] != 0})
    if config.debug.load_debug_rollout_data is not None and not config.debug.debug_train_only:
        filled["debug_train_only"] = True
    if config.numerics.true_on_policy_mode:
        filled.update(_switched_on(config, "deterministic_mode", "engine_enable_deterministic_inference"))
    hooks = config.hooks
    if hooks.custom_reward_post_process_path or hooks.custom_convert_samples_to_train_data_path:
        filled["disable_rewards_normalization"] = True  # the hook has done it
    resolved = with_values(config, filled)
    # The name is made from the resolved settings, so a default that is spelled out gives the same run.
    folder = _fill(resolved, {"run_name": default_run_name(resolved)})
    resolved = with_values(resolved, folder)
    run_folder = Path(resolved.run_dir.runs_dir) / str(resolved.run_dir.run_name)
    save = _fill(resolved, {"save": str(run_folder / "checkpoints")})
    resolved = with_values(resolved, save)
    load = _fill(resolved, {"load": resolved.run_dir.save})
    return with_values(resolved, load), frozenset({*filled, *folder, *save, *load})


def _switched_on(config: RunConfig, *names: str) -> dict[str, bool]:
    return {name: True for name in names if not flatten(config)[name]}


def _fill(config: RunConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    values = flatten(config)
    return {name: value for name, value in defaults.items() if values[name] is None and value is not None}


def default_run_name(config: RunConfig) -> str:
    """ "<model folder>-<data file>-<8 hex digits of the identity>"."""
    model = os.path.basename(os.path.abspath(config.model.hf_checkpoint or "model"))
    data = Path(re.sub(r"@\[[^\]]*\]$", "", config.data.prompt_data or "data")).stem
    digest = hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()
    return re.sub(r"[^\w.-]+", "-", f"{model}-{data}-{digest[:8]}")


def identity(config: RunConfig) -> dict[str, Any]:
    """The settings that make a run what it is, as JSON data: all that are obeyed and may not differ on resume."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flatten(config).items()
        if not FLAGS[name].resume and FLAGS[name].effect != SATISFIED
    }


def identity_diff(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for each setting that differs: `--lr: 0.001 in the run folder, 0.01 now`."""
    return [
        f"{FLAGS[name].spelling}: {stored[name]} in the run folder, {wanted[name]} now"
        for name in wanted
        if name in stored and stored[name] != wanted[name]
    ]
