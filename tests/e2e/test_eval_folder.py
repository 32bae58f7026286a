"""An evaluation that reads the weights from a folder (`CheckpointEvalFn`)."""

import pytest
import torch
from safetensors.torch import load_file

from miles.checkpoint.convert import convert_checkpoint
from tests.e2e.harness import MODEL, assert_same, is_one_error, state_of

COPIES = """
import shutil

from miles.rollout.hook_inputs import CheckpointEvalFn, RolloutFnEvalOutput


class Copies(CheckpointEvalFn):
    async def evaluate_checkpoint(self, hf_dir, step):
        shutil.copytree(hf_dir, f"weights_{step.rollout_id}")
        if step.rollout_id == 2 and self.input.args.lora_rank:
            raise ValueError("no GPU left")
        return RolloutFnEvalOutput({"mine": {"rewards": [1.0]}})

    def dispose(self):
        print("disposed of")
"""


@pytest.fixture
def copying(miles):
    (miles.folder / "copies.py").write_text(COPIES)
    return {"eval_function_path": "copies.Copies", "eval_interval": 1}


def assert_weights(folder, expected):
    one, other = load_file(folder / "model.safetensors"), load_file(expected / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].float(), other[name].float()) for name in one)
    assert (folder / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()


def test_it_gets_the_current_weights_and_training_is_as_without_it(miles, copying, whole_run):
    ended = miles.train(**copying)
    assert ended.code == 0 and ended.out.count("disposed of\n") == 1, ended.err
    assert_weights(miles.folder / "weights_0", MODEL)
    assert_weights(miles.folder / "weights_1", miles.run / "checkpoints" / "iter_0000001" / "model")
    assert not (miles.run / "eval_hf").exists()
    states = miles.state(), state_of(whole_run)
    for state in states:
        state["state"] = None  # it says when the last evaluation was
        state["metrics"] = [record for record in state["metrics"] if record["kind"] == "step"]
        state["samples"] = {name: table for name, table in state["samples"].items() if name.startswith("rollout")}
    assert_same(*states)


def test_adapters_are_merged_and_it_is_disposed_of_when_it_fails(miles, copying):
    ended = miles.train(num_rollout=2, lora_rank=4, **copying)
    is_one_error(ended, 2, "--eval-function-path copies.Copies failed: ", "copies.py:11: ValueError: no GPU left")
    assert ended.out.count("disposed of\n") == 1 and not (miles.run / "eval_hf").exists()
    convert_checkpoint(miles.run / "checkpoints" / "iter_0000001", miles.folder / "merged")
    assert_weights(miles.folder / "weights_1", miles.folder / "merged")
