"""Each rule is broken once, and what it says is checked."""

import math
import re
from pathlib import Path

import pytest

from miles.config import rules
from miles.config.flags import with_values
from miles.config.rules import check, rule_violations
from miles.config.sections import RunConfig
from miles.errors import ConfigError

GOOD = with_values(
    RunConfig(), {"hf_checkpoint": "models/tiny", "prompt_data": "sums.jsonl", "num_rollout": 3, "rm_type": "random"}
)


def test_repair_needs_a_worker_of_its_own():
    values = {"in_process": True, "use_fault_tolerance": True}
    assert any("--use-fault-tolerance" in text for text in rule_violations(with_values(RunConfig(), values)))


def test_good_settings_have_no_violation():
    assert rule_violations(GOOD) == []
    check(GOOD)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hf_checkpoint": None}, "--hf-checkpoint is missing"),
        ({"prompt_data": None}, "--prompt-data is missing"),
        ({"num_rollout": None}, "--num-rollout or --num-epoch is missing"),
        ({"rm_type": None}, "--rm-type or --custom-rm-path is missing"),
        (
            {"rm_type": None, "loss_type": "sft_loss", "eval_interval": 1, "eval_prompt_data": ("a", "x")},
            "evaluation scores answers with a reward",
        ),
        ({"group_rm": True}, "--group-rm needs --custom-rm-path"),
        ({"rm_type": "math"}, "--rm-type math needs --label-key"),
        ({"rollout_temperature": 0.0}, "--rollout-temperature 0 is greedy"),
        ({"rollout_temperature": -1.0}, "--rollout-temperature must be at least 0, not -1.0"),
        ({"rollout_top_p": 0.0, "loss_type": "sft_loss"}, "--rollout-top-p must be above 0, up to 1, not 0.0"),
        ({"rollout_top_k": 0}, "--rollout-top-k must be -1 (keep all tokens) or at least 1, not 0"),
        ({"rollout_top_k": -2}, "--rollout-top-k must be -1 (keep all tokens) or at least 1, not -2"),
        ({"eval_top_k": 0}, "--eval-top-k must be -1 (keep all tokens) or at least 1, not 0"),
        ({"rollout_stop": ("",)}, "--rollout-stop has an empty string"),
        ({"rollout_max_context_len": 1024}, "--rollout-max-response-len 1024 leaves no room for a prompt"),
        (
            {"rollout_max_context_len": 2048, "rollout_max_prompt_len": 2048},
            "--rollout-max-prompt-len 2048 leaves no room for an answer",
        ),
        ({"lora_alpha": 32.0}, "--lora-alpha would be ignored: add --lora-rank"),
        ({"target_modules": ("q_proj",)}, "--target-modules would be ignored: add --lora-rank"),
        ({"lora_rank": 8, "target_modules": ("q_proj,qproj",)}, "--target-modules: 'qproj' gets no adapter (did"),
        ({"lora_rank": 8, "exclude_modules": ("lm_head",)}, "--exclude-modules: 'lm_head' gets no adapter"),
        ({"lora_rank": 8, "target_modules": (",",)}, "--target-modules is empty"),
        ({"lora_rank": 8, "lora_dropout": 0.1, "ci_test": True}, "leave out --lora-dropout"),
        ({"lora_rank": -1}, "--lora-rank must be at least 0"),
        ({"n_samples_per_prompt": 1}, "--n-samples-per-prompt 1 gives groups of one answer"),
        (
            {"global_batch_size": 100},
            "--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples do not divide into optimizer steps of "
            "--global-batch-size 100; 64 or 128 would",
        ),
        ({"global_batch_size": 512}, "--global-batch-size 512; 256 would"),
        ({"rollout_batch_size": 10**9 + 7, "global_batch_size": 9}, "--global-batch-size 9; 8 or 1000000007 would"),
        ({"num_steps_per_rollout": 3}, "do not divide into --num-steps-per-rollout 3; 2 or 4 would"),
        ({"num_steps_per_rollout": 2, "global_batch_size": 64}, "--global-batch-size 64 x --num-steps-per-rollout 2"),
        ({"rollout_batch_size": 0}, "--rollout-batch-size must be at least 1, not 0"),
        ({"kl_loss_coef": 0.1}, "--kl-loss-coef would be ignored: add --use-kl-loss"),
        ({"loss_type": "sft_loss", "use_kl_loss": True}, "--use-kl-loss belongs to --loss-type policy_loss"),
        ({"lr": math.nan}, "--lr must be a finite number, not nan"),
        ({"lr": -1.0}, "--lr must be at least 0, not -1.0"),
        ({"adam_eps": 1e-40}, "--adam-eps must be at least 1e-37, not 1e-40"),  # float32 holds no such number
        ({"adam_beta2": 1.0}, "--adam-beta2 must be from 0 to below 1, not 1.0"),
        ({"lr_warmup_iters": 3, "lr_warmup_fraction": 0.1}, "both set the warm-up"),
        ({"lr": 1e-4, "min_lr": 1e-3, "lr_decay_style": "linear"}, "--min-lr 0.001 is above --lr 0.0001"),
        ({"min_lr": 1e-7}, "--min-lr would be ignored: --lr-decay-style constant does not decay"),
        ({"lr_decay_iters": 5}, "--lr-decay-iters would be ignored"),
        ({"lr_warmup_init": 1e-7}, "--lr-warmup-init would be ignored: add --lr-warmup-iters"),
        (
            {"lr_decay_iters": 5, "lr_warmup_iters": 9, "lr_decay_style": "cosine"},
            "--lr-decay-iters 5 is less than --lr-warmup-iters 9",
        ),
        ({"lr_decay_style": "wsd"}, "--lr-decay-style must be one of constant, linear, cosine, not 'wsd'"),
        ({"device": "cpu", "dtype": "bfloat16"}, "--dtype bfloat16 needs a GPU"),
        ({"eval_prompt_data": ("a",), "eval_interval": 1}, "--eval-prompt-data needs pairs NAME FILE, got 1 values: a"),
        ({"eval_prompt_data": ("a", "x", "a", "y"), "eval_interval": 1}, "gives two sets the same name: a a"),
        ({"eval_interval": 1}, "--eval-interval needs --eval-prompt-data"),
        ({"eval_prompt_data": ("a", "x")}, "--eval-prompt-data needs --eval-interval"),
        ({"save_interval": 0}, "--save-interval must be at least 1, not 0"),
        (
            {"engine_max_running_requests": 10**9},
            "--engine-max-running-requests must be from 1 to 16,384, not 1000000000",
        ),
        ({"phase_deadlines": {"rollout": 0.0}}, "--phase-deadlines must be above 0, not 0.0"),
        ({"phase_deadlines": {"trian": 5.0}}, "there is no phase 'trian' (did you mean train?); there are start, load"),
        ({"apply_chat_template_kwargs": {"tokenize": True}}, "--apply-chat-template-kwargs cannot set 'tokenize'"),
        ({"rollout_stop_token_ids": (3, -4)}, "--rollout-stop-token-ids must be at least 0, not -4"),
        ({"colocate": False}, "--no-colocate cannot be obeyed here: engine and trainer share the device, always"),
        ({"run_name": "a/b"}, "--run-name 'a/b' must be the name of one folder"),
    ],
)
def test_rule(change, message):
    (violation,) = rule_violations(with_values(GOOD, change))
    assert message in violation


