import pytest

from miles.config.flags import flatten, with_values
from miles.config.numerics_rules import numerics_violations
from miles.config.resolve import resolve
from miles.config.sections import RunConfig

EXACT = {"true_on_policy_mode": True}
REFUSED = [
    ({"recompute_logprobs_via_prefill": True}, "needs --true-on-policy-mode"),
    (EXACT | {"loss_type": "sft_loss"}, "--true-on-policy-mode would be ignored"),
    (EXACT | {"use_rollout_logprobs": True, "num_steps_per_rollout": 2}, "--use-rollout-logprobs: leave"),
    (EXACT | {"use_rollout_logprobs": True, "global_batch_size": 64}, "--use-rollout-logprobs: leave"),
    (EXACT | {"lora_rank": 8, "lora_dropout": 0.1}, "--lora-dropout"),
    (EXACT | {"engine_page_size": 8}, "--engine-page-size 8 must be a multiple of 16"),
    ({"engine_enable_deterministic_inference": True, "engine_page_size": 40}, "multiple of 16"),
    (EXACT | {"partial_rollout": True}, "--partial-rollout cannot repeat"),
    ({"deterministic_mode": True, "partial_rollout": True}, "--partial-rollout cannot repeat"),
    ({"deterministic_mode": True, "dynamic_sampling_filter_path": "a.b"}, "needs --engine-enable-deterministic"),
    ({"deterministic_mode": True, "custom_generate_function_path": "a.b"}, "needs --engine-enable-deterministic"),
]
FINE = [
    {},
    EXACT | {"recompute_logprobs_via_prefill": True, "use_rollout_logprobs": True, "engine_page_size": 32},
    EXACT | {"dynamic_sampling_filter_path": "a.b", "num_steps_per_rollout": 4, "rollout_top_p": 0.9},
    {"deterministic_mode": True},
    {"engine_enable_deterministic_inference": True, "custom_generate_function_path": "a.b"},
]


@pytest.mark.parametrize(("values", "text"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_breaks_a_promise_is_refused(values, text):
    (violation,) = numerics_violations(with_values(RunConfig(), values))
    assert text in violation


@pytest.mark.parametrize("values", FINE, ids=str)
def test_what_keeps_it_is_not(values):
    assert list(numerics_violations(with_values(RunConfig(), values))) == []


def test_true_on_policy_mode_switches_the_others_on():
    config, names = resolve(with_values(RunConfig(), EXACT))
    switched = {"deterministic_mode", "engine_enable_deterministic_inference"}
    assert switched <= names and all(flatten(config)[name] for name in switched)
