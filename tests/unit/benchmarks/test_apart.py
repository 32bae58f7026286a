"""Measurements in processes of their own: what was found survives whatever happens to the process."""

import json

import benchmarks.apart
from benchmarks.apart import measure_apart, paths_by_name
from benchmarks.recipe import Workload
from benchmarks.rollout_throughput import add_ratios, summary

SCRIPT = """
import sys, time
from measuring import emit, read_job
job = read_job()
emit(job, first=1)
import packaged
emit(job, second=packaged.VALUE)
{end}
"""


def run(monkeypatch, tmp_path, *, end, limit_seconds=60.0):
    scripts, packages = tmp_path / "scripts", tmp_path / "packages"
    scripts.mkdir()
    packages.mkdir()
    (scripts / "measuring.py").write_text((benchmarks.apart.SCRIPTS / "measuring.py").read_text())
    (scripts / "part.py").write_text(SCRIPT.format(end=end))
    (packages / "packaged.py").write_text("VALUE = 2")
    monkeypatch.setattr(benchmarks.apart, "SCRIPTS", scripts)
    job = {"part": "some"}
    return measure_apart("part.py", job, folder=tmp_path, paths=str(packages), limit_seconds=limit_seconds)


def test_findings_of_a_whole_measurement(monkeypatch, tmp_path):
    """What this process has set for itself does not reach it."""
    monkeypatch.setenv("SET_SINCE", "1")
    end = "import os; emit(job, set_since='SET_SINCE' in os.environ)"
    findings, error = run(monkeypatch, tmp_path, end=end)
    assert error is None and findings == [{"first": 1}, {"second": 2}, {"set_since": False}]


def test_findings_before_a_failure_are_kept_with_its_message(monkeypatch, tmp_path):
    findings, error = run(monkeypatch, tmp_path, end="raise ValueError('out of sorts')")
    assert findings == [{"first": 1}, {"second": 2}]
    assert "exit code 1" in error and "ValueError: out of sorts" in error


def test_a_measurement_past_its_limit_is_ended(monkeypatch, tmp_path):
    findings, error = run(monkeypatch, tmp_path, end="time.sleep(600)", limit_seconds=2.0)
    assert findings == [{"first": 1}, {"second": 2}][: len(findings)]
    assert "not done after 2 s" in error


def test_paths_of_peers():
    assert paths_by_name(["a=/x:/y", "b=/z"]) == {"a": "/x:/y", "b": "/z"}


def test_summary_leaves_out_the_warming_up_and_keeps_what_a_cut_off_engine_has():
    workloads = [Workload("one", [10], [[50, 50]]), Workload("two", [10], [[7]])]
    limits = {"one": {"prompts_per_group": 1.0}, "two": {"prompts_per_group": 1.0}}
    findings = [
        {"start_up": {"total": 3.0}},
        {"workload": "one", "all_seconds": [9.0]},
        {"workload": "one", "all_seconds": [9.0, 2.0, 4.0]},
    ]
    ours = summary(json.loads(json.dumps(findings)), None, workloads, limits)
    assert ours["workloads"]["one"]["seconds"] == 3.0
    assert ours["workloads"]["one"]["tokens_per_s"] == 100 / 3.0
    assert "two" not in ours["workloads"] and "error" not in ours
    peer = summary(findings[:2], "not done", workloads, limits)
    assert peer["workloads"]["one"]["seconds"] == 9.0 and peer["error"] == "not done"
    add_ratios(ours, {"peer": peer}, "one")
    add_ratios(ours, {"peer": peer}, "two")
    assert peer["workloads"]["one"]["times_ours"] == 3.0
