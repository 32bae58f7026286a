from __future__ import annotations

import hashlib

from miles.rollout.rm_hub.random_reward import deterministic_random_reward, random_reward
from miles.types import Sample


def test_random_rewards_are_even_repeatable_and_blind_to_the_answer() -> None:
    samples = [Sample(group_index=i // 8, index=i) for i in range(4000)]
    rewards = [random_reward(sample, seed=1) for sample in samples]
    assert 0.46 < sum(rewards) / 4000 < 0.54  # five standard deviations
    for sample in samples:
        sample.response = "another answer"
    assert [random_reward(sample, seed=1) for sample in samples] == rewards
    assert [random_reward(sample, seed=2) for sample in samples] != rewards


def test_deterministic_random_is_the_parity_of_a_digest() -> None:
    assert hashlib.sha256(b"[1, 2]ab").hexdigest()[:2] == "ca"
    assert deterministic_random_reward([1, 2], "ab") == 0
    rewards = [deterministic_random_reward([i], "x") for i in range(2000)]
    assert 0.44 < sum(rewards) / 2000 < 0.56
