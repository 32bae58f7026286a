from __future__ import annotations

import numpy as np
import pytest

from miles.rollout.to_train import to_train_samples
from miles.types import Sample, SampleStatus


def scored(**changes: object) -> Sample:
    sample = Sample(
        group_index=4,
        index=9,
        tokens=[1, 2, 3, 4],
        response_length=2,
        reward=1,
        loss_mask=[1, 0],
        rollout_log_probs=[-0.1, -0.2],
        weight_versions=[5, 6],
        status=SampleStatus.TRUNCATED,
    )
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def test_groups_are_flattened_in_order_with_all_that_training_needs() -> None:
    first, second = to_train_samples([[scored()], [scored(index=10, status=SampleStatus.COMPLETED)]])
    assert (first.index, second.index, first.group_index) == (9, 10, 4)
    assert (first.tokens, first.response_length, first.loss_mask) == ([1, 2, 3, 4], 2, [1, 0])
    assert (first.reward, first.raw_reward, first.truncated, second.truncated) == (1.0, 1.0, True, False)
    assert (first.rollout_log_probs, first.weight_versions) == ([-0.1, -0.2], [5, 6])


def test_a_removed_sample_keeps_its_place_with_a_mask_of_zeros() -> None:
    sample = scored(remove_sample=True)
    assert to_train_samples([[sample]])[0].loss_mask == [0, 0]
    assert sample.loss_mask == [1, 0]


def test_the_reward_key_picks_the_number_of_a_dict() -> None:
    assert to_train_samples([[scored(reward={"score": 0.5, "why": "x"})]], reward_key="score")[0].reward == 0.5


def test_per_token_lists_that_do_not_fit_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="sample 9: rollout_log_probs has another length"):
        to_train_samples([[scored(rollout_log_probs=[-0.1])]])


def test_all_numbers_of_a_dict_reward_go_along() -> None:
    reward = {"score": 0.5, "format": 1, "why": "x"}
    dicted = to_train_samples([[scored(reward=reward)]], reward_key="score")[0]
    assert dicted.rewards == {"score": 0.5, "format": 1.0}
    assert to_train_samples([[scored()]])[0].rewards is None


def test_kept_sets_and_likely_tokens_go_along() -> None:
    kept, likely = [np.array([3, 7]), np.array([4])], [np.array([3]), np.array([4])]
    values = [np.array([-0.1]), np.array([-0.2])]
    sample = to_train_samples([[scored(kept_token_ids=kept, top_token_ids=likely, top_log_probs=values)]])[0]
    assert sample.kept_token_ids is kept and sample.top_token_ids is likely and sample.top_log_probs is values
