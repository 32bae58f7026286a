from datetime import timedelta

import pytest

from miles.report import signals
from miles.report.runs import Window, open_run, read_pauses
from miles.report.summary import equal_groups, median_phases, number, state, stored_summary, timings
from tests.unit.report.folders import START, make_run


def _second(value):
    return START + timedelta(seconds=value)


def test_clean_steps_follow_the_manuals_rule(tmp_path):
    """Steps last 10 s, their rollouts the first 4. A pause from 11 to 12 s touches the rollout of step 1, one from 26
    to 27 s the training of step 2, and one that ends exactly where step 3 begins touches nothing more."""
    folder = make_run(tmp_path / "run", [0.5] * 5)
    lines = []
    for start, end in ((11, 12), (26, 27), (29.5, 30)):
        lines += [f'{{"time": "{_second(start).isoformat()}", "kind": "pause"}}']
        lines += [f'{{"time": "{_second(end).isoformat()}", "kind": "resume"}}']
    (folder / "pauses.jsonl").write_text("\n".join(lines) + "\n")
    run = open_run(folder)
    assert stored_summary(run)["clean_rollouts"] == [0, 2, 3, 4]
    assert stored_summary(run)["clean_steps"] == [0, 3, 4]
    by_name = {row.name: row for row in timings(run)}
    assert by_name["perf/rollout_time"].num_clean == 4
    assert by_name["perf/step_time"].num_clean == 3


def test_median_over_clean_steps_differs_from_all(tmp_path):
    folder = make_run(
        tmp_path / "run", [0.5] * 4, extra=lambda step: {"perf/actor_train_time": 9.0 if step < 3 else 5.0}
    )
    (folder / "pauses.jsonl").write_text(f"{START.isoformat()} pause\n{_second(29).isoformat()} resume\n")
    row = next(row for row in timings(open_run(folder)) if row.name == "perf/actor_train_time")
    assert (row.all_s, row.clean_s, row.num_clean) == (9.0, 5.0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "2026-10-18T10:57:00Z paused miles-plain at 84 C\n2026-10-18T10:58:10Z resumed miles-plain at 73 C\n",
        "[2026-10-18 10:57:00] pause\nnoise\n[2026-10-18 10:58:10] unpause\n",
    ],
)
def test_pause_logs_of_several_spellings(tmp_path, text):
    path = tmp_path / "thermostat.log"
    path.write_text(text)
    (window,) = read_pauses(path)
    assert (window.end - window.start).total_seconds() == 70


def test_windows_that_only_touch_do_not_overlap():
    first, second = Window(_second(0), _second(10)), Window(_second(10), _second(20))
    assert not first.overlaps(second) and not second.overlaps(first)
    assert first.overlaps(Window(_second(9.9), _second(10)))


def test_phases_are_not_counted_twice(tmp_path):
    run = open_run(make_run(tmp_path / "run", [0.5] * 3))
    found = {phase.name: phase.seconds for phase in median_phases(run)}
    assert found == {"rollout": 4.0, "actor_train": 5.0, "rest": 1.0}


def test_a_rollout_with_its_parts_is_split(tmp_path):
    parts = {"perf/generate_time": 3.0, "perf/reward_time": 0.5}
    run = open_run(make_run(tmp_path / "run", [0.5] * 3, extra=lambda step: parts))
    found = {phase.name: phase.seconds for phase in median_phases(run)}
    assert (found["generate"], found["reward"], found["rollout"]) == (3.0, 0.5, 0.5)


def test_grading_is_part_of_the_rollout(tmp_path):
    run = open_run(make_run(tmp_path / "run", [0.5] * 3, extra=lambda step: {"perf/reward_time": 0.5}))
    found = [(phase.name, phase.seconds) for phase in median_phases(run)]
    assert found[:2] == [("rollout", 3.5), ("reward", 0.5)]


def test_share_of_groups_is_logged_or_computed(tmp_path):
    run = open_run(make_run(tmp_path / "run", [0.5]))
    assert equal_groups(run)[0].share == 0.25
    del run.steps[0].metrics["rollout/no_signal_group_ratio"]
    assert equal_groups(run)[0].share == 1 / 4  # one of --rollout-batch-size 4


def test_moving_mean_and_ends():
    assert signals.moving_mean([1, 2, 3, 4], width=2) == [1, 1.5, 2.5, 3.5]
    assert signals.ends([float(n) for n in range(48)]) == (3.5, 43.5)


def test_state_of_a_folder(tmp_path):
    assert state(open_run(make_run(tmp_path / "a", [0.5]))) == "finished"
    folder = make_run(tmp_path / "b", [0.5], finish=False)
    assert state(open_run(folder)) == "ended early"


@pytest.mark.parametrize(
    "value, text", [(0, "0"), (0.015336, "0.01534"), (345645, "345,645"), (1.8e-7, "1.8e-07"), (None, "–")]
)
def test_numbers_as_text(value, text):
    assert number(value) == text
