"""Every example of docs/hooks.md, in whole runs."""

import re
from types import SimpleNamespace

import pyarrow.parquet
import pytest

from miles.rollout.hook_table import HOOKS
from tests.e2e.harness import REPOSITORY, records

PAGE = (REPOSITORY / "docs" / "hooks.md").read_text()
EXAMPLES = dict(re.findall(r"^## --(\S+)\n.*?```python\n(.*?)```", PAGE, re.M | re.S))
SECOND = dict(re.findall(r"^### (\S+).*?\n.*?```python\n(.*?)```", PAGE, re.M | re.S))


def test_the_page_has_an_example_of_each_hook_in_the_order_of_the_table():
    assert [name.replace("-", "_") for name in EXAMPLES] == [kind.name for kind in HOOKS]


RUNS = [
    ["custom-rm-path", "rollout-sample-filter-path", "custom-reward-post-process-path", "data-source-path"],
    [
        *("custom-generate-function-path", "dynamic-sampling-filter-path", "rollout-all-samples-process-path"),
        *("custom-rollout-log-function-path", "custom-eval-rollout-log-function-path"),
    ],
    ["rollout-function-path", "eval-function-path", "custom-convert-samples-to-train-data-path"],
    ["custom-loss-function-path", "custom-pg-loss-reducer-function-path"],
    [
        *("custom-agent-function-path", "session-message-matcher"),
        *("session-sample-picker-path", "session-sample-postprocessor-path"),
    ],
    ["custom-tis-function-path", "generate-execute-tool-function-path", "buffer-filter-path"],
]


@pytest.mark.parametrize("names", RUNS, ids=lambda names: names[0])
def test_examples_run(miles, names):
    settings = {"num_rollout": 1, "save_interval": None}
    for name in names:
        module = "example_" + name.replace("-", "_")
        (miles.folder / f"{module}.py").write_text(EXAMPLES[name])
        hook = re.findall(r"^(?:async )?(?:def|class) (\w+)", EXAMPLES[name], re.M)[-1]
        settings[name.replace("-", "_")] = f"{module}.{hook}"
    if "eval-function-path" in names:
        settings["eval_interval"] = 1
    if "custom-eval-rollout-log-function-path" in names:
        settings |= {"eval_interval": 1, "eval_prompt_data": ["sums", "train.jsonl"]}
    if "custom-agent-function-path" in names:
        generate = "miles.rollout.generate_hub.agentic_tool_call.generate"
        settings |= {"custom_generate_function_path": generate, "rollout_max_response_len": 60}
    if "custom-loss-function-path" in names:
        settings["loss_type"] = "custom_loss"
    ended = miles.train(**settings)
    assert ended.code == 0, ended.err
    (record,) = records(miles.run, "step")
    log = miles.log()
    if "custom-rollout-log-function-path" in names:
        assert record["rollout/dynamic_filter/drop_even"] == 2.0 and record["rollout/response_lengths"] <= 5
        assert "my rollout 0 has 8 samples" in ended.out and "my evaluation 1: ['sums']" in ended.out
        assert (miles.folder / "all_groups.txt").read_text() == "4\n"
        assert "'rollout/dynamic_filter" not in log and "eval 1: {" not in log
    if "custom-agent-function-path" in names:
        assert 1 < record["rollout/num_turns"] <= 2 and 0 < record["rollout/tool_token_ratio"] < 1
    if "custom-reward-post-process-path" in names:
        assert record["train/num_tokens"] < 8 * record["rollout/response_lengths"]  # one answer is masked
        assert abs(record["rollout/rewards"]) < 1e-6
    if "eval-function-path" in names:
        first, last = records(miles.run, "eval")
        assert first["eval/skipped_before_training"] == 1.0 and "eval/mine" not in first
        assert last["eval/mine"] == 3.0 and record["rollout/response_lengths"] <= 4
        assert record["rollout/rewards"] == pytest.approx(record["rollout/raw_reward"] - 0.5, abs=1e-6)
    assert set(EXAMPLES) == {name for names in RUNS for name in names}


def test_second_examples_run(miles):
    for module, text in (
        ("my_source", EXAMPLES["data-source-path"]),
        ("my_generate", EXAMPLES["custom-generate-function-path"]),
        ("my_rows", SECOND.pop("generate_function_path")),
        ("my_eval", SECOND.pop("CheckpointEvalFn")),
    ):
        (miles.folder / f"{module}.py").write_text(text)
    assert not SECOND
    mixed, elsewhere = {"data_source_path": "my_rows.Mixed"}, {"eval_function_path": "my_eval.Elsewhere"}
    once = {"num_rollout": 1, "save_interval": None}
    ended = miles.train(**once, **mixed, **elsewhere, eval_interval=1)
    assert ended.code == 0, ended.err
    rows = pyarrow.parquet.read_table(miles.run / "samples" / "rollout_0.parquet").to_pylist()
    lengths = [[row["response_length"] for row in rows if row["group_index"] == group] for group in (0, 1)]
    assert max(lengths[0]) <= 5 < max(lengths[1])
    assert [record["eval/elsewhere"] for record in records(miles.run, "eval")] == [1.0, 1.0]
    assert ended.out.count("the run has ended\n") == 1 and not (miles.run / "eval_hf").exists()


def test_the_data_source_goes_on_in_another_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made, args = {}, SimpleNamespace(n_samples_per_prompt=2)
    exec(EXAMPLES["data-source-path"], made)
    first, resumed = made["Sums"](args), made["Sums"](args)
    first.get_samples(3)
    first.save(1)
    resumed.load(1)
    assert resumed.get_samples(2) == first.get_samples(2)


def test_the_command_lists_them(miles):
    ended = miles.start("hooks").wait()
    assert ended.code == 0 and all(f"--{name}\n" in ended.out for name in EXAMPLES)
