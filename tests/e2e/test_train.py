"""Whole runs of `miles train`: what the run folder holds, what its numbers mean, and what leaves them unchanged."""

import ast
import json
import re
import subprocess

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.harness import MODEL, assert_same, records, state_of

FILES = {".lock", "checkpoints", "config.yaml", "environment.json", "events.jsonl", "log.txt", "metrics.jsonl"}


def grep(*arguments) -> list[str]:
    return subprocess.run(["grep", *map(str, arguments)], capture_output=True, text=True).stdout.splitlines()


def test_a_run_folder(miles):
    ended = miles.train(num_rollout=2, eval_interval=1, eval_prompt_data=["sums", "train.jsonl"])
    assert ended.code == 0
    assert ended.message == ""
    assert {path.name for path in miles.run.iterdir()} == {*FILES, "samples"}
    assert {path.name for path in (miles.run / "samples").iterdir()} == {
        "eval_0.parquet", "rollout_0.parquet", "eval_1.parquet", "rollout_1.parquet", "eval_2.parquet",
    }  # fmt: skip
    root = miles.run / "checkpoints"
    assert {path.name for path in root.iterdir()} == {
        ".lock", "iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt",
    }  # fmt: skip
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert {path.name for path in (root / "iter_0000002").iterdir()} == {
        "model", "optimizer.safetensors", "state.json",
    }  # fmt: skip
    kinds = [(record["kind"], record["step"]) for record in records(miles.run)]
    assert kinds == [("eval", 0), ("step", 0), ("eval", 1), ("step", 1), ("eval", 2)]
    events = [json.loads(line) for line in (miles.run / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["start", "checkpoint", "checkpoint", "finish"]
    environment = json.loads((miles.run / "environment.json").read_text())
    assert environment["command"].startswith("miles train --hf-checkpoint ")
    assert environment["versions"]["torch"] == torch.__version__
    for step in range(2):
        rows = pyarrow.parquet.read_table(miles.run / "samples" / f"rollout_{step}.parquet").to_pylist()
        assert [row["group_index"] for row in rows] == [2 * step] * 4 + [2 * step + 1] * 4
        assert [row["index"] for row in rows] == list(range(8 * step, 8 * step + 8))
        record = records(miles.run, "step")[step]
        assert sum(row["reward"] for row in rows) / 8 == pytest.approx(record["rollout/raw_reward"])
        assert sum(row["response_length"] for row in rows) / 8 == pytest.approx(record["rollout/response_lengths"])


def test_the_greps_of_the_manual(whole_run):
    log = whole_run / "log.txt"
    assert grep("-c", " - step [0-9]*: {", log) == ["4"]
    rewards = grep("-o", "'rollout/raw_reward': [0-9.]*", log)
    assert [float(found.split()[1]) for found in rewards] == [
        record["rollout/raw_reward"] for record in records(whole_run, "step")
    ]
    gaps = grep("-o", "'train/train_rollout_logprob_abs_diff': [0-9.]*", log)
    assert len(gaps) == 4
    assert all(0 < float(gap.split()[1]) < 1e-4 for gap in gaps)
    text = log.read_text()
    for step in range(4):
        trainer_side = [line for line in grep("-h", f" - perf {step}: ", log) if "perf/update_weights_time" in line]
        (numbers,) = (ast.literal_eval(line.partition(f"perf {step}: ")[2]) for line in trainer_side)
        assert 0 < numbers["perf/actor_train_time"] <= numbers["perf/train_time"] <= numbers["perf/step_time"]
    prefix = r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} main\] \w+\.py:\d+ - "
    assert re.search(prefix + r"Load weight end\. elapsed=[\d.]+ s, ", text, re.M)
    assert re.search(
        prefix + r"KV Cache is allocated\. dtype: torch\.float32, #tokens: \d+, K size: [\d.]+ GB, V size: [\d.]+ GB$",
        text,
        re.M,
    )
    assert re.search(prefix + r"no checkpoint in runs/run/checkpoints: starting fresh$", text, re.M)
    assert all(re.match(prefix, line + "x") for line in text.splitlines())


def test_two_rollouts_and_two_more_equal_four(miles, whole_run):
    assert miles.train(num_rollout=2).code == 0
    assert miles.train().code == 0
    assert_same(miles.state(), state_of(whole_run))
    assert "starting fresh" in miles.log()
    assert "the next step is 2" in miles.log()


def test_a_finished_run_is_left_as_it_is(miles):
    assert miles.train(num_rollout=2).code == 0
    before = miles.state()
    assert miles.train(num_rollout=2).code == 0
    assert miles.train(num_rollout=1).code == 0
    assert_same(miles.state(), before)


def test_evaluation_changes_no_training_sample(miles, whole_run):
    evaluated = {"eval_interval": 2, "eval_prompt_data": ["sums", "train.jsonl"], "n_samples_per_eval_prompt": 3}
    assert miles.train(**evaluated).code == 0
    ours, theirs = miles.state(), state_of(whole_run)
    assert [record["step"] for record in records(miles.run, "eval")] == [0, 2, 4]
    ours["metrics"] = records(miles.run, "step")
    ours["samples"] = {name: table for name, table in ours["samples"].items() if name.startswith("rollout")}
    for state in (ours["state"], theirs["state"]):
        del state["evaluated_at"], state["note"]  # say when it was evaluated, and how well
    assert_same(ours, theirs)


