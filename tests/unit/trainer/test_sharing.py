"""Answers of a group that compute their prompt once: the same numbers, fewer tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.errors import TrainError
from miles.ops.attention import packed_attention
from miles.trainer import packing
from miles.trainer.batch import micro_batches, token_batch
from miles.trainer.forward import Scorer
from miles.trainer.packing import bundles
from miles.trainer.trainer import LocalTrainer
from miles.types import TrainSample
from tests.unit.trainer.test_forward import alone
from tests.unit.trainer.test_trainer import assert_same_gradients, gradients

CPU = torch.device("cpu")
VOCABULARY = 23


@pytest.fixture(autouse=True)
def short_prompts_are_shared(monkeypatch) -> None:
    monkeypatch.setattr(packing, "SHARED_MULTIPLE", 8)
    monkeypatch.setattr("miles.trainer.batch.MICRO_BATCH_COST", 0)


def group(index: int, common: int, lengths: list[int], *, own: int = 0, draw: random.Random) -> list[TrainSample]:
    """Answers of `lengths` tokens to prompts of which the first `common` tokens are equal and the last `own` differ."""
    prompt = [draw.randrange(VOCABULARY) for _ in range(common)]
    made = []
    for place, length in enumerate(lengths):
        rest = [place % VOCABULARY] * min(own, 1) + [draw.randrange(VOCABULARY) for _ in range(own - 1 + length)]
        reward = float(draw.random() < 0.5) + 0.01 * place
        log_probs, versions = [-3.0 + draw.random() for _ in range(length)], [0] * length
        tokens = prompt + (rest if own else [draw.randrange(VOCABULARY) for _ in range(length)])
        sample_index = 100 * index + place
        made.append(TrainSample(tokens, length, [1] * length, reward, reward, index, sample_index, log_probs, versions))
    return made


def rollout() -> list[TrainSample]:
    """Plain groups; one that lost members, one of a single answer; prompts equal in part; a first turn of tool text;
    answers of one token and of none."""
    draw = random.Random(5)
    plain = group(0, 60, [20, 1, 33, 7], draw=draw) + group(1, 45, [9, 9, 9, 9], draw=draw)
    lost = group(2, 50, [30, 4], draw=draw) + group(3, 70, [25], draw=draw)
    partly = group(4, 40, [12, 5, 18, 6], own=9, draw=draw)
    turns = group(5, 35, [40, 30, 20, 10], draw=draw)
    for sample in turns:
        sample.loss_mask[:6] = [0] * 6
        sample.loss_mask[8] = 0
    turns[0].tokens[35:40] = turns[1].tokens[35:40]
    empty = group(6, 48, [5, 8, 8, 3], draw=draw)
    empty[0].loss_mask = [0] * 5
    return plain + lost + partly + turns + empty


def with_kept_sets(samples: list[TrainSample]) -> list[TrainSample]:
    draw = random.Random(6)
    for sample in samples:
        answer = sample.tokens[len(sample.tokens) - sample.response_length :]
        sample.kept_token_ids = [
            np.array(sorted({token, *draw.sample(range(VOCABULARY), draw.randint(1, 6))}), dtype=np.int32)
            for token in answer
        ]
    return samples


def num_read(packed) -> int:
    return sum(len(micro_batch.input_ids_T) for micro_batch in packed)


@pytest.mark.parametrize("max_tokens", [1, 130, 10_000])
def test_scores_equal_those_of_each_answer_alone(make_model, max_tokens) -> None:
    model, samples = make_model(), [sample for sample in rollout() if all(sample.loss_mask)]
    packed = micro_batches(token_batch(samples, CPU), range(len(samples)), max_tokens=max_tokens, share=True)
    log_probs_R, entropy_R = Scorer(1.0, 1024).score_all(model, packed)
    with torch.no_grad():
        expected = [alone(model, sample) for sample in samples]
    torch.testing.assert_close(log_probs_R, torch.cat([scores[0] for scores in expected]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy_R, torch.cat([scores[1] for scores in expected]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        {"entropy_coef": 0.01},
        {"max_tokens_per_gpu": 130, "use_kl_loss": True, "kl_loss_coef": 0.1, "calculate_per_token_loss": True},
        {"micro_batch_size": 3, "global_batch_size": 8},
        {"rollout_top_k": 6},
        {"advantage_estimator": "ppo"},
    ],
    ids=str,
)
def test_loss_and_gradient_equal_those_without_sharing(make_model, make_config, flags) -> None:
    outcomes = []
    for share in (False, True):
        samples = with_kept_sets(rollout()) if "rollout_top_k" in flags else rollout()
        config = make_config(clip_grad=0.0, share_prompts_in_training=share, **({"max_tokens_per_gpu": 4096} | flags))
        critic = make_model(seed=2) if "advantage_estimator" in flags else None
        trainer = LocalTrainer(make_model(), make_model(seed=1), config, total_steps=3, critic=critic)
        result = trainer.train(samples, rollout_id=0, weight_version=0)
        outcomes.append((trainer, result))
    (plain, expected), (sharing, actual) = outcomes
    for mine, theirs in zip(actual.steps, expected.steps, strict=True):
        assert mine["train/tflop"] < theirs["train/tflop"]
        for name in {"train/loss", "train/grad_norm", "train/entropy_loss", "train/value_loss"} & theirs.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-7), name
    assert_same_gradients(gradients(sharing), gradients(plain), 1e-6)
    assert actual.rollout == pytest.approx(expected.rollout, rel=1e-5, abs=1e-6)


def test_each_prompt_is_read_once_and_flops_follow(make_model) -> None:
    draw = random.Random(7)
    samples = group(0, 60, [20, 1, 33], draw=draw) + group(1, 8, [10, 10], draw=draw) + group(2, 50, [9], draw=draw)
    batch = token_batch(samples, CPU)
    (packed,) = micro_batches(batch, range(6), max_tokens=10_000, share=True)
    # The last token of a prompt stays with each answer, whose first token it predicts; the last of an answer is not
    # read. Whole blocks of 8 are shared: 56 of 59, none of 7, and none of a single answer.
    assert len(packed.input_ids_T) == 56 + (23 + 4 + 36) + 2 * 17 + 58
    assert packed.context.positions_T[:83].tolist() == [*range(79), *range(56, 60)]
    assert packed.reads == [(79, 0), (60, 56), (92, 56), (17, 0), (17, 0), (58, 0)]
    assert packed.rows_R.unique().numel() == packed.rows_R.numel()


def test_what_the_prompts_have_in_common_is_shared_up_to_the_first_trained_place(make_model) -> None:
    draw = random.Random(8)
    partly = group(0, 40, [12, 5], own=9, draw=draw)
    (packed,) = micro_batches(token_batch(partly, CPU), range(2), max_tokens=10_000, share=True)
    assert packed.reads == [(60, 0), (53, 40)]
    turns = group(0, 45, [12, 9], draw=draw)
    turns[1].tokens[45:] = turns[0].tokens[45:54]  # the same answer, of which four tokens are not trained
    for sample in turns:
        sample.loss_mask[:4] = [0] * 4
    (packed,) = micro_batches(token_batch(turns, CPU), range(2), max_tokens=10_000, share=True)
    assert packed.reads == [(56, 0), (53, 48)]


def test_a_group_that_does_not_fit_pays_its_prompt_again(make_model) -> None:
    samples = group(0, 61, [40] * 8, draw=random.Random(9))
    batch = token_batch(samples, CPU)
    packed = micro_batches(batch, range(8), max_tokens=240, share=True)
    assert [len(micro_batch.input_ids_T) for micro_batch in packed] == [56 + 4 * 44] * 2
    alone = micro_batches(batch, range(8), max_tokens=80, share=True)
    assert [len(micro_batch.input_ids_T) for micro_batch in alone] == [100] * 8
    few = micro_batches(batch, range(8), max_tokens=10_000, max_samples=3, share=True)
    assert max(len(micro_batch.lengths_S) for micro_batch in few) <= 3 and num_read(few) == 3 * 56 + 8 * 44


def test_groups_that_fill_micro_batches_badly_do_not_share(monkeypatch) -> None:
    draw = random.Random(10)
    samples = [sample for index in range(8) for sample in group(index, 65, [200] * 4, draw=draw)]
    batch = token_batch(samples, CPU)
    for cost, num_tokens, num_batches in ((0, 8 * (64 + 4 * 200), 8), (1024, 8 * 4 * 264, 6)):
        monkeypatch.setattr("miles.trainer.batch.MICRO_BATCH_COST", cost)
        packed = micro_batches(batch, range(len(samples)), max_tokens=1700, share=True)
        assert (num_read(packed), len(packed)) == (num_tokens, num_batches)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    common=st.integers(0, 80),
    max_tokens=st.integers(1, 200),
    max_samples=st.none() | st.integers(1, 5),
)
def test_bundles_hold_every_sample_once_and_keep_the_budgets(lengths, common, max_tokens, max_samples) -> None:
    tokens = [[1] * common + [2 + i] * length for i, length in enumerate(lengths)]
    ends = [common + length for length in lengths]
    made = bundles(tokens, [common] * len(lengths), ends, max_tokens=max_tokens, max_samples=max_samples)
    assert sorted(i for bundle in made for i in bundle.members) == list(range(len(lengths)))
    for bundle in made:
        assert bundle.num_shared == (common // 8 * 8 if len(bundle.members) > 1 else 0)
        assert max_samples is None or len(bundle.members) <= max_samples
        total = bundle.num_shared + sum(ends[i] - bundle.num_shared for i in bundle.members)
        assert len(bundle.members) == 1 or total <= max_tokens
        assert len(bundle.members) == 1 or bundle.num_shared > 0


def test_sharing_that_hides_the_prompt_stops_the_run(make_model, make_config, monkeypatch) -> None:
    def blind(q_TNH, k_TKH, v_TKH, cu_seqlens, max_seqlen, scale, *_):
        return packed_attention(q_TNH, k_TKH, v_TKH, cu_seqlens, max_seqlen, scale)

    monkeypatch.setattr("miles.model.attention.packed_attention", blind)
    trainer = LocalTrainer(make_model(), None, make_config(share_prompts_in_training=True), total_steps=1)
    with pytest.raises(TrainError, match="packed together and alone do not have the same log-probs"):
        trainer.train(rollout(), rollout_id=0, weight_version=0)


def test_the_same_rollout_twice_has_the_same_bits(make_model, make_config) -> None:
    results = []
    for _ in range(2):
        config = make_config(share_prompts_in_training=True, clip_grad=0.0, max_tokens_per_gpu=200)
        trainer = LocalTrainer(make_model(), None, config, total_steps=1)
        trainer.train(rollout(), rollout_id=0, weight_version=0)
        results.append(gradients(trainer))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
