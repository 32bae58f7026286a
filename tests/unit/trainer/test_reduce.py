from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.trainer.reduce import sample_mean_weights, token_mean_weights, weighted_sum


def test_field_note_11_what_token_mean_and_sample_mean_mean() -> None:
    """Token mean: over all tokens of the optimizer step. Sample mean: per answer first, then over the answers."""
    values_R = torch.tensor([1.0, 3.0, 10.0, 20.0, 30.0])
    lengths_S = torch.tensor([2, 3])
    assert weighted_sum(values_R, token_mean_weights(lengths_S)) == pytest.approx(64.0 / 5)
    assert weighted_sum(values_R, sample_mean_weights(lengths_S)) == pytest.approx((2.0 + 20.0) / 2)


def test_answers_without_trained_tokens_do_not_count() -> None:
    values_R = torch.tensor([1.0, 3.0])
    assert weighted_sum(values_R, sample_mean_weights(torch.tensor([0, 2, 0]))) == pytest.approx(2.0)
    assert weighted_sum(torch.empty(0), sample_mean_weights(torch.tensor([0, 0]))) == 0.0
    assert weighted_sum(torch.empty(0), token_mean_weights(torch.tensor([], dtype=torch.int64))) == 0.0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any))
def test_weights_of_a_step_sum_to_one(lengths: list[int]) -> None:
    lengths_S = torch.tensor(lengths)
    for weights_R in (sample_mean_weights(lengths_S), token_mean_weights(lengths_S)):
        assert len(weights_R) == sum(lengths)
        assert float(weights_R.sum()) == pytest.approx(1.0, rel=1e-12)
