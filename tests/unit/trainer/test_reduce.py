from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.config.sections import RunConfig
from miles.trainer.reduce import (
    answers_of,
    constant_weights,
    sample_mean_weights,
    token_mean_weights,
    weighted_sum,
)
from miles.trainer.rewards import sample_advantages
from miles.types import TrainSample


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


def test_field_note_24_rows_of_one_answer_weigh_as_one() -> None:
    """Two answers, the first in two rows: each token weighs as if the rows were one."""
    lengths_S, answers_S = torch.tensor([2, 3, 4]), torch.tensor([0, 0, 1])
    whole_R = sample_mean_weights(torch.tensor([5, 4]))
    assert torch.equal(sample_mean_weights(lengths_S, answers_S), whole_R)
    assert whole_R.tolist() == pytest.approx([1 / 10] * 5 + [1 / 8] * 4)
    assert torch.equal(
        constant_weights(lengths_S, answers_S, length=8.0), constant_weights(torch.tensor([5, 4]), length=8.0)
    )


def test_field_note_24_rows_of_one_answer_count_once_in_their_group() -> None:
    def rows(*given: tuple[int, float]) -> list[TrainSample]:
        return [TrainSample([1, 2], 1, [1], reward, reward, 0, index) for index, reward in given]

    alone, _ = sample_advantages(rows((0, 1.0), (1, 0.0), (2, 0.0)), RunConfig())
    several, scored = sample_advantages(rows((0, 1.0), (0, 1.0), (1, 0.0), (2, 0.0), (2, 0.0)), RunConfig())
    assert several.tolist() == [alone[index] for index in (0, 0, 1, 2, 2)] and scored.all()
    assert answers_of(rows((0, 1.0), (0, 1.0), (1, 0.0)), torch.device("cpu")).tolist() == [0, 0, 1]
    assert answers_of(rows((0, 1.0), (1, 0.0)), torch.device("cpu")) is None
