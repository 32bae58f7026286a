"""Rules about advantage, loss, off-policy correction, distillation and critic."""

from __future__ import annotations

from collections.abc import Iterator

from miles.config.flags import FLAGS, flatten, spelling
from miles.config.sections import AlgorithmConfig, RunConfig

GROUP_FREE = ("ppo", "reinforce_plus_plus")  # estimators that do not compare the answers of a prompt
NEEDS_WHITENING = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
CLIPPED = ("auto", "clip", "gspo")


def loss_violations(config: RunConfig) -> Iterator[str]:
    if config.algorithm.loss_type == "sft_loss":
        yield from _supervised(config.algorithm)
        return
    yield from _advantage(config)
    yield from _objective(config.algorithm)
    yield from _averaging(config.algorithm)
    yield from _kl(config.algorithm)
    yield from _correction(config.algorithm)
    yield from _distillation(config.algorithm)
    yield from _critic(config)


def _supervised(algorithm: AlgorithmConfig) -> Iterator[str]:
    wishes = {
        "use_kl_loss": algorithm.use_kl_loss,
        "kl_coef": algorithm.kl_coef,
        "use_opd": algorithm.use_opd,
        "use_score_centering": algorithm.use_score_centering,
    }
    for name, wished in wishes.items():
        if wished:
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
    for name, wanted, readers in (
        ("gamma", algorithm.gamma != 1.0, ("ppo", "reinforce_plus_plus")),
        ("lambd", algorithm.lambd != 1.0, ("ppo",)),
    ):
        if wanted and estimator not in readers:
            shown, belongs = f"{spelling(name)} {flatten(config)[name]}", " or ".join(readers)
            yield f"{shown} would be ignored: it belongs to --advantage-estimator {belongs}"
    buffer, longest = algorithm.overlong_buffer_len, rollout.rollout_max_response_len
    if buffer is not None and buffer >= longest:
        yield f"--overlong-buffer-len {buffer} must be less than --rollout-max-response-len {longest}"
    if config.reward.reward_keys:
        if config.reward.reward_key is None:
            yield "--reward-keys needs --reward-key, the one number that is logged and evaluated"
        if buffer is not None:
            yield "--overlong-buffer-len shapes one reward; with --reward-keys make the penalty one of the rewards"


def _objective(algorithm: AlgorithmConfig) -> Iterator[str]:
    is_custom, path = algorithm.loss_type == "custom_loss", algorithm.custom_loss_function_path
    if is_custom and path is None:
        yield "--loss-type custom_loss needs --custom-loss-function-path"
    if path is not None and not is_custom:
        yield "--custom-loss-function-path would be ignored: add --loss-type custom_loss"
    if algorithm.eps_clip_c is not None and algorithm.policy_objective not in CLIPPED:
        yield f"--eps-clip-c would be ignored: --policy-objective {algorithm.policy_objective} has no clip"


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


def _kl(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.kl_loss_coef > 0 and not algorithm.use_kl_loss:
        yield f"--kl-loss-coef {algorithm.kl_loss_coef} would be ignored: add --use-kl-loss, or leave it out"
    if algorithm.use_unbiased_kl and not algorithm.use_kl_loss:
        yield "--use-unbiased-kl would be ignored: add --use-kl-loss"
    if algorithm.kl_coef > 0 and algorithm.use_kl_loss:
        yield "--kl-coef puts the KL into the reward and --use-kl-loss into the loss: give one of them"


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
        if algorithm.custom_tis_function_path is not None and flag.startswith(("--use-tis", "--off-policy")):
            yield f"{flag} and --custom-tis-function-path both weigh the tokens: give one of them"
    low, high = algorithm.tis_clip_low, algorithm.tis_clip
    if low is not None and high is not None and low > high:
        yield f"--tis-clip-low {low} is above --tis-clip {high}"


def _distillation(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.use_opd and algorithm.opd_teacher_load is None:
        yield "--use-opd needs --opd-teacher-load, the model folder of the teacher"
    if not algorithm.use_opd:
        for name in ("opd_teacher_load", "opd_log_prob_top_k"):
            value = algorithm.opd_teacher_load if name == "opd_teacher_load" else algorithm.opd_log_prob_top_k
            if value:
                yield f"{spelling(name)} would be ignored: add --use-opd"


def _critic(config: RunConfig) -> Iterator[str]:
    if config.algorithm.advantage_estimator == "ppo":
        return
    for name, flag in FLAGS.items():
        if flag.section == "critic" and flatten(config)[name] != flag.default:
            yield f"{flag.spelling} would be ignored: it belongs to --advantage-estimator ppo"
