import pytest

from miles.observe.error_rule import Judge, Limits, Replay, Seen, dead_engine, look, read_timeline, replay
from tests.unit.observe.engine_logs import busy_run, dead_run, error_line, log, step_line


def test_the_busy_run_has_the_figures_of_the_manual():
    errors, _ = busy_run()
    assert sum(errors.values()) == 22_357
    assert max(sum(errors.get(s, 0) for s in range(start, start + 60)) for start in range(8000)) == 2_209


@pytest.mark.parametrize(("checks", "stopped", "dead"), [(6, 17, (153, 182)), (8, 0, (213, 242)), (10, 0, (273, 302))])
def test_the_table_of_the_manual(checks, stopped, dead):
    """A healthy run in bursts is stopped in 17 of 30 cases with 6 checks and in none with 8 or 10."""
    errors, end = busy_run()
    timeline = read_timeline(log(errors, end=end))
    done = replay(timeline, Limits(checks=checks))
    assert (done.num_stopped, done.most_in_a_row) == (stopped, 6)
    assert dead_engine(Limits(checks=checks)).stopped_after == dead


def test_a_dead_engine_is_stopped_from_every_offset():
    errors, end = dead_run(minutes=10)
    done = replay(read_timeline(log(errors, end=end)), Limits())
    assert done == Replay(10, 30, done.most_in_a_row, done.stopped_after)
    assert 270 <= done.stopped_after[0] <= done.stopped_after[1] <= 305


def test_errors_without_a_stamp_belong_to_the_line_before():
    lines = ["[2026-10-22 07:16:29] begin", *["503 Service Unavailable"] * 3, "[2026-10-22 07:16:40] on", "nothing"]
    timeline = read_timeline(lines)
    assert (timeline.errors, timeline.end) == ([0, 0, 0], 11)
    assert read_timeline(["no stamp at all"]) is None


def test_stamps_behind_the_names_of_ray_and_colours():
    lines = [
        "[2026-10-17 21:03:03] a",
        "\x1b[36m(RolloutExecutor pid=1330, ip=172.17.0.3)\x1b[0m [2026-10-17 21:03:30.637 r] b",
    ]
    assert read_timeline(lines).end == 27


def test_the_longest_time_without_a_step():
    lines = [step_line(0, 0), step_line(100, 1), error_line(1000), step_line(1100, 2), error_line(1150)]
    assert read_timeline(lines).longest_gap_s == 1000


def test_a_pause_in_the_errors_counts_anew():
    judge = Judge(Limits(checks=3), started=0.0)
    for number, errors in enumerate([101, 101, 100, 101, 101]):
        assert judge.check(Seen(errors, has_step=True), 30.0 * number) is None
    reason = judge.check(Seen(101, has_step=True), 180.0)
    assert reason == "more than 100 errors from the rollout engine in each of 3 checks, last 101 in 60 s"


def test_no_step_for_too_long():
    judge = Judge(Limits(no_step_s=600), started=0.0)
    assert judge.check(Seen(has_step=True), 590.0) is None
    assert judge.check(Seen(), 1180.0) is None
    assert judge.check(Seen(), 1190.0) == "no line of a step for 10 minutes"
    assert Judge(Limits(no_step_s=0), started=0.0).check(Seen(), 1e6) is None


def test_a_pause_is_no_fault_of_the_run():
    judge = Judge(Limits(no_step_s=600), started=0.0)
    judge.paused(120.0)
    assert judge.check(Seen(), 700.0) is None
    assert judge.check(Seen(), 720.0) is not None


def test_a_failed_reward_import_is_named_and_waits_ten_minutes_only():
    """The manual's run stayed up for two hours with 44 errors."""
    seen = look(["x", "ModuleNotFoundError: No module named 'my_rewards'", *[error_line(1)] * 44])
    judge = Judge(Limits(), started=0.0)
    assert judge.check(seen, 0.0) is None
    assert judge.check(Seen(), 599.0) is None
    reason = judge.check(Seen(), 600.0)
    assert reason.startswith("no line of a step for 10 minutes. Likely cause: a module that the run needs cannot be")
    assert "--custom-rm-path" in reason


def test_what_a_run_survives_is_forgotten():
    seen = look(["ModuleNotFoundError: No module named 'my_rewards'", step_line(1, 0)])
    judge = Judge(Limits(), started=0.0)
    judge.check(seen, 0.0)
    assert judge.check(Seen(), 1000.0) is None
