"""Stored logs with planted faults, and the causes found in them."""

import json
import re

import pytest

from miles.config.flags import FLAGS
from miles.report.diagnose import diagnose
from miles.report.findings import WATCH
from miles.report.ranges import build_ranges
from miles.report.runs import Step, open_run
from tests.unit.report import planted
from tests.unit.report.folders import make_run
from tests.unit.report.planted import PLANTED, Writer

NAMES = [f"{plant.__name__}.log" for plant in PLANTED]

# Flags of public Miles that findings about its logs name, and that Miles here does not have or has later.
PUBLIC_FLAGS = {
    *("--true-on-policy-mode", "--no-offload-train", "--partial-rollout", "--over-sampling-batch-size"),
    *("--dynamic-sampling-filter-path", "--use-rollout-routing-replay", "--max-weight-staleness"),
    *("--update-weights-interval", "--async-max-concurrent-samples", "--wandb-group"),
}


@pytest.fixture(scope="module")
def expected(cases_dir):
    return json.loads((cases_dir / "logs" / "expected.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_planted_fault_is_found_first(cases_dir, expected, name):
    findings = diagnose(open_run(cases_dir / "logs" / name))
    keys = [finding.key for finding in findings]
    if not expected[name]:
        assert [finding.key for finding in findings if finding.score >= WATCH] == []
    elif expected[name] == ["refused_bursts"]:
        assert "refused_bursts" in keys and "dead_engine" not in keys
    else:
        assert keys[: len(expected[name])] == expected[name]
    assert all(finding.evidence and finding.advice for finding in findings)


def test_what_killed_the_engine_comes_before_the_dead_engine_once(tmp_path):
    log = Writer(0)
    planted.engine_memory(log)
    log.bare("CUDA error: out of memory")
    planted.dead_engine(log)
    (tmp_path / "log.txt").write_text("\n".join(log.lines))
    assert [one.key for one in diagnose(open_run(tmp_path / "log.txt"))][:2] == ["engine_memory", "dead_engine"]


def test_findings_name_flags_that_exist(cases_dir):
    known = {flag.spelling for flag in FLAGS.values()} | PUBLIC_FLAGS
    known |= {re.sub("^--engine-", "--sglang-", flag) for flag in known}
    known |= {"--sglang-enable-deterministic-inference", "--sglang-server-concurrency"}
    found = {flag for name in NAMES for one in diagnose(open_run(cases_dir / "logs" / name)) for flag in one.flags}
    assert len(found) > 20
    assert sorted(found - known) == []


def test_healthy_log_is_found_healthy_at_every_length(tmp_path):
    for seed in range(5):
        log = Writer(seed)
        log.start()
        log.steps(30)
        path = tmp_path / f"{seed}.log"
        path.write_text("\n".join(log.lines))
        assert [one.key for one in diagnose(open_run(path)) if one.score > WATCH] == []


def test_values_outside_own_ranges_are_found(tmp_path):
    runs = []
    for seed in range(3):
        log = Writer(seed)
        log.start()
        log.steps(12)
        (tmp_path / f"{seed}.log").write_text("\n".join(log.lines))
        runs.append(open_run(tmp_path / f"{seed}.log"))
    ranges = build_ranges(runs[:2])
    assert [one for one in diagnose(runs[2], ranges=ranges) if one.key == "range"] == []
    runs[2].steps = [Step(step.number, step.metrics | {"train/grad_norm": 2.0}) for step in runs[2].steps]
    titles = [one.title for one in diagnose(runs[2], ranges=ranges) if one.key == "range"]
    assert titles == ["Outside the range of 2 healthy runs from step 4 on"]


def test_a_run_that_ended_early_and_one_without_steps_are_said(tmp_path):
    early = open_run(make_run(tmp_path / "early", [0.5] * 3, finish=False, num_rollout=9))
    assert [(one.key, one.evidence[0]) for one in diagnose(early)] == [("ended_early", "3 of 9 steps are done")]
    assert diagnose(open_run(make_run(tmp_path / "whole", [0.5] * 3, num_rollout=3))) == []
    (tmp_path / "empty.log").write_text("")
    assert [one.key for one in diagnose(open_run(tmp_path / "empty.log"))] == ["no_step"]
