from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from miles.checkpoint.convert import convert_checkpoint
from miles.checkpoint.save import save_checkpoint
from miles.cli.convert import run
from miles.errors import CheckpointError, ConfigError

MODEL = Path(__file__).parents[3] / "miles" / "quickstart" / "model"


@pytest.fixture
def checkpoint(tmp_path):
    tensors = {name: tensor + 1.0 for name, tensor in load_file(MODEL / "model.safetensors").items()}
    return save_checkpoint(
        tmp_path / "run" / "checkpoints", 3, tensors={"model": tensors}, state={}, model_source=MODEL
    )


def test_a_checkpoint_becomes_a_model_folder_in_the_dtype_asked_for(checkpoint, tmp_path, capsys):
    target = tmp_path / "served"
    flags = ["--input-dir", str(checkpoint), "--output-dir", str(target), "--dtype", "bfloat16"]
    assert run([*flags, "--origin-hf-dir", str(MODEL)]) == 0
    start, written = load_file(MODEL / "model.safetensors"), load_file(target / "model.safetensors")
    assert written.keys() == start.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, (start[name] + 1.0).bfloat16())
    assert (target / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    assert str(target) in capsys.readouterr().out


@pytest.mark.parametrize("level", [0, 1])
def test_the_folder_of_all_checkpoints_or_of_the_run_is_refused_by_name(checkpoint, tmp_path, level):
    with pytest.raises(CheckpointError, match="iter_0000003"):
        convert_checkpoint(checkpoint.parents[level], tmp_path / "out")


def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(checkpoint, tmp_path):
    weights = checkpoint / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        convert_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_input_names_the_flag(tmp_path):
    with pytest.raises(ConfigError, match="--input-dir .* does not exist"):
        run(["--input-dir", str(tmp_path / "none"), "--output-dir", str(tmp_path / "out")])
