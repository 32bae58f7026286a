from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable

import pytest

from miles.rollout.signals import RewardSignals, duplicates_above_chance, slope_t
from miles.types import WATCH, Sample


def sample(group: int, reward: float, *, answer: list[int] | None = None, log_prob: float = -1.0) -> Sample:
    ids = answer if answer is not None else [group, random.randrange(10**9)]
    return Sample(
        group_index=group,
        index=group,
        tokens=[1, *ids],
        response="text",
        response_length=len(ids),
        reward=reward,
        rollout_log_probs=[log_prob] * len(ids),
    )


def test_equal_groups_are_reported_once_while_they_last(caplog: pytest.LogCaptureFixture) -> None:
    signals = RewardSignals(None)
    equal = [sample(group, float(group % 2)) for group in range(6) for _ in range(4)]
    varied = [*equal[1:], sample(0, 0.5)]
    for batch, count in ((equal, 1), (equal, 1), (varied, 1), (equal, 2), (equal[:12], 2)):
        signals.watch(batch)
        assert caplog.text.count("nothing can be learned from this rollout") == count
    assert "in all 6 groups the answers have equal rewards (3 with 0, 3 with 1)" in caplog.text
    assert caplog.text.count("response ends with: 'text'") == 6


def draw_group(rng: random.Random, *, num_answers: int, num_texts: int) -> list[Sample]:
    """Independent draws of equally likely texts."""
    log_prob = math.log(1 / num_texts)
    return [sample(0, 0.0, answer=[rng.randrange(num_texts)], log_prob=log_prob) for _ in range(num_answers)]


@pytest.mark.parametrize("num_texts", [1, 2, 5, 100, 10**6])
def test_independent_draws_are_never_reported(num_texts: int) -> None:
    rng = random.Random(num_texts)
    for _ in range(40):
        groups = [draw_group(rng, num_answers=8, num_texts=num_texts) for _ in range(16)]
        assert duplicates_above_chance(groups) is None


def test_field_note_50_copies_of_unlikely_answers_are_reported() -> None:
    rng = random.Random(0)
    groups = [draw_group(rng, num_answers=4, num_texts=10**6) for _ in range(4)]
    assert duplicates_above_chance(groups) is None
    copied = [group + group for group in groups]  # as if two devices drew with the same seed
    text = duplicates_above_chance(copied)
    assert text is not None and text.startswith("16 pairs of equal answers in the groups of 32 answers")


def trend(reward: Callable[[int], float], watch: Callable[[int], float], caplog: pytest.LogCaptureFixture) -> int:
    signals = RewardSignals(None)
    caplog.clear()
    for step in range(16):
        batch = [sample(group, reward(step) + 0.01 * (group % 3)) for group in range(8)]
        for of_batch in batch:
            of_batch.metadata[WATCH] = watch(step)
        signals.watch(batch)
    assert signals.take()["rollout/watch_reward"] == pytest.approx(watch(15))
    return caplog.text.count("answers that only please the reward")


def test_a_reward_that_rises_while_the_watching_one_falls_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(1)
    with caplog.at_level(logging.WARNING):
        up, down = (lambda step: 0.2 + 0.03 * step), (lambda step: 0.8 - 0.03 * step + rng.uniform(-0.02, 0.02))
        values = [down(step) for step in range(16)]
        assert trend(up, lambda step: values[step], caplog) == 1
        assert trend(up, up, caplog) == 0
        assert trend(down, lambda step: values[step], caplog) == 0
        noise = [rng.uniform(0.4, 0.6) for _ in range(16)]
        assert trend(up, lambda step: noise[step], caplog) == 0


def test_slope_t_is_the_statistic_of_a_regression() -> None:
    # y = 0.6 x + 0.8 with residuals .2, -.4, 0, .4, -.2: s^2 = 0.4 / 3, sum of squares of x is 10
    assert slope_t([1.0, 1.0, 2.0, 3.0, 3.0]) == pytest.approx(0.6 / math.sqrt(0.4 / 3 / 10))
    assert slope_t([1.0, 2.0, 3.0]) == math.inf and slope_t([1.0, 1.0, 1.0]) == 0.0
