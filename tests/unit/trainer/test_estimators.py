"""Every estimator, objective, correction and penalty through the whole trainer: packing and order change nothing."""

from __future__ import annotations

import copy
import json
import math
import random

import numpy as np
import pytest
import torch

from miles.errors import CheckpointError, TrainError
from miles.model.context import packed_context
from miles.observe.names import describe
from miles.ops import logprob
from miles.trainer.trainer import LocalTrainer
from miles.types import TrainSample

WHITENED = {"normalize_advantages": True}
SETTINGS = {
    "grpo": {},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    "dr_grpo": {"advantage_estimator": "dr_grpo", "rollout_max_response_len": 12},
    "rloo": {"advantage_estimator": "rloo"},
    "max_rl": {"advantage_estimator": "max_rl"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.1, **WHITENED},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", **WHITENED},
    "ppo": {"advantage_estimator": "ppo", "lambd": 0.9, "critic_lr": 1e-2},
    "cispo": {"policy_objective": "cispo"},
    "sapo": {"policy_objective": "sapo"},
    "dual clip": {"eps_clip_c": 3.0, "calculate_per_token_loss": True},
    "unbiased KL": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "entropy": {"entropy_coef": 0.01},
    "overlong": {"overlong_buffer_len": 6, "rollout_max_response_len": 12},
    "opd": {"use_opd": True, "opd_teacher_load": "teacher"},
    "opd top-k": {"use_opd": True, "opd_teacher_load": "teacher", "opd_log_prob_top_k": 5},
    "tis": {"use_tis": True},
    "sequence tis": {"off_policy_correction": "sequence_tis"},
    "geometric": {"off_policy_correction": "geometric", "tis_clip_low": 0.3, "tis_clip": 3.0},
    "opsm and veto": {"use_opsm": True, "veto_threshold": 0.2},
    "bypass": {"use_rollout_logprobs": True},
    "score centering": {"use_score_centering": True, "use_tis": True},
    "replay": {"rollout_top_k": 9},
}


@pytest.fixture
def make_trainer(make_model, make_config):
    def make(*, total_steps: int = 2, seed: int = 0, **flags) -> LocalTrainer:
        config = make_config(**flags)
        algorithm = config.algorithm
        return LocalTrainer(
            make_model(seed=seed),
            make_model(seed=1) if algorithm.use_kl_loss or algorithm.kl_coef else None,
            config,
            total_steps=total_steps,
            teacher=make_model(seed=2) if algorithm.use_opd else None,
            critic=make_model(seed=3) if algorithm.advantage_estimator == "ppo" else None,
        )

    return make


@pytest.fixture
def make_rollout(make_samples, make_model):
    """Samples with what an engine would return for these settings: the policy's own log-probs, and some distance."""

    def make(name: str, **how) -> list[TrainSample]:
        samples, model = make_samples(**how), make_model()
        draw = np.random.default_rng(0)
        for sample in samples:
            answer = sample.tokens[-sample.response_length :]
            with torch.no_grad():
                hidden_TD = model(torch.tensor(sample.tokens), packed_context([len(sample.tokens)], device="cpu"))
                rows = torch.log_softmax(hidden_TD @ model.head_weight.T, -1)[-len(answer) - 1 : -1]
            log_probs = rows.gather(1, torch.tensor(answer)[:, None]).squeeze(1).tolist()
            sample.rollout_log_probs = [x + draw.normal(0, 0.6) for x in log_probs]
            if name == "score centering":
                sample.top_token_ids = [draw.permutation(23)[:6].astype(np.int32) for _ in answer]
                sample.top_log_probs = [np.log(draw.dirichlet(np.ones(7))[:6]).astype(np.float32) for _ in answer]
            if name == "replay":
                sample.kept_token_ids = [np.unique([t, *draw.integers(0, 23, 8)]).astype(np.int32) for t in answer]
        return samples

    return make


