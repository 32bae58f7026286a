import json

import pytest

from miles.cli import report
from miles.report.capture import RESULT_FIELDS, check_results, check_run
from miles.report.runs import open_run
from tests.conftest import REPOSITORY
from tests.unit.report.folders import make_run, sample

RESULTS = REPOSITORY / "benchmarks" / "results"


@pytest.fixture
def folder(tmp_path):
    def samples(step):
        return [sample(0, a, prompt="p", response="x", reward=float(a)) for a in range(2)]

    folder = make_run(tmp_path / "run", [0.5] * 4, samples=samples)
    assert report.run([str(folder)]) == 0
    return folder


def _wrong(folder):
    return [check.name for check in check_run(open_run(folder)) if check.ok is False]


def test_an_untouched_run_follows(folder, capsys):
    assert _wrong(folder) == []
    assert report.run(["--check", str(folder)]) == 0
    assert "0 wrong" in capsys.readouterr().out


def test_a_pause_that_was_added_changes_the_marks(folder):
    (folder / "pauses.jsonl").write_text("2026-10-17T12:00:01Z pause\n2026-10-17T12:00:02Z resume\n")
    assert "pauses marked again: clean_rollouts" in _wrong(folder)


def test_a_changed_figure_is_found(folder, capsys):
    path = folder / "summary.json"
    stored = json.loads(path.read_text())
    stored["medians"]["perf/step_time"]["all"] = 9.0
    path.write_text(json.dumps(stored))
    assert _wrong(folder) == ["medians computed again"]
    assert report.run(["--check", str(folder)]) == 1
    assert "perf/step_time.all is 9.0, follows as 10.0" in capsys.readouterr().out


def test_a_changed_record_disagrees_with_the_samples_and_the_log(folder):
    path = folder / "metrics.jsonl"
    (folder / "log.txt").write_text(
        "[2026-10-17 12:00:10.000 main] s.py:1 - rollout 0: {'rollout/raw_reward': 0.5}\n"
        "[2026-10-17 12:00:10.000 main] s.py:1 - step 0: {'train/grad_norm': 0.5}\n"
    )
    assert _wrong(folder) == []
    path.write_text(path.read_text().replace('"rollout/raw_reward": 0.5', '"rollout/raw_reward": 0.75', 1))
    assert {"log agrees with metrics.jsonl", "rewards follow from the samples"} <= set(_wrong(folder))


def test_watchdog_rule_of_stored_logs(cases_dir):
    """The manual's figures: a dead engine is stopped after 273 to 302 s, bursts never."""
    dead, bursts = (
        check_run(open_run(cases_dir / "logs" / f"{name}.log"))[-1] for name in ("dead_engine", "refused_bursts")
    )
    assert dead.ok and "at 30 of 30 offsets" in dead.detail
    assert bursts.ok and "at 0 of 30 offsets" in bursts.detail


def test_figures_of_results_follow_from_what_is_beside_them(tmp_path):
    good = {
        "name": "x", "hardware": "h", "versions": {"a": "1"}, "commit": "c", "date": "d", "command": "e",
        "seconds": 2.0, "limit_seconds": 1.0, "share_of_limit": 0.5, "times": [1.0, 2.0, 9.0], "median_times": 2.0,
    }  # fmt: skip
    (tmp_path / "good.json").write_text(json.dumps(good))
    (tmp_path / "bad.json").write_text(json.dumps(good | {"share_of_limit": 0.6, "commit": None}))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "rounded.json").write_text(json.dumps(good | {"seconds": 2.001, "share_of_limit": 0.4998}))
    # Wilson's interval of 8 of 10, from Newcombe 1998: 0.4902 to 0.9433
    shares = {"num_learned": 2, "learned": {"a": True, "b": True, "c": False}, "items": 10, "accuracy": 0.8}
    (tmp_path / "shares.json").write_text(json.dumps(good | shares | {"low": 0.4902, "high": 0.9433}))
    wrong = {"num_learned": 3, "accuracy": 0.81, "low": 0.51, "high": 0.9433}
    (tmp_path / "shares_wrong.json").write_text(json.dumps(good | shares | wrong))
    bad, broken, fine, rounded, shared, shared_wrong = check_results(tmp_path)
    assert shared.ok and shared.detail == "6 figures follow"
    assert [part.partition(":")[0] for part in shared_wrong.detail.split("; ")] == ["num_learned", "accuracy", "low"]
    assert rounded.ok
    assert fine.ok and fine.detail == "2 figures follow"
    assert bad.ok is False and "lacks commit" in bad.detail and "0.6, but 0.5 follows" in bad.detail
    assert broken.ok is False


def test_counts_and_shares_follow_from_rows_and_answers(tmp_path):
    # Of 4 answers 0, 1, 2 and 4 are right: one of two is with 0, 3/6, 5/6 and 1; both kinds with 0, 3/6, 4/6 and 0.
    answers = {"answers": 4, "right": [0, 1, 2, 4], "pass@1": 7 / 16, "pass@2": 7 / 12, "mixed_groups_of_2": 7 / 24}
    rows = {"num_broken": 1, "faults": [{"problem": ""}, {"problem": "hung"}], "ratios": [1.0, 4.0, 2.0], "ratio": 2.0}
    timed = {"ratio": 2.0, "seconds": 3.0, "limit_seconds": 1.5, "pairs": [{"seconds": 3.0, "limit": 1.5}]}
    rows |= {"modes": {"exact": {"seconds": 3.0}, "fast": {"seconds": 2.0}}, "exact_over_fast": 1.5}
    rows |= {"cases": {"a": {"planned": 90, "measured": 100, "error": -0.1}}, "largest_error": 0.1}
    rows |= {"rewards": [0.0, 0.0, 0.9], "reward": 0.3}
    rows |= {"settings": [{"found": 0.5, "seconds": {"a": 2.0}}], "found": 0.5, "seconds": 3.0}  # a dict is no figure
    fields = dict.fromkeys(RESULT_FIELDS, "x")
    (tmp_path / "good.json").write_text(json.dumps(fields | rows | {"sums": answers, "timed": timed}))
    assert [check.detail for check in check_results(tmp_path)] == ["13 figures follow"]
    for wrong in (
        {"num_broken": 0},
        {"largest_error": 0.2},
        {"ratio": 3.0},
        {"reward": 0.0},
        {"found": 0.6},
        {"exact_over_fast": 1.6},
        {"sums": answers | {"pass@2": 0.61}},
        {"sums": answers | {"right": [0]}},
    ):
        (tmp_path / "good.json").write_text(json.dumps(fields | rows | {"sums": answers, "timed": timed} | wrong))
        assert check_results(tmp_path)[0].ok is False, wrong


def test_stored_results_follow_and_a_page_links_each():
    pages = "".join(page.read_text() for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")))
    checks = check_results(RESULTS)
    assert [check for check in checks if check.ok is False] == []
    assert [check.name for check in checks if f"benchmarks/results/{check.name})" not in pages] == []


def test_stored_calibration_holds():
    result = json.loads(next(RESULTS.glob("compare-calibration_*.json")).read_text())
    main = result["settings"][0]
    assert main["comparisons"] == 1000 and main["num_seeds"] == 3
    assert main["false_alarms"] < 0.05 and main["found"] >= 0.8
