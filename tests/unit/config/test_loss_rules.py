"""Each rule about advantage, loss, correction, distillation and critic is broken once, and what it says is checked."""

import pytest

from miles.config.flags import with_values
from miles.config.rules import rule_violations
from miles.config.sections import RunConfig

GOOD = with_values(
    RunConfig(), {"hf_checkpoint": "models/tiny", "prompt_data": "sums.jsonl", "num_rollout": 3, "rm_type": "random"}
)
PLUS_PLUS = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}
OPD = {"use_opd": True, "opd_teacher_load": "models/teacher"}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_samples_per_prompt": 1, "advantage_estimator": "rloo"}, "--n-samples-per-prompt 1 gives groups of one"),
        ({"advantage_estimator": "reinforce_plus_plus"}, "reinforce_plus_plus needs --normalize-advantages"),
        ({"advantage_estimator": "ppo1"}, "--advantage-estimator must be one of grpo"),
        ({"gamma": 0.9}, "--gamma would be ignored: it belongs to --advantage-estimator ppo or reinforce_plus"),
        ({**PLUS_PLUS, "lambd": 0.9}, "--lambd would be ignored: it belongs to --advantage-estimator ppo"),
        ({"overlong_buffer_len": 1024}, "--overlong-buffer-len 1024 must be less than --rollout-max-response-len 1024"),
        ({"reward_keys": ("a", "b")}, "--reward-keys needs --reward-key"),
        ({"reward_keys": ("a",), "reward_key": "a", "overlong_buffer_len": 9}, "shapes one reward"),
        ({"loss_type": "custom_loss"}, "--loss-type custom_loss needs --custom-loss-function-path"),
        ({"custom_loss_function_path": "a.b"}, "--custom-loss-function-path would be ignored"),
        ({"eps_clip_c": 3.0, "policy_objective": "cispo"}, "--eps-clip-c would be ignored"),
        ({"eps_clip_c": 1.0}, "--eps-clip-c must be above 1, not 1.0"),
        ({"calculate_per_token_loss": True, "loss_constant_length": 9}, "both say how tokens are averaged"),
        (
            {"custom_pg_loss_reducer_function_path": "a.b", "loss_constant_length": 9},
            "--loss-constant-length would be ignored",
        ),
        ({"use_unbiased_kl": True}, "--use-unbiased-kl would be ignored"),
        ({"kl_coef": 0.1, "use_kl_loss": True}, "--kl-coef puts the KL into the reward"),
        ({"use_tis": True, "off_policy_correction": "icepop"}, "--use-tis is --off-policy-correction tis"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "--use-tis corrects from the engine's log-probs"),
        ({"veto_threshold": 1e-4, "use_rollout_logprobs": True}, "--veto-threshold corrects from the engine's"),
        ({"off_policy_correction": "tis", "custom_tis_function_path": "a.b"}, "both weigh the tokens"),
        ({"tis_clip": 0.5, "tis_clip_low": 0.9}, "--tis-clip-low 0.9 is above --tis-clip 0.5"),
        ({"use_opd": True}, "--use-opd needs --opd-teacher-load"),
        ({"opd_teacher_load": "models/teacher"}, "--opd-teacher-load would be ignored"),
        ({"opd_log_prob_top_k": 5}, "--opd-log-prob-top-k would be ignored"),
        ({"opd_kl_coef": 0.5}, "--opd-kl-coef would be ignored: add --use-opd"),
        ({"overlong_penalty_factor": 0.5}, "--overlong-penalty-factor would be ignored: add --overlong-buffer-len"),
        ({"sapo_tau_pos": 2.0}, "--sapo-tau-pos would be ignored: it belongs to --policy-objective sapo"),
        ({"ref_load": "models/base"}, "--ref-load would be ignored: add --use-kl-loss or --kl-coef"),
        ({"opsm_delta": 0.1}, "--opsm-delta would be ignored: add --use-opsm"),
        ({"score_centering_top_k": 8}, "--score-centering-top-k would be ignored: add --use-score-centering"),
        ({"tis_clip": 3.0, "use_rollout_logprobs": True}, "--tis-clip would be ignored: no --off-policy-correction"),
        ({"tis_clip_low": 0.1, "off_policy_correction": "none"}, "--tis-clip-low would be ignored"),
        ({"num_critic_only_steps": 2}, "--num-critic-only-steps would be ignored: it belongs to"),
        ({"loss_type": "sft_loss", "use_opd": True}, "--use-opd belongs to --loss-type policy_loss"),
        ({"loss_type": "sft_loss", "kl_coef": 0.1}, "--kl-coef belongs to --loss-type policy_loss"),
    ],
)
def test_rule(change, message):
    (violation,) = rule_violations(with_values(GOOD, change))
    assert message in violation


@pytest.mark.parametrize(
    "change",
    [
        {"n_samples_per_prompt": 1, "advantage_estimator": "ppo", "num_critic_only_steps": 2, "lambd": 0.95},
        {**PLUS_PLUS, "n_samples_per_prompt": 1, "gamma": 0.99, "kl_coef": 0.01},
        {**OPD, "opd_log_prob_top_k": 8, "use_kl_loss": True},
        {"use_tis": True, "off_policy_correction": "tis", "tis_clip": 3.0, "veto_threshold": 1e-4, "use_opsm": True},
        {"reward_keys": ("a", "b"), "reward_key": "a"},
        {"policy_objective": "gspo", "eps_clip_c": 3.0},
        {"custom_tis_function_path": "a.b", "off_policy_correction": "none", "tis_clip": 5.0},  # is given `args`
        {"custom_tis_function_path": "a.b", "use_tis": True},  # as public scripts give both
        {"loss_type": "custom_loss", "custom_loss_function_path": "a.b", "eps_clip_c": 3.0, "sapo_tau_neg": 2.0},
        {"ref_load": GOOD.model.hf_checkpoint},  # the start weights, as without it
        {"tis_clip": 3.0},  # auto corrects as soon as samples are old
    ],
)
def test_settings_that_go_together(change):
    assert rule_violations(with_values(GOOD, change)) == []
