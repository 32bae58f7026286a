from __future__ import annotations

import itertools
import math
import statistics

import pytest

from miles.evals.passk import half_width, pass_at_k, pass_metrics


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 2), (5, 2, 3), (5, 0, 2), (6, 6, 1), (8, 3, 8)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int, c: int, k: int) -> None:
    answers = [1] * c + [0] * (n - c)
    subsets = list(itertools.combinations(answers, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_metrics_of_prompts_with_four_answers() -> None:
    metrics = pass_metrics([(4, 4), (4, 0), (4, 2)])
    assert set(metrics) == {
        *("pass@1", "pass@2", "pass@4", "avg@4"),
        *("pass@1_ci95", "pass@2_ci95", "pass@4_ci95", "avg@4_ci95"),
    }
    assert metrics["pass@1"] == metrics["avg@4"] == 0.5
    assert metrics["pass@2"] == pytest.approx((1 + 0 + 5 / 6) / 3) and metrics["pass@4"] == pytest.approx(2 / 3)
    assert metrics["avg@4_ci95"] == pytest.approx(1.96 * statistics.stdev([1, 0, 0.5]) / math.sqrt(3), rel=1e-4)


def test_prompts_that_are_all_right_are_not_certain() -> None:
    assert 0.05 < half_width([1.0] * 20) < 0.15 < half_width([1.0]) <= 1.0
