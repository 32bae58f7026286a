import re

import pytest

from miles.cli.main import main
from miles.config.flags import FLAGS
from miles.observe.names import METRICS
from miles.report.reference import GROUPS, PAGES, flags_page, metrics_page
from tests.conftest import REPOSITORY
from tests.unit.report.folders import make_run


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name):
    """A flag or a metric came, went or changed: `python -m tests.contracts.freeze` writes the pages anew."""
    assert (REPOSITORY / "docs" / name).read_text() == PAGES[name]()


def test_every_flag_and_metric_has_one_row():
    assert re.findall(r"^\| `(--[\w-]+)`", flags_page(), re.MULTILINE) == [flag.spelling for flag in FLAGS.values()]
    assert sorted(re.findall(r"^\| `([^`-][^`]*)`", metrics_page(), re.MULTILINE)) == sorted(METRICS)
    assert {name.split("/")[0] for name in METRICS} == set(GROUPS)


@pytest.mark.parametrize("page", [flags_page, metrics_page])
def test_rows_have_the_cells_of_their_table(page):
    for table in re.findall(r"(?:^\|.*\n)+", page(), re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(counts) == 1


def test_every_command_of_the_page_runs(tmp_path, monkeypatch, capsys):
    """The page's own command lines, on runs made up with the names it uses; `test_docs.py` runs them on real ones."""
    for seed, name, lr in ((1, "seen", 1e-6), (2, "seen-2", 1e-6), (3, "changed", 1e-5)):
        make_run(tmp_path / "runs" / name, [0.5] * 6, seed=seed, lr=lr)
    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY / "docs" / "see_the_run.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if not line.startswith("miles train")]
    assert len(lines) == 6
    for line in lines:
        assert main(line.split()[1:]) == 0, line
    assert (tmp_path / "ranges.json").is_file() and "real" not in capsys.readouterr().out
