from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from miles.errors import TrainError
from miles.model.context import packed_context
from miles.model.decoder import Decoder
from miles.trainer.batch import micro_batches, token_batch
from miles.trainer.forward import Scorer
from miles.trainer.packing import canonical_order
from miles.types import TrainSample

CPU = torch.device("cpu")


def alone(model: Decoder, sample: TrainSample, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the whole response, from the full sequence by itself and the plain formula."""
    hidden_TD = model(torch.tensor(sample.tokens), packed_context([len(sample.tokens)], device="cpu"))
    log_softmax_TV = torch.log_softmax(hidden_TD @ model.head_weight.T / temperature, -1)
    start = len(sample.tokens) - sample.response_length
    rows = log_softmax_TV[start - 1 : -1]
    return rows.gather(1, torch.tensor(sample.tokens[start:])[:, None]).squeeze(1), -(rows.exp() * rows).sum(-1)


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_field_note_23_packed_scores_equal_one_by_one(make_model, make_samples, max_tokens, temperature) -> None:
    model, samples = make_model(), make_samples()
    batch = token_batch(samples, CPU)
    packed = micro_batches(batch, range(len(samples)), max_tokens=max_tokens)
    log_probs_R, entropy_R = Scorer(temperature, 1024).score_all(model, packed)
    with torch.no_grad():
        expected = [alone(model, sample, temperature) for sample in samples]
    torch.testing.assert_close(log_probs_R, torch.cat([scores[0] for scores in expected]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy_R, torch.cat([scores[1] for scores in expected]), rtol=1e-5, atol=1e-5)


def test_only_trained_tokens_have_a_place_and_each_keeps_its_own_score(make_model, make_samples) -> None:
    model, samples = make_model(), make_samples(num_groups=1, lengths=[6, 4, 5, 3])
    samples[0].loss_mask = [1, 1, 0, 0, 1, 0]
    samples[1].loss_mask = [0, 0, 0, 0]
    samples[2].tokens, samples[2].response_length = samples[2].tokens[:2], 0
    samples[2].loss_mask, samples[2].rollout_log_probs, samples[2].weight_versions = [], [], []
    batch = token_batch(samples, CPU)
    packed = micro_batches(batch, range(4), max_tokens=1000)
    log_probs_R, _ = Scorer(1.0, 1024).score_all(model, packed)
    with torch.no_grad():
        first, last = alone(model, samples[0])[0], alone(model, samples[3])[0]
    assert batch.lengths_S.tolist() == [3, 0, 0, 3]
    torch.testing.assert_close(log_probs_R, torch.cat([first[[0, 1, 4]], last]), rtol=1e-5, atol=1e-5)
    assert batch.rollout_log_probs_R.tolist() == pytest.approx(
        [samples[0].rollout_log_probs[i] for i in (0, 1, 4)] + samples[3].rollout_log_probs
    )


def test_field_note_22_the_final_end_token_is_trained_even_when_it_is_the_pad_token(make_model, make_samples) -> None:
    end_and_pad = 7
    model = make_model(eos_token_ids=(end_and_pad,))
    samples = make_samples(num_groups=1, group_size=2, lengths=[4, 9])
    for sample in samples:
        sample.tokens[-1] = sample.tokens[-2] = end_and_pad
    batch = token_batch(samples, CPU)
    packed = micro_batches(batch, range(2), max_tokens=1000)
    log_probs_R, _ = Scorer(1.0, 1024).score_all(model, packed)
    assert batch.lengths_S.tolist() == [4, 9]
    assert packed[0].targets_R.tolist() == samples[0].tokens[-4:] + samples[1].tokens[-9:]
    with torch.no_grad():
        expected = torch.cat([alone(model, sample)[0] for sample in samples])
    torch.testing.assert_close(log_probs_R, expected, rtol=1e-5, atol=1e-5)


def test_part_of_a_batch_is_the_batch_of_the_part(make_samples) -> None:
    samples = make_samples()
    samples[4].loss_mask = [0] * samples[4].response_length
    whole, own = token_batch(samples, CPU), token_batch(samples[3:9], CPU)
    part, places = whole.part(3, 9)
    for mine, theirs in zip(part.targets, own.targets, strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist() and mine.rows.tolist() == theirs.rows.tolist()
    assert part.lengths_S.tolist() == own.lengths_S.tolist()
    assert part.sample_R.tolist() == own.sample_R.tolist()
    assert whole.rollout_log_probs_R[places].tolist() == own.rollout_log_probs_R.tolist()


def test_vectors_of_a_micro_batch_fit_and_kernels_find_the_targets_at_16_bytes(make_samples) -> None:
    samples = make_samples(lengths=[3, 6, 5, 2, 7, 4, 1, 3, 5, 2, 8, 3])
    packed = micro_batches(token_batch(samples, CPU), range(len(samples)), max_tokens=31)
    assert len(packed) > 2
    for one in packed:
        context = packed_context(one.context.cu_seqlens.diff().tolist(), device="cpu")
        assert one.context.positions_T.tolist() == context.positions_T.tolist()
        assert one.context.cu_seqlens.dtype == torch.int32 and one.context.cu_seqlens[-1] == len(one.input_ids_T)
        assert one.targets_R.data_ptr() % 16 == 0
        assert one.lengths_S.sum() == len(one.rows_R) == len(one.targets_R) == len(one.places_R)


def test_engine_log_probs_that_are_not_finite_are_an_error_unless_masked(make_samples) -> None:
    samples = canonical_order(make_samples())
    for index in (2, 5):
        samples[index].rollout_log_probs[0] = math.nan
    samples[5].loss_mask[0] = 0
    with pytest.raises(TrainError, match=r"samples 2 are not finite"):
        token_batch(samples, CPU)
