from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.checkpoint.load import load_checkpoint, weights_folder
from miles.checkpoint.peft import export_adapter, load_adapter
from miles.checkpoint.save import save_checkpoint
from miles.cli.convert import run
from miles.config.lora_section import LoraConfig
from miles.errors import CheckpointError
from miles.model.decoder import Decoder
from miles.model.load import load_model
from miles.model.lora import add_lora, to_peft

MODEL = Path(__file__).parents[3] / "miles" / "quickstart" / "model"
LORA = LoraConfig(lora_rank=2, lora_alpha=5.0, target_modules=("q_proj", "down_proj"))
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def model_with(lora: LoraConfig) -> Decoder:
    model = load_model(MODEL, dtype=torch.float32, device="cpu")
    add_lora(model, lora, seed=0)
    return model


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    model = model_with(LORA)
    generator = torch.Generator().manual_seed(0)
    live = to_peft(model, dict(model.named_parameters()))
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in live.items()}


@pytest.fixture
def adapter(tensors, tmp_path) -> Path:
    export_adapter(tmp_path / "adapter", source=MODEL, tensors=tensors, lora=LORA)
    return tmp_path / "adapter"


def edit(adapter: Path, **changes: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_files_are_those_of_peft(adapter, tensors):
    config = json.loads((adapter / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": 2, "lora_alpha": 5.0, "base_model_name_or_path": str(MODEL)}
    assert {name: config[name] for name in expected} == expected
    assert set(config["target_modules"]) == {"q_proj", "down_proj"}
    written = load_file(adapter / "adapter_model.safetensors")
    assert written.keys() == tensors.keys() and Q_A in written
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    export_adapter(adapter, source=MODEL, tensors={n: t + 1 for n, t in tensors.items()}, lora=LORA)  # replaces it
    assert torch.equal(load_file(adapter / "adapter_model.safetensors")[Q_A], tensors[Q_A] + 1)


def test_an_export_does_not_replace_what_is_no_model(tmp_path, tensors):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="not a model folder"):
        export_adapter(tmp_path / "thesis", source=MODEL, tensors=tensors, lora=LORA)


def test_what_is_loaded_is_what_was_written(adapter, tensors):
    model = model_with(LORA)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    load_adapter(model, adapter)
    live = to_peft(model, dict(model.named_parameters()))
    assert all(torch.equal(live[name], tensors[name]) for name in tensors)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 4}, "--lora-rank 4 --lora-alpha 5, asked for are 2 and 5"),
        ({"lora_alpha": 8}, "--lora-alpha 8"),
        ({"use_dora": True}, "only plain LoRA is done here, not use_dora True"),
        ({"bias": "all"}, "not bias all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": None}, "not a whole PEFT adapter"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(adapter, changes, message):
    edit(adapter, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_adapter(model_with(LORA), adapter)


def test_other_modules_and_other_shapes_are_refused(adapter, tensors):
    with pytest.raises(CheckpointError, match=r"has .*down_proj.*, for which --target-modules .* do not ask"):
        load_adapter(model_with(LoraConfig(lora_rank=2, lora_alpha=5.0, target_modules=("q_proj",))), adapter)
    with pytest.raises(CheckpointError, match=r"lacks .*gate_proj.*, for which --target-modules .* ask"):
        load_adapter(model_with(LoraConfig(lora_rank=2, lora_alpha=5.0)), adapter)
    save_file({**tensors, Q_A: tensors[Q_A][:, :5].contiguous()}, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="adapter of another model"):
        load_adapter(model_with(LORA), adapter)


def test_a_checkpoint_holds_the_adapter_and_convert_merges_or_extracts_it(tmp_path, tensors):
    root = tmp_path / "run" / "checkpoints"
    optimizer = {"exp_avg.x": torch.ones(2)}
    path = save_checkpoint(
        root, 3, tensors={"adapter": tensors, "optimizer": optimizer}, state={}, model_source=MODEL, lora=LORA
    )
    assert not (path / "model").exists()
    loaded = load_checkpoint(root)
    assert loaded is not None and torch.equal(loaded.tensors["adapter"][Q_A], tensors[Q_A])
    assert weights_folder(tmp_path / "run", "adapter") == path / "adapter"
    with pytest.raises(CheckpointError, match="has no model: a LoRA run saves its adapter only"):
        weights_folder(root)

    merged, extracted = tmp_path / "merged", tmp_path / "extracted"
    assert run(["--input-dir", str(path), "--output-dir", str(merged), "--dtype", "float32"]) == 0
    assert run(["--input-dir", str(path), "--output-dir", str(extracted), "--adapter"]) == 0
    start, written = load_file(MODEL / "model.safetensors"), load_file(merged / "model.safetensors")
    for name, tensor in start.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        added = torch.zeros_like(tensor)
        if f"{stem}.lora_A.weight" in tensors:
            added = 2.5 * tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
        torch.testing.assert_close(written[name], tensor + added)
    assert torch.equal(load_file(extracted / "adapter_model.safetensors")[Q_A], tensors[Q_A])
    assert run(["--input-dir", str(extracted), "--output-dir", str(tmp_path / "again"), "--dtype", "float32"]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()


def test_convert_says_when_the_model_under_an_adapter_is_gone(adapter, tmp_path):
    edit(adapter, base_model_name_or_path="gone/model")
    with pytest.raises(CheckpointError, match="was made for is not in gone/model; give --origin-hf-dir"):
        run(["--input-dir", str(adapter), "--output-dir", str(tmp_path / "out")])
    flags = ["--input-dir", str(adapter), "--output-dir", str(tmp_path / "out"), "--origin-hf-dir", str(MODEL)]
    assert run(flags) == 0
