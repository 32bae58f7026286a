import re
from html.parser import HTMLParser

import pytest

from miles.cli import report
from miles.report.html import render_report
from miles.report.runs import open_run
from miles.report.svg import Line, line_chart, ticks
from tests.unit.report.folders import make_run, sample

VOID = {"meta", "link", "br", "input"}


class Checker(HTMLParser):
    """Collects addresses and checks that tags are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses = [], []

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _page(tmp_path, **kwargs):
    def samples(step):
        return [
            sample(0, 0, prompt="what is <b>6*7</b>?", response="it is <script>alert(1)</script>", reward=1.0),
            sample(0, 1, prompt="what is <b>6*7</b>?", response="no", reward=0.0, log_prob=-4.0),
        ]

    folder = make_run(tmp_path / "run", [0.1 * n for n in range(8)], samples=samples, evals={0: 0.1, 8: 0.9}, **kwargs)
    return folder, render_report(open_run(folder))


def test_page_is_whole_and_needs_nothing_from_outside(tmp_path):
    _, page = _page(tmp_path)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.addresses == ["data:,"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)


def test_what_models_write_is_escaped(tmp_path):
    _, page = _page(tmp_path)
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<b>6*7" not in page


def test_page_shows_every_part(tmp_path):
    _, page = _page(tmp_path, extra=lambda step: {"perf/peak_memory_gb": 1.5})
    for part in (
        "reward",
        "one-step",
        "signals",
        "phases",
        "groups",
        "lengths",
        "memory",
        "clean",
        "facts",
        "settings",
    ):
        assert f'id="{part}"' in page
    assert "held_out 0.1 to 0.9" in page
    assert "Answers of step 0" in page and "Answers of step 7" in page


def test_command_writes_page_and_summary(tmp_path, capsys):
    folder, _ = _page(tmp_path)
    assert report.run([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "Reward" in shown and "gradient step" in shown and "8 of 8" in shown
    assert (folder / "report.html").is_file() and (folder / "summary.json").is_file()


def test_report_of_a_public_log(cases_dir, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert report.run([str(cases_dir / "logs" / "healthy.log"), "--html", str(page)]) == 0
    assert "16 steps" in capsys.readouterr().out
    assert "KV cache" in page.read_text() and "345,645 tokens" in page.read_text()


def test_numbers_that_are_not_finite_leave_a_gap(tmp_path, cases_dir):
    page = render_report(open_run(cases_dir / "logs" / "offload_corruption.log"))
    assert "The numbers of the training broke" in page
    chart = line_chart([Line("x", [(0, float("nan")), (1, 2.0), (2, float("inf"))], "blue")], title="x")
    assert "nan" not in re.sub(r'data-chart="[^"]*"', "", chart)


@pytest.mark.parametrize(
    "low, high, expected",
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (3.5, 48, [20, 40]), (1e-8, 2e-7, [5e-8, 1e-7, 1.5e-7, 2e-7]), (2, 2, [2])],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)
