"""Every row of the table of docs/sampling.md."""

import re

import pytest

from tests.e2e.harness import REPOSITORY, SETTINGS, flags, is_one_error, records

PAGE = (REPOSITORY / "docs" / "sampling.md").read_text()
ROWS = re.findall(r"^\| `([^`]*)` \| (works|refused: .*) \|$", PAGE, re.M)
GENERATE = "--custom-generate-function-path miles.rollout.generate_hub.multi_turn.generate"
NAMES = {
    "AGENT": "--custom-generate-function-path miles.rollout.generate_hub.agentic_tool_call.generate "
    "--custom-agent-function-path tests.e2e.rewards.agent",
    "FILTER": "--dynamic-sampling-filter-path tests.e2e.rewards.not_every_third",
    "TOOLS": f"{GENERATE} --generate-execute-tool-function-path tests.e2e.rewards.tool",
}


def test_there_are_rows_of_both_kinds():
    results = [result.partition(":")[0] for _, result in ROWS]
    assert results.count("works") >= 14 and results.count("refused") >= 9


@pytest.mark.parametrize(("row", "result"), ROWS, ids=[row for row, _ in ROWS])
def test_row(miles, whole_run, row, result):
    named = {**NAMES, "STORED": f"--load-debug-rollout-data {whole_run}/samples/rollout_{{rollout_id}}.parquet"}
    tokens = " ".join(named.get(word, word) for word in row.split()).split()
    settings = {**SETTINGS, "num_rollout": 2, "save_interval": None}
    ended = miles.start("train", *flags(settings), *tokens).wait()
    if result != "works":
        is_one_error(ended, 2, result.removeprefix("refused: "))
        return
    assert ended.code == 0, ended.err
    assert [record["step"] for record in records(miles.run, "step")] == [0, 1]