def parameters_of(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    tensors, _ = trainer.save()
    return {f"{stem}/{name}": tensor.clone() for stem in tensors for name, tensor in tensors[stem].items()}


def run(trainer: LocalTrainer, samples: list[TrainSample]):
    result = trainer.train(samples, rollout_id=0, weight_version=0)
    gradient = torch.cat([p.grad.double().flatten() for p in trainer.model.parameters()])
    return result, gradient


@pytest.mark.parametrize("name", SETTINGS)
def test_packing_changes_nothing_but_rounding(make_trainer, make_rollout, monkeypatch, name: str) -> None:
    monkeypatch.setattr(logprob, "SMALL_CHUNK_ELEMENTS", 0)
    samples = make_rollout(name, num_groups=2, lengths=[3, 12, 7, 10, 1, 6, 9, 11])
    outcomes = []
    for packing in ({"max_tokens_per_gpu": 4096}, {"max_tokens_per_gpu": 20, "log_probs_chunk_size": 3}):
        trainer = make_trainer(clip_grad=0.0, global_batch_size=4, lr=0.0, **packing, **SETTINGS[name])
        outcomes.append(run(trainer, samples))
    (whole, whole_gradient), (split, split_gradient) = outcomes
    assert whole_gradient.norm() > 0
    assert (split_gradient - whole_gradient).norm() <= 1e-6 * whole_gradient.norm()
    assert split.rollout == pytest.approx(whole.rollout, rel=1e-5, abs=1e-6)
    for ours, theirs in zip(split.steps, whole.steps, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-6, abs=1e-6)
        for metric in (*ours, *split.rollout):
            describe(metric)


@pytest.mark.parametrize("name", SETTINGS)
def test_repeats_and_order_of_arrival_change_no_bit(make_trainer, make_rollout, name: str) -> None:
    samples = make_rollout(name)
    outcomes = []
    for order in (samples, random.Random(3).sample(samples, len(samples))):
        trainer = make_trainer(lr=1e-3, max_tokens_per_gpu=50, global_batch_size=6, **SETTINGS[name])
        result = trainer.train(order, rollout_id=0, weight_version=0)
        outcomes.append((result.rollout, result.steps, parameters_of(trainer)))
    assert outcomes[0][:2] == outcomes[1][:2]
    assert all(torch.equal(outcomes[0][2][key], outcomes[1][2][key]) for key in outcomes[0][2])


def test_a_learning_rate_of_zero_changes_no_weight(make_trainer, make_samples) -> None:
    trainer = make_trainer(lr=0.0, weight_decay=0.1, entropy_coef=0.1, total_steps=20)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    for rollout_id in range(20):
        trainer.train(make_samples(), rollout_id=rollout_id, weight_version=rollout_id)
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


def bandit(trainer: LocalTrainer, *, steps: int, wanted: int = 3, seed: int = 0, age: int = 0) -> float:
    """One-token answers by weights of `age` steps ago, reward 1 for one token: its probability in the end."""
    prompt, generator, history = [1, 2], torch.Generator().manual_seed(seed), []
    for rollout_id in range(steps):
        with torch.no_grad():
            hidden_TD = trainer.model(torch.tensor(prompt), packed_context([len(prompt)], device="cpu"))
            probs_V = torch.softmax(hidden_TD[-1] @ trainer.model.head_weight.T, -1)
        history.append(probs_V)
        version = max(rollout_id - age, 0)
        tokens = torch.multinomial(history[version], 64, replacement=True, generator=generator).tolist()
        samples = []
        for i, token in enumerate(tokens):
            reward = float(token == wanted)
            log_probs = [history[version][token].log().item()]
            samples.append(TrainSample([*prompt, token], 1, [1], reward, reward, i // 16, i, log_probs, [version]))
        trainer.train(samples, rollout_id=rollout_id, weight_version=rollout_id)
    return probs_V[wanted].item()


LEARNING = ["grpo", "gspo", "dr_grpo", "rloo", "max_rl", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]


@pytest.mark.parametrize("name", [*LEARNING, "cispo", "sapo"])
def test_a_rewarded_token_becomes_likely(make_trainer, name: str) -> None:
    flags = {**SETTINGS[name], "kl_coef": 0.0, "rollout_max_response_len": 1}
    assert bandit(make_trainer(lr=3e-3, total_steps=30, **flags), steps=30) > 0.8


STALE = ["auto", "sequence_tis", "icepop", "masked_is", "sequence_masked_is", "decoupled"]


@pytest.mark.parametrize("correction", STALE)
def test_answers_of_older_weights_still_teach(make_trainer, correction: str) -> None:
    trainer = make_trainer(lr=3e-3, total_steps=50, off_policy_correction=correction)
    assert bandit(trainer, steps=50, age=4) > 0.8


def test_ppo_takes_its_advantages_from_the_critic(make_trainer, make_samples) -> None:
    """A new critic says 0, so the first advantages are the rewards to go; then it learns the returns."""
    samples = make_samples()
    trainer = make_trainer(advantage_estimator="ppo", lr=0.0, critic_lr=3e-2, total_steps=40, value_clip=10.0)
    results = [trainer.train(samples, rollout_id=i, weight_version=i) for i in range(40)]
    mean_reward = sum(sample.reward for sample in samples) / 12
    assert results[0].rollout["rollout/values"] == 0.0
    assert results[0].rollout["rollout/advantages"] == pytest.approx(mean_reward)
    losses = [result.steps[0]["train/value_loss"] for result in results]
    assert losses[0] == pytest.approx(sum(sample.reward**2 for sample in samples) / 12)
    assert losses[-1] < 0.1 * losses[0]
    assert results[-1].rollout["rollout/values"] == pytest.approx(mean_reward, abs=0.1)
    assert results[0].seconds["critic_train"] > 0 and results[0].seconds["values"] > 0


def test_the_value_clip_bounds_what_one_update_can_gain(make_trainer, make_samples) -> None:
    samples = make_samples()
    for sample in samples:
        sample.reward = 5.0
    flags = {"advantage_estimator": "ppo", "critic_lr": 0.3, "value_clip": 0.1, "num_steps_per_rollout": 2}
    trainer = make_trainer(lr=0.0, global_batch_size=6, **flags)
    steps = trainer.train(samples, rollout_id=0, weight_version=0).steps
    assert steps[0]["train/value_clipfrac"] == 0.0 < steps[1]["train/value_clipfrac"]
    assert steps[1]["train/value_loss"] >= (5.0 - 0.1) ** 2 * (1 - 1e-6)


def test_first_rollouts_may_train_the_critic_alone(make_trainer, make_samples) -> None:
    trainer = make_trainer(advantage_estimator="ppo", num_critic_only_steps=2, lr=1e-2, weight_decay=0.1)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    for rollout_id in range(3):
        critic = {name: p.clone() for name, p in trainer.critic.model.named_parameters()}
        record = trainer.train(make_samples(), rollout_id=rollout_id, weight_version=rollout_id).steps[0]
        assert any(not torch.equal(critic[n], p) for n, p in trainer.critic.model.named_parameters())
        moved = any(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
        assert moved == (rollout_id == 2)
        assert record["train/num_skipped_steps"] == int(rollout_id < 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_critic_is_saved_and_resumed_bit_for_bit(make_model, make_config, make_samples, dtype) -> None:
    flags = {"advantage_estimator": "ppo", "lr": 1e-3, "critic_lr": 3e-3, "critic_lr_warmup_iters": 3}
    config = make_config(global_batch_size=6, lr_decay_style="linear", **flags)
    rollouts = [make_samples(seed=seed) for seed in range(4)]

    def make(seed: int) -> LocalTrainer:
        model, critic = make_model(seed=seed, dtype=dtype), make_model(seed=seed + 5, dtype=dtype, tied_head=False)
        return LocalTrainer(model, None, config, total_steps=8, critic=critic)

    straight = make(0)
    expected = [straight.train(samples, rollout_id=i, weight_version=i) for i, samples in enumerate(rollouts)]
    first = make(0)
    for i in range(2):
        first.train(rollouts[i], rollout_id=i, weight_version=i)
    tensors, state = copy.deepcopy(first.save())
    assert {"critic", "critic_optimizer"} <= set(tensors)
    assert {"value_head.weight", "lm_head.weight"} <= set(tensors["critic"])
    assert all(tensor.dtype == torch.float32 for tensor in tensors["critic"].values())
    resumed = make(9)
    resumed.load(tensors, json.loads(json.dumps(state)))
    results = [resumed.train(rollouts[i], rollout_id=i, weight_version=i) for i in (2, 3)]
    for ours, theirs in zip(results, expected[2:], strict=True):
        assert (ours.rollout, ours.steps) == (theirs.rollout, theirs.steps)
    ours, theirs = parameters_of(resumed), parameters_of(straight)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_checkpoint_without_a_critic_is_refused(make_trainer) -> None:
    tensors, state = copy.deepcopy(make_trainer().save())
    with pytest.raises(CheckpointError, match="has no critic and no critic_optimizer"):
        make_trainer(advantage_estimator="ppo").load(tensors, state)


@pytest.mark.parametrize("top_k", [0, 23, 6])
def test_distillation_brings_the_student_to_the_teacher(make_model, make_config, top_k: int) -> None:
    """No reward at all: answers of the student, judged by the teacher."""
    student, teacher = make_model(seed=0), make_model(seed=2)
    flags = {"use_opd": True, "opd_teacher_load": "teacher", "opd_log_prob_top_k": top_k, "opd_kl_coef": 1.0}
    trainer = LocalTrainer(student, None, make_config(lr=1e-2, **flags), total_steps=60, teacher=teacher)
    prompt, generator, history = [1, 2], torch.Generator().manual_seed(0), []
    for rollout_id in range(60):
        with torch.no_grad():
            context = packed_context([len(prompt)], device="cpu")
            ids = torch.tensor(prompt)
            log_p, log_t = (
                torch.log_softmax(model(ids, context)[-1] @ model.head_weight.T, -1) for model in (student, teacher)
            )
        history.append(float((log_p.exp() * (log_p - log_t)).sum()))
        tokens = torch.multinomial(log_p.exp(), 64, replacement=True, generator=generator).tolist()
        samples = [
            TrainSample([*prompt, token], 1, [1], 0.0, 0.0, 0, i, [log_p[token].item()], [rollout_id])
            for i, token in enumerate(tokens)
        ]
        trainer.train(samples, rollout_id=rollout_id, weight_version=rollout_id)
    assert history[-1] < 0.15 * history[0], history


def test_several_rewards_reach_the_advantages(make_trainer, make_samples) -> None:
    samples = make_samples(num_groups=1)
    for sample, a, b in zip(samples, [0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0], strict=True):
        sample.rewards, sample.reward = {"a": a, "b": b}, a
    trainer = make_trainer(reward_keys=("a", "b"), reward_key="a", lr=0.0)
    rollout = trainer.train(samples, rollout_id=0, weight_version=0).rollout
    assert rollout["rollout/no_signal_ratio"] == 1.0  # what one gives the other takes
    with pytest.raises(TrainError, match="reward of sample 0 has no number 'c'; it has a, b"):
        make_trainer(reward_keys=("c",)).train(samples, rollout_id=0, weight_version=0)


def test_field_note_17_the_overlong_penalty_shapes_the_reward_but_not_the_raw_one(make_trainer, make_samples) -> None:
    samples = make_samples(num_groups=1, lengths=[2, 8, 10, 12])
    for sample in samples:
        sample.reward = sample.raw_reward = 0.0
    trainer = make_trainer(
        overlong_buffer_len=4, rollout_max_response_len=12, disable_grpo_std_normalization=True, lr=0.0
    )
    result = trainer.train(samples, rollout_id=0, weight_version=0)
    assert result.rollout["rollout/raw_reward"] == 0.0
    assert result.rollout["rollout/advantages"] == pytest.approx(0.0, abs=1e-7)
    # Penalties 0, 0, -0.5, -1; centred 0.375, 0.375, -0.125, -0.625; the on-policy loss is minus their mean.
    assert result.steps[0]["train/pg_loss"] == pytest.approx(0.0, abs=1e-6)
    assert result.rollout["rollout/no_signal_ratio"] == 0.0


def test_samples_older_than_the_weights_switch_a_correction_on_and_say_so(make_trainer, make_samples, caplog) -> None:
    samples = make_samples()
    fresh = make_trainer(lr=0.0).train(samples, rollout_id=0, weight_version=0)
    assert "train/tis" not in fresh.steps[0] and fresh.rollout["rollout/max_sample_age"] == 0.0
    trainer = make_trainer(lr=0.0, total_steps=9)
    with caplog.at_level("INFO"):
        for version in (0, 2, 2, 3):
            result = trainer.train(samples, rollout_id=version, weight_version=version)
    assert {"train/tis", "train/tis_abs", "train/tis_clipfrac", "train/tis_ess"} <= set(result.steps[0])
    assert result.rollout["rollout/max_sample_age"] == 3.0
    text = caplog.text
    assert text.count("off-policy correction tis") == 1
    assert "up to 2 weight versions old" in text and "fresh samples by 3" in text and "fresh samples by 4" in text
    expected = make_trainer(lr=0.0, use_tis=True).train(samples, rollout_id=0, weight_version=0)
    assert result.steps[0]["train/pg_loss"] == expected.steps[0]["train/pg_loss"]


def test_statistics_of_the_ratio_cover_all_tokens(make_trainer, make_samples) -> None:
    samples = make_samples(num_groups=4)
    trainer = make_trainer(lr=1e-2, global_batch_size=8)
    second = trainer.train(samples, rollout_id=0, weight_version=0).steps[1]
    assert 0 < second["train/ratio_min"] < second["train/ois"] < second["train/ratio_max"] < math.inf
