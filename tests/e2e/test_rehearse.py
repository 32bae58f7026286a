import json

import pytest

from miles.cli.main import main
from tests.e2e.loop_fork import flags, sums


@pytest.mark.slow
def test_every_promise_is_kept(tmp_path):
    settings = sums(tmp_path, rm_type="math", progress=None)
    assert main(["rehearse", *flags(settings), "--json", str(tmp_path / "table.json")]) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["num_broken"] == 0
    assert all(fault["steps_lost"] == 0 for fault in table["faults"])
