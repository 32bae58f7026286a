"""Rules about advantage, loss, off-policy correction, distillation and critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from miles.config.flags import FLAGS, flatten, spelling
from miles.config.resolve import reads_reference
from miles.config.sections import AlgorithmConfig, RunConfig

GROUP_FREE = ("ppo", "reinforce_plus_plus")  # estimators that do not compare the answers of a prompt
NEEDS_WHITENING = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
CLIPPED = ("auto", "clip", "gspo")


def loss_violations(config: RunConfig) -> Iterator[str]:
    if config.algorithm.loss_type == "sft_loss":
        yield from _supervised(config.algorithm)
        return
    yield from _unread(config)
    yield from _advantage(config)
    if config.algorithm.loss_type == "custom_loss" and config.algorithm.custom_loss_function_path is None:
        yield "--loss-type custom_loss needs --custom-loss-function-path"
    yield from _averaging(config.algorithm)
    if config.algorithm.kl_coef > 0 and config.algorithm.use_kl_loss:
        yield "--kl-coef puts the KL into the reward and --use-kl-loss into the loss: give one of them"
    yield from _correction(config.algorithm)
    if config.algorithm.use_opd and config.algorithm.opd_teacher_load is None:
        yield "--use-opd needs --opd-teacher-load, the model folder of the teacher"


def unread(config: RunConfig, readers: Mapping[str, tuple[object, str]]) -> Iterator[str]:
    """`readers` says by name of a flag whether something reads it, and what would."""
    values = flatten(config)
    for name, (is_read, advice) in readers.items():
        if not is_read and values[name] != FLAGS[name].default:
            yield f"{spelling(name)} would be ignored: {advice}"


def _unread(config: RunConfig) -> Iterator[str]:
    algorithm, estimator, model = config.algorithm, config.algorithm.advantage_estimator, config.model
    own_loss = algorithm.loss_type == "custom_loss"  # it can read the numbers of the others in its `args`
    ppo = (estimator == "ppo", "it belongs to --advantage-estimator ppo")
    kl_loss, opd = (algorithm.use_kl_loss, "add --use-kl-loss, or leave it out"), (algorithm.use_opd, "add --use-opd")
    sapo = (own_loss or algorithm.policy_objective == "sapo", "it belongs to --policy-objective sapo")
    corrects = algorithm.use_tis or algorithm.off_policy_correction != "none" or algorithm.custom_tis_function_path
    weighs = (corrects and not algorithm.use_rollout_logprobs, "no --off-policy-correction weighs the tokens")
    refers = reads_reference(algorithm) or model.ref_load == (model.init_from or model.hf_checkpoint)
    critic = [name for name, flag in FLAGS.items() if flag.section == "critic"]
    readers = {
        **dict.fromkeys((*critic, "lambd"), ppo),
        "gamma": (estimator in GROUP_FREE, f"it belongs to --advantage-estimator {' or '.join(GROUP_FREE)}"),
        "overlong_penalty_factor": (algorithm.overlong_buffer_len, "add --overlong-buffer-len"),
        "custom_loss_function_path": (own_loss, "add --loss-type custom_loss"),
        "eps_clip_c": (own_loss or algorithm.policy_objective in CLIPPED, f"{algorithm.policy_objective} has no clip"),
        **dict.fromkeys(("sapo_tau_pos", "sapo_tau_neg"), sapo),
        **dict.fromkeys(("kl_loss_coef", "use_unbiased_kl"), kl_loss),
        **dict.fromkeys(("tis_clip", "tis_clip_low"), weighs),
        "ref_load": (refers, "add --use-kl-loss or --kl-coef; start weights are --init-from"),
        "opsm_delta": (algorithm.use_opsm, "add --use-opsm"),
        "score_centering_top_k": (algorithm.use_score_centering, "add --use-score-centering"),
        **dict.fromkeys(("opd_teacher_load", "opd_kl_coef", "opd_log_prob_top_k"), opd),
    }
    yield from unread(config, readers)


def _supervised(algorithm: AlgorithmConfig) -> Iterator[str]:
    for name in ("use_kl_loss", "kl_coef", "use_opd", "use_score_centering"):
        if getattr(algorithm, name):
            yield f"{spelling(name)} belongs to --loss-type policy_loss, not sft_loss"


def _advantage(config: RunConfig) -> Iterator[str]:
    algorithm, rollout, estimator = config.algorithm, config.rollout, config.algorithm.advantage_estimator
    compares = estimator not in GROUP_FREE and not algorithm.disable_rewards_normalization
    if rollout.n_samples_per_prompt == 1 and compares:
        yield (
            "--n-samples-per-prompt 1 gives groups of one answer: compared with its own mean and standard deviation "
            "every reward becomes an advantage of 0; use at least 2, or --disable-rewards-normalization to take "
            "rewards as they are"
        )
    if estimator in NEEDS_WHITENING and not algorithm.normalize_advantages:
        yield f"--advantage-estimator {estimator} needs --normalize-advantages: it standardises over the whole batch"
    buffer, longest = algorithm.overlong_buffer_len, rollout.rollout_max_response_len
    if buffer is not None and buffer >= longest:
        yield f"--overlong-buffer-len {buffer} must be less than --rollout-max-response-len {longest}"
    if config.reward.reward_keys:
        if config.reward.reward_key is None:
            yield "--reward-keys needs --reward-key, the one number that is logged and evaluated"
        if buffer is not None:
            yield "--overlong-buffer-len shapes one reward; with --reward-keys make the penalty one of the rewards"


def _averaging(algorithm: AlgorithmConfig) -> Iterator[str]:
    chosen = {
        "--calculate-per-token-loss": algorithm.calculate_per_token_loss,
        "--loss-constant-length": algorithm.loss_constant_length is not None,
    }
    wanted = [flag for flag, given in chosen.items() if given]
    if len(wanted) > 1:
        yield f"{' and '.join(wanted)} both say how tokens are averaged: give one of them"
    if algorithm.custom_pg_loss_reducer_function_path is not None and chosen["--loss-constant-length"]:
        yield "--loss-constant-length would be ignored: --custom-pg-loss-reducer-function-path averages the tokens"


def _correction(algorithm: AlgorithmConfig) -> Iterator[str]:
    wanted = algorithm.off_policy_correction
    if algorithm.use_tis and wanted not in ("auto", "tis"):
        yield f"--use-tis is --off-policy-correction tis, and {wanted} is asked for too: give one of them"
    given = {
        "--use-tis": algorithm.use_tis,
        f"--off-policy-correction {wanted}": wanted not in ("auto", "none"),
        "--custom-tis-function-path": algorithm.custom_tis_function_path is not None,
        "--veto-threshold": algorithm.veto_threshold is not None,
    }
    for flag in (flag for flag, wished in given.items() if wished):
        if algorithm.use_rollout_logprobs:
            yield (
                f"{flag} corrects from the engine's log-probs to the trainer's, which --use-rollout-logprobs leaves "
                "out: the ratio itself is then the correction"
            )
        if algorithm.custom_tis_function_path is not None and flag.startswith("--off-policy"):
            yield f"{flag} and --custom-tis-function-path both weigh the tokens: give one of them"
    low, high = algorithm.tis_clip_low, algorithm.tis_clip
    if low is not None and high is not None and low > high:
        yield f"--tis-clip-low {low} is above --tis-clip {high}"
