import numpy as np
import pytest

from benchmarks.compare_calibration import share_called_real
from miles.report.spread import INSIDE, REAL, UNSURE, compare_units


def _units(mean, *, seed, num=256, noise=0.2):
    generator = np.random.default_rng(seed)
    return {(0, str(prompt)): value for prompt, value in enumerate(mean + generator.normal(0, noise, num))}


def test_a_large_difference_on_two_seeds_is_real():
    verdict = compare_units(
        [_units(0.5, seed=1), _units(0.5, seed=2)], [_units(0.8, seed=3), _units(0.8, seed=4)], scale=0.5
    )
    assert verdict.word == REAL
    assert verdict.low < 0.3 < verdict.high
    assert verdict.difference == pytest.approx(0.3, abs=0.03)


def test_one_seed_is_never_enough():
    verdict = compare_units([_units(0.5, seed=1)], [_units(0.9, seed=2)], scale=0.5)
    assert verdict.word == UNSURE and verdict.spread is None
    assert verdict.text == "cannot tell: 1 more seed needed"


def test_a_small_difference_is_inside_the_spread():
    baseline = [_units(mean, seed=n) for n, mean in enumerate((0.70, 0.74, 0.77))]
    change = [_units(mean, seed=n + 9) for n, mean in enumerate((0.71, 0.75, 0.77))]
    verdict = compare_units(baseline, change, scale=0.46)
    assert verdict.word == INSIDE
    assert verdict.spread == pytest.approx(0.035, abs=0.01)


def test_equal_runs_have_no_difference():
    units = _units(0.5, seed=1)
    verdict = compare_units([units, units], [units, units], scale=0.5)
    assert verdict.difference == 0 and verdict.word == INSIDE


def test_pairing_takes_the_difficulty_of_prompts_out():
    """Prompts that differ by far more than the change: the same prompts on both sides find it, others do not."""
    hard = np.random.default_rng(0).normal(0.5, 0.4, 256)
    noise = np.random.default_rng(1).normal(0, 0.05, (4, 256))
    runs = [{(0, str(p)): hard[p] + noise[n][p] + 0.05 * (n >= 2) for p in range(256)} for n in range(4)]
    paired = compare_units(runs[:2], runs[2:], scale=0.1)
    renamed = [{(0, f"other {key[1]}"): value for key, value in units.items()} for units in runs[2:]]
    apart = compare_units(runs[:2], renamed, scale=0.1)
    assert paired.paired and not apart.paired
    assert paired.word == REAL and apart.word != REAL
    assert apart.high - apart.low > 2 * (paired.high - paired.low)


def test_interval_agrees_with_the_textbook_where_seeds_do_not_differ():
    """Without a spread of seeds the interval is that of a mean of paired differences."""
    first, second = _units(0.5, seed=1, num=400), _units(0.6, seed=2, num=400)
    verdict = compare_units([first], [second], scale=1e-9)
    differences = np.array([second[key] - first[key] for key in first])
    error = differences.std(ddof=1) / 20
    assert verdict.low == pytest.approx(differences.mean() - 1.96 * error, abs=0.1 * error)
    assert verdict.high == pytest.approx(differences.mean() + 1.96 * error, abs=0.1 * error)


def test_extra_seeds_of_the_baseline_count():
    baseline = [_units(0.5 + 0.001 * n, seed=n) for n in range(6)]
    change = [_units(0.6, seed=n + 20) for n in range(2)]
    few = compare_units(baseline[:2], change, scale=0.5)
    many = compare_units(baseline, change, scale=0.5)
    assert many.high - many.low < few.high - few.low


def test_calibration_in_small():
    """The stored result is over 1,000 comparisons; this one has 60 and only catches what is badly wrong."""
    setting = {"seed_spread": 0.01, "num_seeds": 3, "paired": True}
    assert share_called_real(60, rise=0.0, **setting, seed=5)[0] <= 0.1
    found, held = share_called_real(60, rise=0.05, **setting, seed=6)
    assert found >= 0.75 and held >= 0.85
