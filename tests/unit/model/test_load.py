from __future__ import annotations

import json
import shutil

import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from miles.errors import CheckpointError
from miles.model import load
from miles.model.load import load_model, load_weights, resolve_model
from miles.model.names import to_hf
from tests.unit.model.random_checkpoints import write_checkpoint


def load_float32(folder):
    return load_model(folder, dtype=torch.float32, device="cpu")


@pytest.fixture
def folder(tmp_path):
    write_checkpoint("qwen2-tied", tmp_path)
    return tmp_path


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_shards_are_read_and_a_missing_one_is_named(tmp_path):
    reference = write_checkpoint("llama", tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    model = load_float32(tmp_path)
    published = to_hf(model.spec, dict(model.named_parameters()))
    assert all(torch.equal(published[name], tensor) for name, tensor in reference.state_dict().items())
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"1 of {len(shards)} weight files are missing.*{shards[1].name}"):
        load_float32(tmp_path)


def test_a_cut_off_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read.*partly downloaded"):
        load_float32(folder)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_float32(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="only safetensors"):
        load_float32(folder)


def test_a_damaged_index_is_named(tmp_path):
    write_checkpoint("llama", tmp_path, max_shard_size="100KB")
    (tmp_path / load.INDEX_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=load.INDEX_NAME):
        load_float32(tmp_path)


def test_missing_unknown_and_misshaped_tensors_are_named(folder):
    original = (folder / "model.safetensors").read_bytes()
    name = "model.layers.1.self_attn.k_proj.bias"
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"1 of \d+ tensors.*{name}"):
        load_float32(folder)
    (folder / "model.safetensors").write_bytes(original)
    rewrite(folder, lambda tensors: tensors.update({"model.layers.3.mlp.down_proj.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"layers\.3.*does not belong"):
        load_float32(folder)
    (folder / "model.safetensors").write_bytes(original)
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"shape \(3,\)"):
        load_float32(folder)


def test_a_repeated_tied_head_and_stored_frequencies_are_ignored(folder):
    expected = load_float32(folder).state_dict()
    extra = {"lm_head.weight": torch.ones(211, 48), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    actual = load_float32(folder).state_dict()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_loading_in_place_moves_no_parameter(folder):
    model = load_float32(folder)
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_weights(model, folder)
    for name, parameter in model.named_parameters():
        assert (parameter.data_ptr(), parameter.tolist()) == (before[name][0], before[name][1].tolist())


def test_weights_are_converted_to_the_dtype_asked_for(folder):
    exact, rounded = load_float32(folder), load_model(folder, dtype=torch.bfloat16, device="cpu")
    for one, other in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16), other)


def test_a_folder_resolves_to_itself_and_other_paths_say_what_to_do(folder):
    assert resolve_model(str(folder)) == folder
    for wrong in ("./no-such-model", "/no/such/model", "no-such-model", "a/b/c"):
        with pytest.raises(CheckpointError, match="does not exist.*--hf-checkpoint"):
            resolve_model(wrong)
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_model(str(folder / "config.json"))


def test_a_hub_name_offline_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def unreachable(name, **_options):
        raise LocalEntryNotFoundError("cannot find an appropriate cached snapshot folder\nmore")

    monkeypatch.setattr(load, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match="owner/name.*cannot be reached.*local folder"):
        resolve_model("owner/name")

    def invalid(name, **_options):
        raise HFValidationError("bad name")

    monkeypatch.setattr(load, "snapshot_download", invalid)
    with pytest.raises(CheckpointError, match="neither a folder nor a valid hub name"):
        resolve_model("owner/na--me")


def test_a_hub_name_becomes_the_downloaded_folder(monkeypatch, folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("hub") / "snapshot"
    asked = {}

    def download(name, *, allow_patterns, etag_timeout):
        asked.update(name=name, patterns=allow_patterns)
        shutil.copytree(folder, cache)
        return str(cache)

    monkeypatch.setattr(load, "snapshot_download", download)
    assert resolve_model("owner/name") == cache
    assert asked["name"] == "owner/name"
    assert not any("bin" in pattern or "pth" in pattern for pattern in asked["patterns"])
    assert json.loads((cache / "config.json").read_text())["vocab_size"] == load_float32(cache).spec.vocab_size
