"""A pause changes times and nothing else."""

import itertools
import json

from miles.loop import build
from miles.observe import heat
from tests.e2e.loop_fork import run_fork, sums
from tests.e2e.test_repair import curve


class HotAndCold:
    """Hot at every second look."""

    def __init__(self):
        self.values = itertools.cycle([90.0, 60.0])

    def celsius(self):
        return next(self.values)


def hot():
    heat.POLL_S = 0.05
    heat.HeatLimits.__init__.__defaults__ = (84.0, 74.0, 0.1, 1.0)
    build.make_sensor = lambda process: HotAndCold()


def test_a_hot_run_waits_and_has_the_same_curve(tmp_path):
    whole = run_fork(tmp_path, sums(tmp_path, run_name="whole"))
    hot_run = run_fork(tmp_path, sums(tmp_path, heat_guard=True), before=hot)
    assert hot_run.code == 0, hot_run.text
    assert curve(hot_run.folder) == curve(whole.folder)
    assert sum(record["perf/paused_time"] for record in hot_run.metrics) > 0.1
    kinds = [json.loads(line)["kind"] for line in (hot_run.folder / "pauses.jsonl").read_text().splitlines()]
    assert kinds and kinds == ["pause", "resume"] * (len(kinds) // 2), "every pause has its resume"


def test_the_flag_without_a_gpu_is_an_error_before_the_model_is_loaded(tmp_path):
    ended = run_fork(tmp_path, sums(tmp_path, heat_guard=True))
    assert ended.code == 2
    assert "the heat guard" in ended.text and "Load weight end" not in ended.text
