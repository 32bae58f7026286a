from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.checkpoint import hf
from miles.checkpoint.hf import export_hf
from miles.errors import CheckpointError, StorageError
from miles.model.load import load_model
from miles.model.names import to_hf
from tests.unit.model.random_checkpoints import CHECKPOINTS, write_checkpoint
from tests.unit.text.tiny_tokenizer import write_tokenizer


def published(folder):
    model = load_model(folder, dtype=torch.float32, device="cpu")
    return to_hf(model.spec, dict(model.named_parameters()))


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_transformers_loads_equal_weights(case, tmp_path):
    source, target = tmp_path / "source", tmp_path / "deep" / "export"
    reference = write_checkpoint(case, source)
    export_hf(target, source=source, tensors=published(source), dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.dtype == torch.float32
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference.state_dict().items())
    assert loaded.config.to_diff_dict() == AutoModelForCausalLM.from_pretrained(source).config.to_diff_dict()
    assert list(target.parent.iterdir()) == [target]


def test_bfloat16_export_is_rounded_and_says_so(tmp_path):
    reference = write_checkpoint("qwen3", tmp_path / "source")
    export_hf(
        tmp_path / "export", source=tmp_path / "source", tensors=published(tmp_path / "source"), dtype=torch.bfloat16
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert loaded.dtype == torch.bfloat16
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], tensor.bfloat16()) for name, tensor in reference.state_dict().items())


def test_tokenizer_and_generation_config_come_along(tmp_path):
    source, target = tmp_path / "source", tmp_path / "export"
    source.mkdir()
    write_tokenizer(source)
    write_checkpoint("llama", source)
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    export_hf(target, source=source, tensors=published(source), dtype=torch.float32)
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    text = "hello 12"
    assert AutoTokenizer.from_pretrained(target)(text) == AutoTokenizer.from_pretrained(source)(text)
    assert {path.name for path in target.iterdir()} == {path.name for path in source.iterdir()}


def test_a_large_export_is_sharded_with_an_index(tmp_path):
    source, target = tmp_path / "source", tmp_path / "export"
    reference = write_checkpoint("llama", source)
    export_hf(target, source=source, tensors=published(source), dtype=torch.float32, max_shard_bytes=100_000)
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all((target / shard).stat().st_size < 110_000 for shard in shards)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * reference.num_parameters()
    for weights in (AutoModelForCausalLM.from_pretrained(target).state_dict(), published(target)):
        assert all(torch.equal(weights[name], tensor) for name, tensor in reference.state_dict().items())


def test_an_earlier_export_is_replaced_as_a_whole(tmp_path):
    source, target = tmp_path / "source", tmp_path / "export"
    write_checkpoint("llama", source)
    tensors = published(source)
    export_hf(target, source=source, tensors=tensors, dtype=torch.float32, max_shard_bytes=100_000)
    export_hf(target, source=source, tensors=tensors, dtype=torch.float32)
    assert [path.name for path in target.glob("*.safetensors*")] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]


def test_a_folder_that_is_no_model_is_not_touched(tmp_path):
    source, target = tmp_path / "source", tmp_path / "thesis"
    write_checkpoint("llama", source)
    target.mkdir()
    (target / "chapter1.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not a model folder"):
        export_hf(target, source=source, tensors=published(source), dtype=torch.float32)
    assert (target / "chapter1.txt").read_text() == "mine"


def test_a_failed_write_leaves_the_earlier_export(tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "export"
    write_checkpoint("llama", source)
    export_hf(target, source=source, tensors=published(source), dtype=torch.float32)
    before = (target / "model.safetensors").read_bytes()

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "save_file", full)
    with pytest.raises(StorageError, match="No space left"):
        export_hf(target, source=source, tensors=published(source), dtype=torch.bfloat16)
    assert (target / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]
