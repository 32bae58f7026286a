"""LocalTrainer as the loop uses it: gradients, metrics, errors, save and load."""

from __future__ import annotations

import copy
import json
import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from miles.errors import CheckpointError, TrainError
from miles.model.context import packed_context
from miles.model.decoder import Decoder
from miles.observe.names import describe
from miles.ops import logprob
from miles.trainer import losses
from miles.trainer.advantages import group_relative, standardised
from miles.trainer.batch import token_batch
from miles.trainer.trainer import LocalTrainer
from miles.types import TrainSample


def gradients(trainer: LocalTrainer) -> dict[str, Tensor]:
    """What the last optimizer step saw; tests that read it switch clipping off."""
    return {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """The whole gradient as one vector: the norm of the difference over the norm."""
    mine, expected = (torch.cat([g.double().flatten() for g in grads.values()]) for grads in (ours, theirs))
    assert ours.keys() == theirs.keys()
    assert (mine - expected).norm() <= tolerance * expected.norm()


def plain_loss(model: Decoder, samples: list[TrainSample], *, per_token: bool) -> Tensor:
    """The on-policy GRPO loss by its definition, one sequence at a time, in float64."""
    advantages = group_relative([s.reward for s in samples], [s.group_index for s in samples], standardised)
    answers = []
    for sample, advantage in zip(samples, advantages, strict=True):
        hidden_TD = model(torch.tensor(sample.tokens), packed_context([len(sample.tokens)], device="cpu"))
        log_softmax_TV = torch.log_softmax(hidden_TD.double() @ model.head_weight.double().T, -1)
        start = len(sample.tokens) - sample.response_length
        log_probs = [log_softmax_TV[i - 1, sample.tokens[i]] for i in range(start, len(sample.tokens))]
        log_probs = [lp for lp, mask in zip(log_probs, sample.loss_mask, strict=True) if mask]
        answers.append(torch.stack([-advantage * torch.exp(lp - lp.detach()) for lp in log_probs]))
    return torch.cat(answers).mean() if per_token else torch.stack([answer.mean() for answer in answers]).mean()


@pytest.mark.parametrize("per_token", [False, True])
def test_loss_and_gradient_equal_the_definition(make_model, make_config, make_samples, per_token: bool) -> None:
    samples = make_samples()
    samples[3].loss_mask[0] = 0 if samples[3].response_length > 1 else 1
    reference = make_model()
    loss = plain_loss(reference, samples, per_token=per_token)
    loss.backward()
    config = make_config(calculate_per_token_loss=per_token, clip_grad=0.0, max_tokens_per_gpu=40)
    trainer = LocalTrainer(make_model(), None, config, total_steps=1)
    record = trainer.train(samples, rollout_id=0, weight_version=0).steps[0]
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert record["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert record["train/grad_norm"] == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in expected.values())), rel=1e-5
    )
    assert_same_gradients(gradients(trainer), expected, 2e-5)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    "flags",
    [{"max_tokens_per_gpu": 1}, {"max_tokens_per_gpu": 60}, {"micro_batch_size": 2}, {"log_probs_chunk_size": 1}],
    ids=str,
)
def test_field_notes_9_and_10_gradient_does_not_depend_on_micro_batches(
    make_model, make_config, make_samples, monkeypatch, flags, per_token
) -> None:
    monkeypatch.setattr(logprob, "SMALL_CHUNK_ELEMENTS", 0)
    samples = make_samples(num_groups=2, lengths=[3, 50, 7, 100, 1, 20, 9, 30])
    results = []
    for changed in ({}, flags):
        config = make_config(
            calculate_per_token_loss=per_token,
            entropy_coef=0.01,
            clip_grad=0.0,
            **({"max_tokens_per_gpu": 4096} | changed),
        )
        trainer = LocalTrainer(make_model(), None, config, total_steps=1)
        record = trainer.train(samples, rollout_id=0, weight_version=0).steps[0]
        results.append((record, gradients(trainer)))
    (whole, whole_gradients), (split, split_gradients) = results
    assert split["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-6)
    assert split["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-6)
    assert_same_gradients(split_gradients, whole_gradients, 1e-6)


def test_operations_are_balanced_on_request_and_change_no_gradient(make_model, make_config, make_samples) -> None:
    samples = make_samples(num_groups=2, group_size=16, lengths=[240, 220] + [9] * 30)
    spreads, found = [], []
    for by_flops in (False, True):
        config = make_config(clip_grad=0.0, max_tokens_per_gpu=480, balance_by_flops=by_flops)
        trainer = LocalTrainer(make_model(), None, config, total_steps=1)
        packed = trainer._pack(token_batch(samples, trainer.device), range(len(samples)), learns=True)
        flops = [trainer._forward_flops(micro_batch) for micro_batch in packed]
        spreads.append(max(flops) / min(flops))
        trainer.train(samples, rollout_id=0, weight_version=0)
        found.append(gradients(trainer))
    assert spreads[1] < 1.01 < 1.09 < spreads[0]
    assert_same_gradients(found[1], found[0], 1e-6)


def test_order_of_arrival_changes_no_bit(make_model, make_config, make_samples) -> None:
    samples = make_samples(num_groups=4)
    outcomes = []
    for order in (samples, random.Random(3).sample(samples, len(samples))):
        config = make_config(lr=1e-3, max_tokens_per_gpu=50, global_batch_size=8)
        trainer = LocalTrainer(make_model(), None, config, total_steps=2)
        result = trainer.train(order, rollout_id=0, weight_version=0)
        outcomes.append((result.rollout, result.steps, trainer.model.state_dict()))
    assert outcomes[0][:2] == outcomes[1][:2]
    assert all(torch.equal(outcomes[0][2][name], outcomes[1][2][name]) for name in outcomes[0][2])


def test_answers_without_signal_cost_no_gradient_and_change_no_metric(make_model, make_config, make_samples) -> None:
    samples = make_samples()
    for sample in samples[:4]:
        sample.reward = 1.0
    config = make_config(clip_grad=0.0, max_tokens_per_gpu=4096)
    trainer = LocalTrainer(make_model(), None, config, total_steps=1)
    result = trainer.train(samples, rollout_id=0, weight_version=0)
    # An entropy term too small to matter makes every answer take part in the backward pass.
    everyone = make_config(clip_grad=0.0, max_tokens_per_gpu=4096, entropy_coef=1e-30)
    other = LocalTrainer(make_model(), None, everyone, total_steps=1)
    expected = other.train(samples, rollout_id=0, weight_version=0)
    assert result.steps[0]["train/num_micro_batches"] == 2
    assert expected.steps[0]["train/num_micro_batches"] == 1
    assert result.rollout == pytest.approx(expected.rollout, rel=2e-5, abs=1e-6)
    expected_step = expected.steps[0] | {"train/num_micro_batches": 2}
    assert result.steps[0] == pytest.approx(expected_step, rel=2e-5, abs=1e-6)
    assert_same_gradients(gradients(trainer), gradients(other), 1e-6)


def test_metrics_of_a_step_with_one_update(make_model, make_config, make_samples) -> None:
    samples = make_samples()
    samples[5].truncated = True
    trainer = LocalTrainer(make_model(), None, make_config(lr=0.25), total_steps=1)
    result = trainer.train(samples, rollout_id=0, weight_version=0)
    step, rollout = result.steps[0], result.rollout
    for name in (*step, *rollout):
        describe(name)
    with torch.no_grad():
        model = make_model()
        log_probs, entropies = zip(*(score_alone(model, sample) for sample in samples), strict=True)
    gaps = [(lp - torch.tensor(s.rollout_log_probs)).abs() for lp, s in zip(log_probs, samples, strict=True)]
    all_gaps = sorted(torch.cat(gaps).tolist())
    per_answer = lambda rows: sum(float(row.mean()) for row in rows) / len(rows)  # noqa: E731
    advantages = group_relative([s.reward for s in samples], [s.group_index for s in samples], standardised)
    assert rollout == pytest.approx(
        {
            "rollout/response_lengths": sum(s.response_length for s in samples) / 12,
            "rollout/total_lengths": sum(len(s.tokens) for s in samples) / 12,
            "rollout/raw_reward": sum(s.raw_reward for s in samples) / 12,
            "rollout/rewards": float(advantages.mean()),
            "rollout/truncated": 1 / 12,
            "rollout/num_unscored": 0.0,
            "rollout/log_probs": per_answer(log_probs),
            "rollout/rollout_log_probs": per_answer([torch.tensor(s.rollout_log_probs) for s in samples]),
            "rollout/entropy": per_answer(entropies),
            "rollout/advantages": float(advantages.mean()),
            "rollout/returns": float(advantages.mean()),
            "rollout/no_signal_ratio": float((advantages == 0).double().mean()),
            "rollout/no_signal_group_ratio": float((advantages.view(3, 4) == 0).all(1).double().mean()),
            "rollout/max_sample_age": 0.0,
        },
        rel=1e-5,
        abs=1e-6,
    )
    assert step["train/entropy_loss"] == pytest.approx(per_answer(entropies), rel=1e-5)
    assert step["train/train_rollout_logprob_abs_diff"] == pytest.approx(per_answer(gaps), rel=1e-5)
    assert step["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(all_gaps[-1], rel=1e-5)
    assert step["train/train_rollout_logprob_abs_diff_p99"] == pytest.approx(
        all_gaps[math.ceil(0.99 * len(all_gaps)) - 1], rel=1e-5
    )
    assert step["train/ppo_kl"] == 0.0 and step["train/pg_clipfrac"] == 0.0
    assert step["train/ois"] == pytest.approx(1.0, rel=1e-12) and step["train/ess_ratio"] == pytest.approx(1.0)
    assert step["train/lr-pg_0"] == 0.25 and step["train/step"] == 0 and step["train/num_skipped_steps"] == 0
    assert step["train/num_samples"] == 12 and step["train/num_tokens"] == sum(s.response_length for s in samples)
    assert result.seconds["log_probs"] == result.seconds["ref_log_probs"] == 0.0 < result.seconds["actor_train"]


def score_alone(model: Decoder, sample: TrainSample, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    hidden_TD = model(torch.tensor(sample.tokens), packed_context([len(sample.tokens)], device="cpu"))
    rows = torch.log_softmax(hidden_TD @ model.head_weight.T / temperature, -1)[-sample.response_length - 1 : -1]
    targets = torch.tensor(sample.tokens[-sample.response_length :])
    return rows.gather(1, targets[:, None]).squeeze(1), -(rows.exp() * rows).sum(-1)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_field_note_18_logits_are_divided_by_the_rollout_temperature(
    make_model, make_config, make_samples, temperature
) -> None:
    samples = make_samples()
    with torch.no_grad():
        for sample in samples:
            sample.rollout_log_probs = score_alone(make_model(), sample, temperature)[0].tolist()
    trainer = LocalTrainer(make_model(), None, make_config(rollout_temperature=temperature), total_steps=1)
    step = trainer.train(samples, rollout_id=0, weight_version=0).steps[0]
    assert step["train/train_rollout_logprob_abs_diff_max"] < 1e-5


def test_a_rewarded_token_becomes_likely(make_model, make_config) -> None:
    """Policy gradient in the right direction: one-token answers, reward 1 for token 3."""
    model, prompt, wanted = make_model(), [1, 2], 3
    trainer = LocalTrainer(model, None, make_config(lr=3e-3, clip_grad=1.0), total_steps=30)
    generator = torch.Generator().manual_seed(0)
    history = []
    for rollout_id in range(30):
        with torch.no_grad():
            hidden_TD = model(torch.tensor(prompt), packed_context([len(prompt)], device="cpu"))
            probs_V = torch.softmax(hidden_TD[-1] @ model.head_weight.T, -1)
        history.append(probs_V[wanted].item())
        tokens = torch.multinomial(probs_V, 64, replacement=True, generator=generator).tolist()
        rewards = [float(token == wanted) for token in tokens]
        samples = [
            TrainSample([*prompt, token], 1, [1], reward, reward, 0, i, [probs_V[token].log().item()], [rollout_id])
            for i, (token, reward) in enumerate(zip(tokens, rewards, strict=True))
        ]
        trainer.train(samples, rollout_id=rollout_id, weight_version=rollout_id)
    assert history[0] < 0.2 and history[-1] > 0.9, history


def test_several_updates_are_judged_against_the_weights_before_the_first(make_model, make_config, make_samples) -> None:
    samples = make_samples(num_groups=4)
    trainer = LocalTrainer(make_model(), None, make_config(lr=3e-3, global_batch_size=8), total_steps=2)
    result = trainer.train(samples, rollout_id=0, weight_version=0)
    first, second = result.steps
    with torch.no_grad():
        model = make_model()
        old = [score_alone(model, sample)[0].mean() for sample in samples]
    assert result.rollout["rollout/log_probs"] == pytest.approx(float(torch.stack(old).mean()), rel=1e-5)
    assert abs(first["train/ppo_kl"]) < 1e-6 < abs(second["train/ppo_kl"])
    assert second["train/ess_ratio"] < 1.0
    assert [first["train/step"], second["train/step"]] == [0, 1]
    assert result.seconds["log_probs"] > 0.0


def test_use_rollout_logprobs_judges_against_the_engine(make_model, make_config, make_samples) -> None:
    samples = make_samples()
    trainer = LocalTrainer(make_model(), None, make_config(use_rollout_logprobs=True), total_steps=1)
    step = trainer.train(samples, rollout_id=0, weight_version=0).steps[0]
    gaps = [
        (torch.tensor(sample.rollout_log_probs) - score_alone(make_model(), sample)[0]).mean().item()
        for sample in samples
    ]
    assert step["train/ppo_kl"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert step["train/train_rollout_logprob_abs_diff"] > 0.0  # measured, not 0 by construction


def test_kl_to_a_frozen_reference(make_model, make_config, make_samples) -> None:
    samples = make_samples()
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k3"}
    reference = make_model(seed=1)
    before = copy.deepcopy(reference.state_dict())
    trainer = LocalTrainer(make_model(), reference, make_config(**flags), total_steps=1)
    result = trainer.train(samples, rollout_id=0, weight_version=0)
    step = result.steps[0]
    with torch.no_grad():
        pairs = [(score_alone(make_model(), s)[0], score_alone(reference, s)[0]) for s in samples]
    k3 = sum(float((torch.exp(r - p) - 1 - (r - p)).mean()) for p, r in pairs) / len(pairs)
    assert step["train/kl_loss"] == pytest.approx(k3, rel=1e-4)
    assert step["train/loss"] == pytest.approx(step["train/pg_loss"] + 0.5 * k3, rel=1e-4, abs=1e-6)
    assert result.rollout["rollout/ref_log_probs"] == pytest.approx(
        sum(float(r.mean()) for _, r in pairs) / 12, rel=1e-5
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in reference.state_dict().items())


def test_sft_loss_lowers_the_loss_of_the_given_answers(make_model, make_config, make_samples) -> None:
    samples = make_samples(num_groups=2)
    for sample in samples:
        sample.rollout_log_probs = sample.weight_versions = None
    # The temperature of a rollout that does not exist must not change the loss.
    config = make_config(loss_type="sft_loss", lr=1e-2, rollout_temperature=0.5, calculate_per_token_loss=True)
    trainer = LocalTrainer(make_model(), None, config, total_steps=20)
    history = [trainer.train(samples, rollout_id=i, weight_version=i).steps[0] for i in range(20)]
    expected = -torch.cat([score_alone(make_model(), sample)[0] for sample in samples]).mean().item()
    assert history[0]["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert history[-1]["train/loss"] < 0.6 * history[0]["train/loss"]
    for name in history[0]:
        describe(name)


def test_field_note_24_masked_and_empty_answers_change_nothing_for_the_others(
    make_model, make_config, make_samples
) -> None:
    samples = make_samples()
    trainer = LocalTrainer(make_model(), None, make_config(), total_steps=1)
    expected = trainer.train(samples, rollout_id=0, weight_version=0)
    masked = TrainSample([1, 2, 3], 2, [0, 0], math.nan, 0.0, 0, 100, [math.nan, -1e9], [0, 0])
    empty = TrainSample([1, 2], 0, [], math.nan, 0.0, 1, 101, None, None)
    other = LocalTrainer(make_model(), None, make_config(), total_steps=1)
    result = other.train([masked, *samples, empty], rollout_id=0, weight_version=0)
    assert result.steps[0] == pytest.approx(expected.steps[0] | {"train/num_samples": 14}, rel=1e-6, abs=1e-7)
    for name in ("log_probs", "entropy", "advantages", "rollout_log_probs"):
        assert result.rollout[f"rollout/{name}"] == pytest.approx(expected.rollout[f"rollout/{name}"], rel=1e-6)
    assert result.rollout["rollout/num_unscored"] == 2


def test_what_no_model_could_be_trained_on_names_its_samples(make_model, make_config, make_samples) -> None:
    trainer = LocalTrainer(make_model(), None, make_config(), total_steps=1)
    for token_id in (23, -1):
        samples = make_samples(num_groups=1)
        samples[1].tokens = [*samples[1].tokens[:-1], token_id]
        with pytest.raises(TrainError, match=f"samples {samples[1].index} have token ids that are not from 0 to 22"):
            trainer.train(samples, rollout_id=0, weight_version=0)
    samples = make_samples(num_groups=1)
    samples[2].weight_versions = [7] * samples[2].response_length
    with pytest.raises(TrainError, match=f"samples {samples[2].index} are of weights that do not exist yet"):
        trainer.train(samples, rollout_id=0, weight_version=6)
    samples = make_samples(num_groups=1)
    samples[2].rollout_log_probs = None
    with pytest.raises(TrainError, match=f"sample {samples[2].index} has no log-probs, others have; a hook must give"):
        trainer.train(samples, rollout_id=0, weight_version=6)
    samples[2].tokens = [1] * 5000 + samples[2].tokens
    with pytest.raises(TrainError, match=f"samples {samples[2].index} have more tokens than the [0-9]+ of the model"):
        trainer.train(samples, rollout_id=0, weight_version=6)
    samples[2].loss_mask = [0] * samples[2].response_length
    trainer.train(samples, rollout_id=0, weight_version=6)


def test_rows_of_most_likely_tokens_do_not_run_into_each_other(make_samples) -> None:
    samples = make_samples(num_groups=1)
    for sample, count in zip(samples, (2, 2, 4, 2), strict=False):
        sample.top_token_ids = [np.arange(count, dtype=np.int32)] * sample.response_length
        sample.top_log_probs = [np.zeros(count, np.float32)] * sample.response_length
    with pytest.raises(AssertionError, match=f"samples {samples[2].index}: not all tokens have 2"):
        token_batch(samples[:4], torch.device("cpu"))


@pytest.mark.parametrize("flags", [{}, {"global_batch_size": 2}, {"use_kl_loss": True}], ids=str)
@pytest.mark.parametrize("num_samples", [0, 4])
def test_a_step_without_trained_tokens_is_skipped_and_counted(
    make_model, make_config, make_samples, flags, num_samples
) -> None:
    samples = make_samples(num_groups=1)[:num_samples]
    for sample in samples:
        sample.loss_mask = [0] * sample.response_length
    trainer = LocalTrainer(make_model(), make_model(), make_config(lr=1.0, **flags), total_steps=2)
    before = copy.deepcopy(trainer.model.state_dict())
    result = trainer.train(samples, rollout_id=0, weight_version=0)
    numbers = [*result.rollout.values(), *(value for step in result.steps for value in step.values())]
    assert all(math.isfinite(number) for number in numbers)
    assert all(step["train/num_skipped_steps"] == 1 for step in result.steps)
    assert trainer.optimizer.num_updates == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.parametrize("num_masked", [0, 6])
def test_loss_that_is_not_finite_names_the_samples_and_updates_nothing(
    make_model, make_config, make_samples, num_masked
) -> None:
    """Also where the first of two steps, which has no trained token, has been passed by then."""
    samples = make_samples()
    poisoned = 22
    for sample in samples:
        sample.tokens = [token % poisoned for token in sample.tokens]
    samples[4].tokens[0] = samples[9].tokens[0] = poisoned
    for sample in samples[:num_masked]:
        sample.loss_mask = [0] * sample.response_length
    flags = {"global_batch_size": 6, "use_rollout_logprobs": True, "ci_disable_kl_checker": True} if num_masked else {}
    # Untied, so that the poisoned row reaches only the samples that read it.
    trainer = LocalTrainer(make_model(tied_head=False), None, make_config(lr=1.0, **flags), total_steps=1)
    with torch.no_grad():
        trainer.model.embedding.weight[poisoned] = math.nan
    before = copy.deepcopy(trainer.save())
    with pytest.raises(TrainError, match=f"loss of samples {'9' if num_masked else '4, 9'} is not finite"):
        trainer.train(samples, rollout_id=0, weight_version=0)
    assert_same_state(trainer.save(), before)


def test_gradient_that_is_not_finite_names_the_samples(make_model, make_config, make_samples, monkeypatch) -> None:
    def infinite_slope(log_probs_R, entropy_R, inputs, config):
        """Value 0 everywhere; slope infinite where the advantage is largest."""
        x_R = (log_probs_R - log_probs_R.detach()).clamp(min=0.0)
        steep_R = inputs.advantages_R > 1.4
        return {"loss": torch.where(steep_R, x_R, 1.0).sqrt() * steep_R}

    monkeypatch.setitem(losses.LOSSES, "policy_loss", infinite_slope)
    samples = make_samples(num_groups=2)
    for sample in samples:
        sample.reward = float(sample.index in (2, 7))
    trainer = LocalTrainer(make_model(), None, make_config(lr=1.0), total_steps=1)
    before = copy.deepcopy(trainer.save())
    with pytest.raises(TrainError, match=r"gradient of samples 2, 7 is not finite"):
        trainer.train(samples, rollout_id=0, weight_version=0)
    assert_same_state(trainer.save(), before)


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_a_step_that_is_not_finite_is_skipped_when_asked_to(
    make_model, make_config, make_samples, caplog, estimator
) -> None:
    """Two steps, the first poisoned: the second is made as if it were alone, and the run goes on."""
    poisoned = 22
    samples = make_samples(num_groups=4)
    for sample in samples:
        sample.tokens = [token % poisoned for token in sample.tokens]
    clean = copy.deepcopy(samples)
    samples[4].tokens[0] = poisoned
    flags = {"lr": 0.1, "global_batch_size": 8, "advantage_estimator": estimator, "on_not_finite": "skip"}
    flags |= {"use_rollout_logprobs": True, "ci_disable_kl_checker": True, "num_critic_only_steps": 0}
    outcomes = []
    for given in (samples, clean[8:]):
        critic = make_model(seed=4, tied_head=False) if estimator == "ppo" else None
        trainer = LocalTrainer(make_model(tied_head=False), None, make_config(**flags), total_steps=2, critic=critic)
        with torch.no_grad():
            trainer.model.embedding.weight[poisoned] = math.nan
        result = trainer.train(given, rollout_id=0, weight_version=0)
        outcomes.append((result, trainer.optimizer.num_updates))
        numbers = [*result.rollout.values(), *(value for step in result.steps for value in step.values())]
        assert all(math.isfinite(number) for number in numbers)
        for name in (name for step in result.steps for name in step):
            describe(name)
    (result, num_updates), (alone, _) = outcomes
    assert num_updates == 1
    assert [step["train/num_skipped_steps"] for step in result.steps] == [1, 0]
    assert [step["train/num_not_finite"] for step in result.steps] == [1, 0]
    assert "loss of samples 4 is not finite" in caplog.text and "--on-not-finite skip" in caplog.text
    if estimator == "grpo":
        expected = alone.steps[0] | {"train/step": 1, "train/lr-pg_0": 0.1}
        assert {name: result.steps[1][name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_answers_whose_engine_log_probs_are_not_finite_are_left_out(
    make_model, make_config, make_samples, caplog
) -> None:
    samples, masked = make_samples(), make_samples()
    samples[3].rollout_log_probs = [math.nan] * samples[3].response_length
    masked[3].loss_mask = [0] * masked[3].response_length
    strict = LocalTrainer(make_model(), None, make_config(lr=0.1), total_steps=1)
    with pytest.raises(TrainError, match="log-probs of samples 3 are not finite"):
        strict.train(samples, rollout_id=0, weight_version=0)
    trainer = LocalTrainer(make_model(), None, make_config(lr=0.1, on_not_finite="skip"), total_steps=1)
    result = trainer.train(samples, rollout_id=0, weight_version=0)
    other = LocalTrainer(make_model(), None, make_config(lr=0.1), total_steps=1)
    expected = other.train(masked, rollout_id=0, weight_version=0)
    assert result.steps[0] == expected.steps[0] | {"train/num_not_finite": 1}
    assert "samples 3 are not finite (nan or inf); they are left out (--on-not-finite skip)" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), other.model.parameters(), strict=True))


def assert_same_state(ours, theirs) -> None:
    assert json.dumps(ours[1]) == json.dumps(theirs[1])
    for stem in theirs[0]:
        assert ours[0][stem].keys() == theirs[0][stem].keys()
        for name, tensor in theirs[0][stem].items():
            torch.testing.assert_close(ours[0][stem][name], tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_for_bit_and_nothing_moves(make_model, make_config, make_samples, dtype) -> None:
    config = make_config(
        lr=1e-3,
        lr_decay_style="cosine",
        lr_warmup_iters=2,
        weight_decay=0.1,
        global_batch_size=8,
        max_tokens_per_gpu=60,
    )
    rollouts = [make_samples(num_groups=4, seed=seed) for seed in range(4)]
    straight = LocalTrainer(make_model(dtype=dtype), None, config, total_steps=8)
    expected = [straight.train(samples, rollout_id=i, weight_version=i) for i, samples in enumerate(rollouts)]

    first = LocalTrainer(make_model(dtype=dtype), None, config, total_steps=8)
    for i in range(2):
        first.train(rollouts[i], rollout_id=i, weight_version=i)
    tensors, state = copy.deepcopy(first.save())
    state = json.loads(json.dumps(state))
    resumed = LocalTrainer(make_model(seed=9, dtype=dtype), None, config, total_steps=8)
    addresses = addresses_of(resumed)
    resumed.load(tensors, state)
    results = [resumed.train(rollouts[i], rollout_id=i, weight_version=i) for i in (2, 3)]

    assert addresses_of(resumed) == addresses
    for ours, theirs in zip(results, expected[2:], strict=True):
        assert (ours.rollout, ours.steps) == (theirs.rollout, theirs.steps)
    assert_same_state(resumed.save(), straight.save())
    assert all(tensor.dtype == torch.float32 for tensor in tensors["model"].values())
    assert "model.layers.0.self_attn.q_proj.weight" in tensors["model"]
    assert "exp_avg_sq.model.layers.1.mlp.up_proj.weight" in tensors["optimizer"]


def addresses_of(trainer: LocalTrainer) -> list[int]:
    parameters = trainer.model.parameters()
    return [address for p in parameters for address in (p.data_ptr(), p.grad.data_ptr())]


def test_a_resumed_trainer_remembers_that_samples_were_old(make_model, make_config, make_samples) -> None:
    """`--off-policy-correction auto` weighs from then on."""
    old, fresh = make_samples(), make_samples(seed=1)
    for sample in fresh:
        sample.weight_versions = [1] * sample.response_length
    trainer, again = (LocalTrainer(make_model(), None, make_config(), total_steps=2) for _ in range(2))
    assert "train/tis" in trainer.train(old, rollout_id=0, weight_version=1).steps[0]
    tensors, state = copy.deepcopy(trainer.save())
    again.load(tensors, json.loads(json.dumps(state)))
    expected, resumed = (one.train(fresh, rollout_id=1, weight_version=1).steps[0] for one in (trainer, again))
    assert resumed == expected and "train/tis" in resumed


def test_load_refuses_a_state_of_another_model_and_copies_nothing(make_model, make_config) -> None:
    trainer = LocalTrainer(make_model(), None, make_config(), total_steps=1)
    before = copy.deepcopy(trainer.save())
    tensors, state = copy.deepcopy(LocalTrainer(make_model(seed=1), None, make_config(), total_steps=1).save())
    name = "exp_avg.model.norm.weight"
    for broken in (tensors["optimizer"][name][:3], None):
        optimizer = {**tensors["optimizer"], name: broken}
        if broken is None:
            del optimizer[name]
        with pytest.raises(CheckpointError, match="exp_avg.model.norm.weight"):
            trainer.load({**tensors, "optimizer": optimizer}, state)
        assert_same_state(trainer.save(), before)


def test_bfloat16_training_follows_float32(make_model, make_config, make_samples) -> None:
    samples = make_samples(num_groups=2)
    losses_of = {}
    for dtype in (torch.float32, torch.bfloat16):
        config = make_config(loss_type="sft_loss", lr=3e-3, max_tokens_per_gpu=40)
        trainer = LocalTrainer(make_model(dtype=dtype), None, config, total_steps=10)
        losses_of[dtype] = [
            trainer.train(samples, rollout_id=i, weight_version=i).steps[0]["train/loss"] for i in range(10)
        ]
    assert losses_of[torch.bfloat16] == pytest.approx(losses_of[torch.float32], rel=0.03)