def test_all_violations_come_together():
    with pytest.raises(ConfigError) as caught:
        check(with_values(GOOD, {"lr": -1.0, "rollout_temperature": 0.0, "global_batch_size": 7}))
    assert len(caught.value.violations) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"n_samples_per_prompt": 1, "disable_rewards_normalization": True},
        {"rollout_temperature": 0.0, "loss_type": "sft_loss", "rm_type": None},
        {"rollout_top_p": 0.9, "rollout_top_k": 20, "rollout_min_p": 0.1},
        {"rollout_top_p": 0.9, "use_kl_loss": True, "use_opd": True, "opd_teacher_load": "models/teacher"},
        {"use_kl_loss": True, "kl_loss_coef": 0.0},
        {"num_rollout": None, "num_epoch": 2},
        {"eval_prompt_data": ("a", "x"), "eval_interval": 5, "eval_temperature": 0.0, "eval_top_p": 0.5},
        {"lr": 0.0, "lr_decay_style": "linear", "min_lr": 1e-5},
        {"num_steps_per_rollout": 4, "global_batch_size": 64},
        {"rm_type": "math", "custom_rm_path": "rewards.mine"},
    ],
)
def test_settings_that_only_look_wrong_are_accepted(change):
    assert rule_violations(with_values(GOOD, change)) == []


def test_phases_are_those_that_a_worker_enters():
    loop = Path(rules.__file__).parents[1] / "loop"
    source = (loop / "stages.py").read_text() + (loop / "build.py").read_text()
    entered = re.findall(r'(?:timers\.span|heartbeat\.set_phase)\("(\w+)"', source)
    assert set(entered) == set(rules.PHASES)
