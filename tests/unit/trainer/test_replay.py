"""Sampling replay: answers of the engine with top-k, top-p and min-p, scored by the trainer over the same kept sets."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from miles.errors import TrainError
from miles.model.context import packed_context
from miles.trainer.batch import micro_batches, token_batch
from miles.trainer.kl import kl_estimate
from miles.trainer.trainer import LocalTrainer
from miles.types import TrainSample
from tests.unit.engine.tiny import make_core, make_model, request, run_all

CUTS = [{"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 0.8}]


def write(cuts: dict[str, float], *, num: int = 24, seed: int = 0) -> list[TrainSample]:
    """Answers that the engine drew with these settings."""
    core = make_core(make_model(seed=seed), engine_max_total_tokens=2000)
    prompts = [[3 + i % 7, 9, 4] for i in range(num)]
    core.add(request(i, prompts[i], 8, return_kept_tokens=True, ignore_eos=True, **cuts) for i in range(num))
    results = run_all(core)
    return [
        TrainSample(
            tokens=[*prompts[i], *result.output_ids],
            response_length=8,
            loss_mask=[1] * 8,
            reward=float(i % 3 == 0),
            raw_reward=float(i % 3 == 0),
            group_index=i // 4,
            index=i,
            rollout_log_probs=result.log_probs,
            weight_versions=result.weight_versions,
            kept_token_ids=result.kept_token_ids,
        )
        for i, result in sorted(results.items())
    ]


def train(make_config, samples: list[TrainSample], cuts: dict[str, float], **flags):
    config = make_config(rollout_temperature=cuts.get("temperature", 1.0), **flags)
    reference = make_model(seed=1) if config.algorithm.use_kl_loss else None
    teacher = make_model(seed=2) if config.algorithm.use_opd else None
    trainer = LocalTrainer(make_model(), reference, config, total_steps=1, teacher=teacher)
    return trainer.train(samples, rollout_id=0, weight_version=0)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_engine_and_trainer_agree_as_in_plain_sampling_and_not_without_replay(make_config, cuts) -> None:
    samples = write(cuts)
    gap = "train/train_rollout_logprob_abs_diff"
    replayed = train(make_config, samples, cuts).steps[0]
    plain_cuts = {name: value for name, value in cuts.items() if name == "temperature"}
    plain = train(make_config, write(plain_cuts), plain_cuts).steps[0]
    without = [dataclasses.replace(sample, kept_token_ids=None) for sample in samples]
    full = train(make_config, without, cuts).steps[0]
    assert replayed[gap] < 3 * plain[gap] + 1e-7 and replayed[gap + "_max"] < 1e-5
    assert full[gap] > 0.05


def kept_log_softmax(model, sample: TrainSample) -> torch.Tensor:
    """The definition, token by token: softmax over the kept ids, -inf elsewhere."""
    hidden_TD = model(torch.tensor(sample.tokens), packed_context([len(sample.tokens)], device="cpu"))
    logits_TV = (hidden_TD @ model.head_weight.T)[-sample.response_length - 1 : -1]
    mask_TV = torch.ones_like(logits_TV, dtype=torch.bool)
    for row, ids in zip(mask_TV, sample.kept_token_ids, strict=True):
        row[torch.from_numpy(ids.astype(np.int64))] = False
    return logits_TV.masked_fill(mask_TV, -torch.inf).log_softmax(-1)


def drawn(log_p_TV: torch.Tensor, sample: TrainSample) -> torch.Tensor:
    return log_p_TV.gather(1, torch.tensor(sample.tokens[-sample.response_length :])[:, None]).squeeze(1)


def test_kl_and_distillation_are_over_the_kept_set_too(make_config) -> None:
    """All models are distributions over what could be drawn, so k3 estimates a true KL."""
    cuts = {"top_k": 6}
    samples = write(cuts)
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k3", "use_opd": True}
    result = train(make_config, samples, cuts, opd_teacher_load="teacher", opd_log_prob_top_k=4, **flags)
    policy, reference, teacher = (make_model(seed=seed) for seed in range(3))
    k3, reverse_kl = [], []
    with torch.no_grad():
        for sample in samples:
            p, r, t = (kept_log_softmax(model, sample) for model in (policy, reference, teacher))
            k3.append(kl_estimate(drawn(p, sample), drawn(r, sample), "k3"))
            for p_V, t_V in zip(p.exp(), t.exp(), strict=True):
                ids = t_V.topk(4).indices
                p5, t5 = (torch.cat((x[ids], (1 - x[ids].sum()).reshape(1))) for x in (p_V, t_V))
                reverse_kl.append((p5 * (p5.log() - t5.log())).nan_to_num().sum())
    assert result.steps[0]["train/kl_loss"] == pytest.approx(float(torch.cat(k3).mean()), rel=1e-4)
    assert result.steps[0]["train/opd_reverse_kl"] == pytest.approx(float(torch.stack(reverse_kl).mean()), rel=1e-4)


def test_the_estimated_kl_over_the_kept_set_is_the_exact_one_on_average() -> None:
    model, reference = make_model(), make_model(seed=1)
    sample = write({"top_k": 6}, num=1)[0]
    with torch.no_grad():
        p_V, r_V = (kept_log_softmax(m, sample)[0] for m in (model, reference))
    kept = torch.from_numpy(sample.kept_token_ids[0].astype(np.int64))
    exact = (p_V[kept].exp() * (p_V[kept] - r_V[kept])).sum()
    for kind in ("k1", "k3"):
        mean = (p_V[kept].exp() * kl_estimate(p_V[kept], r_V[kept], kind)).sum()
        assert float(mean) == pytest.approx(float(exact), rel=1e-5)


def test_masked_tokens_take_their_kept_sets_with_them() -> None:
    samples = write({"top_k": 6}, num=4)
    samples[1].loss_mask = [1, 0, 0, 1, 1, 0, 1, 0]
    samples[2].loss_mask = [0] * 8
    batch = token_batch(samples, torch.device("cpu"))
    packed = micro_batches(batch, range(4), max_tokens=15)
    for micro_batch in packed:
        bounds, ids = micro_batch.kept.bounds, micro_batch.kept.ids_N
        assert len(bounds) == len(micro_batch.targets_R) + 1 and bounds[-1] == len(ids)
        assert micro_batch.kept.ids_N.dtype == torch.int32
        for t, target in enumerate(micro_batch.targets_R.tolist()):
            assert target in ids[bounds[t] : bounds[t + 1]].tolist()


def test_a_drawn_token_outside_of_its_kept_set_is_a_mistake_of_this_code() -> None:
    samples = write({"top_k": 6}, num=2)
    samples[0].kept_token_ids[3] = np.array([36 - samples[0].tokens[6]], dtype=np.int32)
    with pytest.raises(AssertionError, match="sample 0: the drawn tokens"):
        token_batch(samples, torch.device("cpu"))


def test_field_note_18_a_cut_without_replay_is_stopped_by_the_gap(make_config) -> None:
    samples = [dataclasses.replace(sample, kept_token_ids=None) for sample in write({"top_k": 2})]
    with pytest.raises(TrainError, match="trainer and engine differ by"):
        train(make_config, samples, {}, max_logprob_gap=0.5)


def test_an_engine_that_returns_no_kept_sets_is_refused(make_config) -> None:
    samples = write({"top_k": 6}, num=4)
    samples[2].kept_token_ids = None
    with pytest.raises(TrainError, match="no kept sets for samples 2; "):
        train(make_config, samples, {}, rollout_top_k=6)


def test_kept_sets_of_some_samples_only_are_refused(make_config) -> None:
    samples = write({"top_k": 6}, num=4)
    samples[2].kept_token_ids = None
    with pytest.raises(TrainError, match="no kept sets for samples 2; "):
        train(make_config, samples, {})
