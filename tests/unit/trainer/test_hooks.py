"""Losses, corrections and reducers of the user: what they see, how they count, what is refused before a run."""

from __future__ import annotations

import pytest
import torch

from miles.errors import PluginError
from miles.observe.names import describe
from miles.trainer.hooks import load_hooks
from miles.trainer.trainer import LocalTrainer

HERE = "tests.unit.trainer.my_hooks"


def train(make_model, make_config, samples, **flags):
    trainer = LocalTrainer(make_model(), None, make_config(clip_grad=0.0, **flags), total_steps=1)
    record = trainer.train(samples, rollout_id=0, weight_version=0).steps[0]
    return record, torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def test_a_custom_loss_equal_to_the_built_in_one_trains_alike(make_model, make_config, make_samples) -> None:
    samples = make_samples()
    flags = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}.reinforce", "max_tokens_per_gpu": 40}
    record, gradient = train(make_model, make_config, samples, **flags)
    expected, expected_gradient = train(make_model, make_config, samples, max_tokens_per_gpu=40)
    assert record["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


def test_what_a_custom_loss_returns_besides_is_a_metric(make_model, make_config, make_samples) -> None:
    flags = {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}.squared"}
    trainer = LocalTrainer(make_model(), None, make_config(**flags), total_steps=1)
    result = trainer.train(make_samples(), rollout_id=0, weight_version=0)
    assert result.steps[0]["train/custom_twice"] == pytest.approx(2 * result.rollout["rollout/log_probs"], rel=1e-5)
    for name in result.steps[0]:
        describe(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_number", r"'loss' must be a tensor with one number per token, of shape \(3,\)"),
        ("without_gradient", "the loss has no gradient"),
        ("raises", r"my_hooks.py:\d+: AttributeError: .*no_such_thing"),
        ("wrong_signature", r"is called as f\(args, log_probs, entropy, inputs\) but is defined as f\(log_probs\)"),
        ("missing", "has no function missing"),
    ],
)
def test_a_wrong_custom_loss_is_refused_before_the_run(make_config, name: str, message: str) -> None:
    config = make_config(loss_type="custom_loss", custom_loss_function_path=f"{HERE}.{name}")
    with pytest.raises(PluginError, match=message) as caught:
        load_hooks(config)
    assert "--custom-loss-function-path" in str(caught.value)


def test_a_custom_loss_that_fails_later_is_named(make_model, make_config, make_samples) -> None:
    config = make_config(loss_type="custom_loss", custom_loss_function_path=f"{HERE}.raises_later")
    trainer = LocalTrainer(make_model(), None, config, total_steps=1)
    with pytest.raises(PluginError, match=r"raises_later: failed: .*my_hooks.py:\d+: KeyError: 'later'"):
        trainer.train(make_samples(), rollout_id=0, weight_version=0)


def test_a_custom_correction_gets_answers_and_changes_the_loss(make_model, make_config, make_samples) -> None:
    samples = make_samples(num_groups=1, lengths=[1, 4, 2, 3])
    for sample in samples:
        sample.reward = float(sample.index == 1)
    record, _ = train(make_model, make_config, samples, custom_tis_function_path=f"{HERE}.halve")
    expected, _ = train(make_model, make_config, samples)
    advantages = [-0.5, 1.5, -0.5, -0.5]
    halves = [0.5 * -a * (n - 1) / n for a, n in zip(advantages, [1, 4, 2, 3], strict=True)]
    assert record["train/pg_loss"] == pytest.approx(sum(halves) / 4, rel=1e-5)
    assert record["train/custom_gap"] == pytest.approx(expected["train/train_rollout_logprob_abs_diff"], rel=1e-5)


def test_a_custom_correction_of_another_signature_is_refused(make_config) -> None:
    with pytest.raises(PluginError, match="--custom-tis-function-path .*is called with the keywords args, pg_loss"):
        load_hooks(make_config(custom_tis_function_path=f"{HERE}.wrong_signature"))


def test_a_reducer_gives_the_weights_of_the_tokens(make_model, make_config, make_samples) -> None:
    """The public example: sum over tokens by a constant, here 7, is the loss with a constant length."""
    samples = make_samples()
    samples[2].loss_mask[0] = 0
    path = f"{HERE}.constant_reducer"
    record, gradient = train(make_model, make_config, samples, custom_pg_loss_reducer_function_path=path)
    expected, expected_gradient = train(make_model, make_config, samples, loss_constant_length=7)
    assert record["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_a_reducer_that_is_no_weighted_sum_is_refused(make_config) -> None:
    with pytest.raises(PluginError, match="is not a weighted sum"):
        load_hooks(make_config(custom_pg_loss_reducer_function_path=f"{HERE}.squaring_reducer"))
