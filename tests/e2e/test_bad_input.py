"""Bad input gives one clear error at once, and loses nothing."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.harness import MODEL, ROWS, assert_same, is_one_error, records, state_of
from tests.e2e.test_processes import wait_for


@pytest.fixture
def model(miles) -> Path:
    """A copy of the model, to be damaged."""
    return Path(shutil.copytree(MODEL, miles.folder / "model"))


def cut_weights(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return "model/model.safetensors cannot be read", "only partly downloaded", "download it again"


def lose_a_shard(model):
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return "model: 1 of 2 weight files are missing (model-00002-of-00002.safetensors)", "run it again"


def lose_all_weights(model):
    (model / "model.safetensors").unlink()
    return ("model has no model.safetensors", "download the model again")


def lose_config(model):
    (model / "config.json").unlink()
    return "model/config.json does not exist", "expected a Hugging Face model folder"


def lose_tokenizer(model):
    (model / "tokenizer.json").unlink()
    return "model/tokenizer.json is missing", "save_pretrained"


def cut_tokenizer(model):
    path = model / "tokenizer.json"
    path.write_text(path.read_text()[:500])
    return "model/tokenizer.json or a file beside it cannot be read", "download the tokenizer files again"


def take_a_larger_tokenizer(model):
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab |= {f"word{number}": len(vocab) + number for number in range(100)}
    path.write_text(json.dumps(content))
    return "--hf-checkpoint model", "has 151 tokens but the model knows 51", "use the tokenizer of the model"


def name_another_architecture(model):
    path = model / "config.json"
    path.write_text(path.read_text().replace("Qwen3ForCausalLM", "MambaForCausalLM"))
    return "model/config.json: architecture MambaForCausalLM is not supported", "LlamaForCausalLM, Qwen2ForCausalLM"


@pytest.mark.parametrize(
    "damage",
    [
        cut_weights, lose_a_shard, lose_all_weights, lose_config, lose_tokenizer, cut_tokenizer,
        take_a_larger_tokenizer, name_another_architecture,
    ],
)  # fmt: skip
def test_a_damaged_model(miles, model, damage):
    expected = damage(model)
    is_one_error(miles.train(hf_checkpoint="model"), 2, *expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"hf_checkpoint": "no/such/folder"}, ("the model folder no/such/folder does not exist", "--hf-checkpoint")),
        ({"hf_checkpoint": "no/model"}, ("no folder 'no/model'", "hub cannot be reached", "--hf-checkpoint")),
        ({"hf_checkpoint": "~nobody-here/model"}, ("~nobody-here/model does not exist", "--hf-checkpoint")),
        ({"hf_checkpoint": "train.jsonl"}, ("train.jsonl is a file, not a model folder",)),
        ({"use_kl_loss": True, "ref_load": "no/such/folder"}, ("no/such/folder does not exist", "give --ref-load")),
        ({"prompt_data": "none.jsonl"}, ("--prompt-data none.jsonl: there is no file", "/none.jsonl")),
        ({"prompt_data": "train.jsonl@[9:]"}, ("--prompt-data train.jsonl@[9:]", "leaves none of its 5 rows")),
        ({"input_key": "questoin"}, ("train.jsonl row 1", "--input-key", "did you mean --input-key question?")),
        ({"label_key": "label"}, ("train.jsonl row 1", "--label-key", "it has: question, answer")),
        ({"rollout_max_prompt_len": 3}, ("all 5 prompts have more than 3 tokens", "--rollout-max-prompt-len")),
        ({"global_batch_size": 3}, ("2 x --n-samples-per-prompt 4 = 8", "--global-batch-size 3", "2 or 4 would")),
        ({"num_steps_per_rollout": 3}, ("do not divide into --num-steps-per-rollout 3", "2 or 4 would")),
        ({"rollout_temperature": 0}, ("--rollout-temperature 0 is greedy", "use a value above 0")),
        ({"lr": "nan"}, ("--lr: 'nan' is not a finite number",)),
        ({"learning_rate": 1}, ("unknown flag --learning-rate",)),
        ({"n_sample_per_prompt": 1}, ("unknown flag --n-sample-per-prompt", "did you mean --n-samples-per-prompt?")),
        ({"n_samples_per_prompt": 1}, ("--n-samples-per-prompt 1", "use at least 2")),
        ({"custom_rm_path": "no.such.reward"}, ("--custom-rm-path no.such.reward: there is no module no",)),
        ({"custom_rm_path": "tests.e2e.rewards.digit"}, ("has no function digit", "rewards.digits?")),
        ({"custom_rm_path": "digits"}, ("--custom-rm-path digits: expected an import path module.function",)),
        ({"custom_rm_path": None, "rm_type": "maths"}, ("--rm-type maths: there is no such reward", "mean math?")),
        ({"load": "elsewhere"}, ("--load elsewhere: there is no checkpoint", "leave --load out")),
        ({"save": "train.jsonl"}, ("--save train.jsonl: no checkpoint could be saved here", "another folder")),
        ({"save_hf": "."}, (". exists and is not a model folder; choose another folder",)),
        ({"device": "cuda"}, ("--device cuda: PyTorch sees no GPU", "use --device cpu")),
        ({"engine_max_total_tokens": 16}, ("would hold 16 tokens", "at least 32", "--engine-max-total-tokens")),
        ({"engine_max_total_tokens": 32, "rollout_max_response_len": 40}, ("holds 32 tokens", "of 15", "need 55")),
        ({"engine_mem_fraction_static": 0.99}, ("--engine-mem-fraction-static 0.99", "tokens fit")),
        ({"offload_rollout_level": ["kv_cash"]}, ("--offload-rollout-level", "'kv_cash'", "kv_cache, weight")),
        ({"offload_rollout": False, "offload_rollout_level": ["weight"]}, ("--no-offload-rollout", "contradict")),
        ({"phase_deadlines": '{"generate": 9}'}, ("there is no phase 'generate'", "rollout")),
        ({"runs_dir": "train.jsonl"}, ("train.jsonl/run: cannot write the run folder: Not a directory",)),
    ],
    ids=lambda value: "-".join(f"{name}={given}" for name, given in value.items()) if isinstance(value, dict) else "",
)
def test_bad_settings(miles, settings, expected):
    storage = settings.keys() & {"save", "runs_dir"}
    is_one_error(miles.train(**settings), 1 if storage else 2, *expected)
    assert not (miles.run / "checkpoints" / "iter_0000001").exists()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ("row 6: is empty", "every line must be one JSON object")),
        ('{"question": "1+1=?", "answer"', ("row 6: is not JSON",)),
        ("[1]", ("row 6: is a JSON list; expected an object",)),
        ('{"question": "1+1=?"}', ("row 6: has no column 'answer' (--label-key)",)),
        ('{"question": "", "answer": "2"}', ("row 6: its prompt 'question' is empty",)),
        ('{"question": [], "answer": "2"}', ("row 6: its prompt 'question' is an empty list",)),
        ('{"question": 5, "answer": "2"}', ("row 6: its prompt 'question' is a int; expected a text",)),
        ('{"question": [{"role": "user"}], "answer": "2"}', ("row 6: message 1 of its prompt", "no role and content")),
        ('{"question": "1+1=?\\ud800", "answer": "2"}', ("row 6: its prompt has half of a surrogate pair",)),
        ('{"question": "1+1=?", "answer": null}', ("row 6: its label 'answer' is null",)),
        ('{"question": "1+1=?", "answer": "2", "metadata": "x"}', ("row 6: its 'metadata' (--metadata-key) is a str",)),
        (json.dumps({"question": "1+1=?" * 50, "answer": "2"}), ("row 6: its prompt has 258 tokens", "holds 128")),
    ],
)
def test_a_bad_row_is_named(miles, line, expected):
    with open(miles.folder / "train.jsonl", "a") as file:
        file.write(line + "\n" + json.dumps(ROWS[0]) + "\n")
    is_one_error(miles.train(), 2, "--prompt-data: 1 of 7 rows cannot be used", "train.jsonl", *expected)


def test_an_empty_file(miles):
    miles.write("train.jsonl", [])
    is_one_error(miles.train(), 2, "--prompt-data train.jsonl: the file is empty")


def test_labels_that_no_answer_can_equal(miles):
    labels = ["46", r"\frac{1}", ["46"], "", float("nan")]
    miles.write("train.jsonl", [{"question": "12+34=?", "answer": label} for label in labels])
    is_one_error(
        miles.train(custom_rm_path=None, rm_type="math"),
        2,
        "4 of 5 rows cannot be used",
        r"train.jsonl row 2: its label '\\frac{1}' cannot be read",
        "row 3: its label ['46'] cannot be read: it is a list; expected a text or a number",
        "row 4: its label '' cannot be read: it is empty",
        "row 5: its label nan cannot be read: it is not a finite number",
    )


PROBE = "the probe before the run, one answer equal to its label"


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("raises", ("failed for sample 0", "rewards.py:", "KeyError: 'no such thing'")),
        ("none", ("rewards.py:", "returned None for sample 0; expected a finite number")),
        ("nan", ("rewards.py:", "returned nan for sample 0; expected a finite number")),
        ("string", ("rewards.py:", "returned the str '0.5' for sample 0; expected a finite number")),
        ("hangs", ("did not return within 0.3 s for sample 0", "--custom-rm-timeout")),
        ("hangs_async", ("did not return within 0.3 s for sample 0", "--custom-rm-timeout")),
        ("digits_of_a_group", ("failed for sample 0", "TypeError")),
        ("digits_in_a_dict", ("returned a dict for sample 0", "say with --reward-key which of score, other")),
    ],
)
def test_a_bad_reward_fails_its_probe(miles, reward, expected):
    ended = miles.train(custom_rm_path=f"tests.e2e.rewards.{reward}", custom_rm_timeout=0.3)
    is_one_error(ended, 2, PROBE, f"--custom-rm-path tests.e2e.rewards.{reward}", *expected)
    assert "Load weight" not in miles.log(), "it is found before the model is loaded"


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("late_raises", "KeyError: 'no such thing'"),
        ("late_none", "returned None"),
        ("late_nan_async", "returned nan"),
        ("late_hangs", "did not return within 0.3 s"),
        ("late_hangs_async", "did not return within 0.3 s"),
    ],
)
def test_a_reward_that_fails_later_loses_no_finished_step(miles, whole_run, reward, expected):
    path = f"tests.e2e.rewards.{reward}"
    ended = miles.train(custom_rm_path=path, custom_rm_timeout=0.3, save_interval=None)
    is_one_error(ended, 1, f"--custom-rm-path {path}", "sample 12", expected, "\nto resume: miles train ")
    saved = miles.run / "checkpoints" / "iter_0000001" / "optimizer.safetensors"
    assert saved.read_bytes() == (whole_run / "checkpoints" / "iter_0000001" / saved.name).read_bytes()


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("config.yaml", "runs/run: cannot write the run folder: No space left on device"),
        ("log.txt", "runs/run/log.txt: cannot write the log of the run: No space left on device"),
        ("rollout_2", "samples/rollout_2.parquet: cannot write the samples: No space left"),
        ("optimizer.safetensors", "runs/run/checkpoints: cannot save the checkpoint of iteration 3: No space left"),
        ("model.safetensors", "runs/run/checkpoints: cannot save the checkpoint of iteration 3: "),
        ("latest_checkpointed", "the checkpoint of iteration 2 is intact. Free space or give another --save"),
    ],
)
def test_a_full_disk(miles, whole_run, part, expected):
    assert miles.train(num_rollout=2).code == 0
    is_one_error(miles.train(before=[["no_space", part]]), 1, expected)
    assert not list((miles.run / "checkpoints").glob(".tmp*")), "nothing half-written stays"
    assert miles.train().code == 0
    assert_same(miles.state(), state_of(whole_run))


def test_a_quota_of_the_kernel(miles, whole_run):
    """No file may grow beyond 1 MB, which the weights do: the limit meets whoever writes, not only Python."""
    ended = miles.train(before=[["small_files_only", 10**6]])
    is_one_error(ended, 1, "cannot save the checkpoint of iteration 1", "nothing had been saved before", "to resume:")
    assert miles.train().code == 0
    assert_same(miles.state(), state_of(whole_run))


@pytest.mark.parametrize(
    ("closed", "expected"),
    [
        (".", "runs/run: cannot write the run folder: Permission denied"),
        ("samples", "samples/rollout_2.parquet: cannot write the samples: Permission denied"),
        ("checkpoints", "--save runs/run/checkpoints: no checkpoint could be saved here: Permission denied"),
    ],
)
def test_a_read_only_run_folder(miles, whole_run, closed, expected):
    assert miles.train(num_rollout=2).code == 0
    for path in (miles.folder, *miles.folder.rglob("*")):
        path.chmod(0o777)
    for parent in miles.folder.parents[:3]:  # of pytest, for its owner only
        parent.chmod(parent.stat().st_mode | 0o055)
    folder = miles.run / closed
    folder.chmod(0o555)
    if closed == ".":
        (miles.run / ".lock").chmod(0o444)
    is_one_error(miles.train(before=[["no_root"]]), 1, expected)
    folder.chmod(0o755)
    (miles.run / ".lock").chmod(0o644)
    assert miles.train().code == 0
    assert_same(miles.state(), state_of(whole_run))


def test_a_run_folder_of_another_run_is_kept(miles, whole_run):
    assert miles.train().code == 0
    is_one_error(
        miles.train(lr=1e-4, rollout_temperature=0.5),
        2,
        "runs/run belongs to a run with other settings",
        "--lr: 0.001 in the run folder, 0.0001 now",
        "--rollout-temperature: 1.0 in the run folder, 0.5 now",
        "--run-name",
    )
    assert_same(miles.state(), state_of(whole_run))


def test_other_rows_in_the_same_file_are_noticed(miles):
    assert miles.train(num_rollout=1).code == 0
    miles.write("train.jsonl", ROWS[::-1])
    is_one_error(miles.train(), 2, "was written with other prompt data", "--prompt-data")


def test_a_flag_corrected_after_a_failed_start(miles):
    assert miles.train(input_key="questoin").code == 2
    assert miles.train(num_rollout=1).code == 0


def test_two_runs_that_share_a_checkpoint_folder(miles):
    assert miles.train(num_rollout=1, save="shared").code == 0
    ended = miles.train(num_rollout=2, save="shared", run_name="other", lr=1e-4)
    is_one_error(ended, 2, "shared/iter_0000001 was saved by a run with other settings", "--lr: 0.001", "--load")


def test_folders_in_use(miles):
    (miles.folder / "slow").touch()
    first = miles.start_train(save="shared")
    wait_for((miles.folder / "shared" / ".lock").exists)
    is_one_error(miles.train(), 1, "runs/run: another run is using this folder (pid ", "--run-name")
    is_one_error(miles.train(save="shared", run_name="other"), 1, "--save shared: another run is saving here")
    os.kill(first.pid, 15)
    assert first.wait().code == 143


def test_damaged_checkpoints_are_not_passed_over(miles):
    assert miles.train(num_rollout=2).code == 0
    root = miles.run / "checkpoints"
    tracker, weights = root / "latest_checkpointed_iteration.txt", root / "iter_0000002" / "optimizer.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    advice = "write one of these iterations into runs/run/checkpoints/latest_checkpointed_iteration.txt to resume"
    is_one_error(miles.train(), 2, f"{weights.name}: its checksum is wrong", advice, ": 1")
    tracker.write_text("7")
    is_one_error(miles.train(), 2, "says 7, but runs/run/checkpoints/iter_0000007 does not exist", advice)
    tracker.write_text("1")
    assert miles.train(num_rollout=2).code == 0
    assert [record["step"] for record in records(miles.run, "step")] == [0, 1]


def test_the_same_error_through_a_supervised_worker(miles):
    """What the other tests see in one process comes out of two alike, without a line to resume from."""
    ended = miles.train(prompt_data="none.jsonl", in_process=None)
    is_one_error(ended, 2, "--prompt-data none.jsonl: there is no file")
    assert "to resume" not in ended.err