def test_rollouts_are_drawn_from_the_weights_of_the_checkpoint(whole_run):
    """The weights after one rollout wrote the second one: transformers must give its answers the same log-probs."""
    folder = whole_run / "checkpoints" / "iter_0000001" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    rows = pyarrow.parquet.read_table(whole_run / "samples" / "rollout_1.parquet").to_pylist()
    for row in rows:
        assert row["weight_versions"] == [1] * row["response_length"]
        start = len(row["tokens"]) - row["response_length"]
        with torch.no_grad():
            log_probs = model(torch.tensor([row["tokens"]])).logits[0].log_softmax(-1)
        answer = torch.tensor(row["tokens"][start:])
        expected = log_probs[start - 1 : -1].gather(1, answer[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row["rollout_log_probs"]), expected, atol=1e-4, rtol=0)


def test_the_export_holds_the_last_weights(miles):
    assert miles.train(num_rollout=1, save_hf="trained").code == 0
    exported = AutoModelForCausalLM.from_pretrained(miles.folder / "trained").state_dict()
    saved = load_file(miles.run / "checkpoints" / "iter_0000001" / "model" / "model.safetensors")
    start = load_file(MODEL / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    assert any(not torch.equal(start[name], tensor) for name, tensor in saved.items())


def test_supervised_training_learns_the_given_answers(miles):
    settings = {"loss_type": "sft_loss", "custom_rm_path": None, "rollout_batch_size": 5, "num_rollout": 12}
    assert miles.train(**settings).code == 0
    losses = [record["train/loss"] for record in records(miles.run, "step")]
    assert losses[-1] < losses[0] / 2
    assert "KV Cache" not in miles.log(), "nothing is generated, so no cache is needed"


def test_the_math_reward_grades_in_its_own_processes(miles):
    rows = [{"question": "12+34=?", "answer": r"\frac{92}{2}"}, {"question": "1+2=?", "answer": 3}]
    miles.write("train.jsonl", rows)
    ended = miles.train(custom_rm_path=None, rm_type="math", num_rollout=2)
    assert ended.code == 0
    (first, second) = records(miles.run, "step")
    assert first["rollout/grader_errors"] == first["rollout/grader_timeouts"] == 0
    assert second["rollout/weight_version/min"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_batch_size": 1, "n_samples_per_prompt": 1, "disable_rewards_normalization": True},
        {"rollout_max_response_len": 1},
        {"rollout_max_context_len": 16, "rollout_max_response_len": 15},
        {"rollout_stop": ["#"], "rollout_max_response_len": 40},
        {"num_steps_per_rollout": 4},
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": MODEL, "num_steps_per_rollout": 2},
        {"engine_max_total_tokens": 64, "engine_chunked_prefill_size": 3},
        {"max_tokens_per_gpu": 1, "log_probs_chunk_size": 1},
        {"custom_rm_path": "tests.e2e.rewards.digits_of_a_group", "group_rm": True},
        {"custom_rm_path": "tests.e2e.rewards.digits_in_a_dict", "reward_key": "score"},
        {"custom_rm_path": "tests.e2e.rewards.digits_async", "apply_chat_template": None},
        {"num_rollout": None, "num_epoch": 1},
    ],
    ids="-".join,
)
def test_settings_at_their_limits(miles, settings):
    ended = miles.train(**{"num_rollout": 2, **settings})
    assert ended.code == 0, ended.err
    for record in records(miles.run, "step"):
        assert record["train/num_skipped_steps"] == 0
        assert record["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert record.get("rollout/num_failed", 0) == 0


def test_memory_of_the_engine_is_released_while_the_trainer_works_and_nothing_changes(miles, whole_run):
    ended = miles.train(offload_rollout_level=["kv_cache", "weight"], offload_train=True)
    assert ended.code == 0, ended.err
    assert_same(miles.state(), state_of(whole_run))
    lines = map(json.loads, (miles.run / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    assert all(step["perf/finalize_and_resume_engines_time"] > 0 for step in steps)
    released = grep("The engine has released", miles.run / "log.txt")
    assert len(released) == len(steps) == 4
    assert re.search(r"kv_cache 0\.\d*[1-9]\d* GB, weights 0\.00 GB; the weights are the trainer's own", released[0])


def test_settings_that_only_change_how_it_is_computed(miles, whole_run):
    """Cache size, chunks and running requests change neither a token nor a reward."""
    ended = miles.train(engine_max_total_tokens=96, engine_chunked_prefill_size=5, engine_max_running_requests=3)
    assert ended.code == 0
    ours, theirs = miles.state()["samples"], state_of(whole_run)["samples"]
    assert ours["rollout_0.parquet"].column("tokens").equals(theirs["rollout_0.parquet"].column("tokens"))
