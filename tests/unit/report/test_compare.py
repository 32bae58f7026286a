import json

import numpy as np
import pytest

from miles.cli import compare as command
from miles.errors import ConfigError
from miles.report.compare import compare, make_arms
from miles.report.ranges import RangeAlarm, build_ranges, load_ranges, save_ranges
from miles.report.runs import open_run
from tests.unit.report.folders import make_run, sample


def _samples(rate, seed):
    """Answers to four prompts a step, right by chance."""

    def of(step):
        generator = np.random.default_rng([seed, step])
        return [
            sample(
                step * 4 + p,
                (step * 4 + p) * 8 + a,
                prompt=f"p{p}",
                response="x",
                reward=float(generator.random() < rate),
            )
            for p in range(4)
            for a in range(8)
        ]

    return of


def _seeds(tmp_path, name, rate, *, lr, num_steps=12):
    folders = []
    for seed in (1, 2):
        samples = _samples(rate, seed)
        rewards = [float(np.mean([one.reward for one in samples(step)])) for step in range(num_steps)]
        folders.append(make_run(tmp_path / f"{name}-{seed}", rewards, samples=samples, seed=seed, lr=lr))
    return folders


def test_setups_are_told_apart_and_seeds_are_not(tmp_path):
    runs = [open_run(path) for path in [*_seeds(tmp_path, "a", 0.5, lr=1e-6), *_seeds(tmp_path, "b", 0.5, lr=1e-5)]]
    assert [[run.name for run in arm.runs] for arm in make_arms(runs)] == [["a-1", "a-2"], ["b-1", "b-2"]]


def test_a_change_that_helps_is_real_and_named(tmp_path, capsys):
    first, second = _seeds(tmp_path, "a", 0.4, lr=1e-6), _seeds(tmp_path, "b", 0.9, lr=1e-5)
    assert command.run([str(path) for path in [*first, *second]]) == 0
    shown = capsys.readouterr().out
    reward = next(line for line in shown.splitlines() if line.startswith("reward "))
    assert reward.rstrip().endswith("real")
    assert "--lr" in shown and "1e-06" in shown and "1e-05" in shown


def test_only_common_steps_and_clean_steps_count(tmp_path):
    first = open_run(make_run(tmp_path / "a", [0.5] * 12, lr=1e-6))
    folder = make_run(tmp_path / "b", [0.5] * 8, lr=1e-5)
    (folder / "pauses.jsonl").write_text("2026-10-17T12:00:11Z pause\n2026-10-17T12:00:12Z resume\n")
    result = compare(*make_arms([first, open_run(folder)]))
    assert result.steps == list(range(8)) and result.window == [6, 7]
    rollout = next(row for row in result.times if row.title == "rollout")
    assert (rollout.num_steps, rollout.baseline_s, rollout.change_s) == (7, 4.0, 4.0)
    assert any("only the 8 steps" in warning for warning in result.warnings)


def test_runs_without_common_steps_are_refused(tmp_path):
    first, second = (open_run(make_run(tmp_path / name, [0.5] * 2, lr=lr)) for name, lr in (("a", 1e-6), ("b", 1e-5)))
    for step in second.steps:
        step.number += 10
    with pytest.raises(ConfigError, match="no step in common"):
        compare(*make_arms([first, second]))


def test_one_setup_alone_cannot_be_compared(tmp_path):
    with pytest.raises(ConfigError, match="--ranges FILE"):
        command.run([str(path) for path in _seeds(tmp_path, "a", 0.5, lr=1e-6)])


def test_public_logs_are_compared(cases_dir, capsys):
    logs = cases_dir / "logs"
    assert command.run([str(logs / "healthy.log"), "--against", str(logs / "truncation.log")]) == 0
    shown = capsys.readouterr().out
    assert "cut answers" in shown and "cannot tell: 1 more seed needed" in shown


def test_ranges_come_back_as_written(tmp_path, capsys):
    file = tmp_path / "ranges.json"
    assert command.run([*map(str, _seeds(tmp_path, "a", 0.5, lr=1e-6)), "--ranges", str(file)]) == 0
    ranges = load_ranges(file)
    assert ranges.runs == ("a-1", "a-2")
    assert ranges.step_zero["gap"] == (0.015, 0.015)
    save_ranges(file, ranges)
    assert load_ranges(file) == ranges


def test_ranges_need_two_seeds_of_one_setup(tmp_path):
    first, second = _seeds(tmp_path, "a", 0.5, lr=1e-6)
    other = _seeds(tmp_path, "b", 0.5, lr=1e-5)[0]
    with pytest.raises(ConfigError, match="at least 2 runs"):
        command.run([str(first), "--ranges", str(tmp_path / "r.json")])
    with pytest.raises(ConfigError, match="settings of these runs differ"):
        command.run([str(first), str(other), "--ranges", str(tmp_path / "r.json")])


@pytest.mark.parametrize("text", ["[]", "{", json.dumps({"step_zero": {}, "first_ten": {}, "every": {"gap": 3}})])
def test_a_damaged_file_of_ranges_is_said(tmp_path, text):
    path = tmp_path / "ranges.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no ranges"):
        load_ranges(path)


def test_alarms_need_a_mean_and_come_once(tmp_path):
    runs = [open_run(path) for path in _seeds(tmp_path, "a", 0.5, lr=1e-6)]
    alarm = RangeAlarm(build_ranges(runs))
    healthy = runs[0].steps[0].metrics
    assert [alarm.check(step, healthy) for step in range(6)] == [[]] * 6
    broken = healthy | {"train/grad_norm": 50.0}
    assert alarm.check(6, broken)[0].startswith("Gradient norm: the mean of the last 5 steps")
    assert alarm.check(7, broken) == []


def test_gap_at_step_zero_alarms_at_once(tmp_path):
    ranges = build_ranges([open_run(path) for path in _seeds(tmp_path, "a", 0.5, lr=1e-6)])
    (text,) = RangeAlarm(ranges).check(0, {"train/train_rollout_logprob_abs_diff": 0.2})
    assert text.startswith("Log-prob gap at step 0 is 0.2, healthy runs had at most 0.015")
