from pathlib import Path

import pytest

from miles.config.flags import flatten
from miles.config.parse import parse_train
from recipes.grpo_gsm8k import build_command, main

PLACES = {"model": Path("m"), "data": Path("d"), "runs": Path("r")}


def settings(environment):
    command = build_command(environment, **PLACES)
    assert command[:2] == ["miles", "train"]
    return flatten(parse_train(command[2:]).config)


def test_the_recipe_has_the_defaults_of_the_manual_and_36_flags_that_are_all_accepted():
    command = build_command({}, **PLACES)
    assert len([token for token in command if token.startswith("--")]) == 36 + len(["--runs-dir", "--run-name"])
    values = settings({})
    assert (values["rollout_batch_size"], values["n_samples_per_prompt"], values["global_batch_size"]) == (32, 8, 256)
    assert (values["rollout_max_response_len"], values["rm_type"], values["num_rollout"]) == (1024, "math", 12)
    assert values["run_name"] == "plain" and values["engine_mem_fraction_static"] == 0.4


def test_environment_variables_become_flags():
    values = settings({"MILES_NUM_ROLLOUT": "24", "MILES_RUN": "seed-2", "MILES_SEED": "2"})
    assert (values["num_rollout"], values["run_name"], values["seed"], values["rollout_seed"]) == (24, "seed-2", 2, 2)


def test_extra_arguments_win():
    values = settings({"MILES_EXTRA_ARGS": "--n-samples-per-prompt 4 --global-batch-size 128 --lr 2e-6"})
    assert (values["n_samples_per_prompt"], values["global_batch_size"], values["lr"]) == (4, 128, 2e-6)


@pytest.mark.parametrize("number", ["0", "-1", "twelve", "1.5"])
def test_a_number_of_rollouts_that_is_none_is_refused_by_name(number):
    with pytest.raises(ValueError, match="MILES_NUM_ROLLOUT"):
        build_command({"MILES_NUM_ROLLOUT": number}, **PLACES)


def test_true_on_policy_wins_over_extra_arguments():
    values = settings({"MILES_TRUE_ON_POLICY": "1", "MILES_EXTRA_ARGS": "--no-deterministic-mode"})
    names = ("true_on_policy_mode", "deterministic_mode", "engine_enable_deterministic_inference")
    assert all(values[name] for name in names) and values["recompute_logprobs_via_prefill"]
    assert values["attn_implementation"] == "flash_attention_3"


def test_a_flag_of_the_run_on_the_launchers_own_command_line_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--print", "--lr", "1e-5"])
    assert ended.value.code == 2 and "--lr" in capsys.readouterr().err
