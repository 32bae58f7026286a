from __future__ import annotations

import json

import pytest
import torch

from miles.errors import CheckpointError
from miles.model.decoder import Decoder
from miles.model.spec import SUPPORTED_ARCHITECTURES, Llama3Rope, load_spec
from tests.unit.model.random_checkpoints import CHECKPOINTS, random_model

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 3,
}


def write(folder, *, generation=None, **changes):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_parameters_are_counted_as_transformers_counts_them(case, tmp_path):
    reference = random_model(case)
    reference.config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((tmp_path / "config.json").read_text()), "architectures": [type(reference).__name__]})
    )
    spec = load_spec(tmp_path)
    assert spec.num_parameters == reference.num_parameters()
    decoder = Decoder(spec, dtype=torch.float32, device="meta")
    assert spec.num_parameters == sum(parameter.numel() for parameter in decoder.parameters())


def test_old_and_new_spelling_of_rope_mean_the_same(tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = load_spec(write(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling}))
    new = load_spec(write(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}))
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (5e5, Llama3Rope(8.0, 1.0, 4.0, 64))
    plain = load_spec(write(tmp_path, rope_theta=1e6, rope_scaling=None))
    assert (plain.rope_theta, plain.rope_scaling) == (1e6, None)


def test_end_tokens_are_joined_from_both_files(tmp_path):
    assert load_spec(write(tmp_path)).eos_token_ids == (3,)
    assert load_spec(write(tmp_path, generation={"eos_token_id": [5, 3, 1]})).eos_token_ids == (1, 3, 5)
    assert load_spec(write(tmp_path, eos_token_id=None, generation={})).eos_token_ids == ()


def test_defaults_are_those_of_the_family(tmp_path):
    qwen3 = load_spec(write(tmp_path))
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.tied_head) == (128, True, False, False)
    qwen2 = load_spec(write(tmp_path, architectures=["Qwen2ForCausalLM"], attention_bias=False))
    assert (qwen2.head_dim, qwen2.qk_norm, qwen2.qkv_bias, qwen2.output_bias) == (8, False, True, False)
    llama = load_spec(write(tmp_path, architectures=["LlamaForCausalLM"], num_key_value_heads=None))
    assert (llama.num_kv_heads, llama.qkv_bias, llama.mlp_bias) == (4, False, False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_sliding_window": True}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"partial_rotary_factor": 0.5}, "partial"),
    ],
)
def test_settings_that_would_be_disobeyed_are_refused(changes, named, tmp_path):
    with pytest.raises(CheckpointError, match=named):
        load_spec(write(tmp_path, **changes))


def test_an_unsupported_architecture_lists_the_supported_ones(tmp_path):
    with pytest.raises(CheckpointError, match="MambaForCausalLM") as error:
        load_spec(write(tmp_path, architectures=["MambaForCausalLM"]))
    assert all(name in str(error.value) for name in SUPPORTED_ARCHITECTURES)


def test_a_bad_config_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": ')
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        load_spec(tmp_path)
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({key: CONFIG[key] for key in CONFIG if key != "hidden_size"}))
    with pytest.raises(CheckpointError, match="hidden_size"):
        load_spec(tmp_path)
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_spec(tmp_path / "folder")


@pytest.mark.parametrize("value", ["x", 0, -1, 1.5, True, [], 10**12])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size"])
def test_a_size_that_no_model_has_is_named(key, value, tmp_path):
    if key == "head_dim" and value in (0, []):  # as missing: the family's default
        assert load_spec(write(tmp_path, head_dim=value)).head_dim > 0
        return
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is .*, expected a whole number from 1"):
        load_spec(write(tmp_path, **{key: value}))


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": "x"}, {"rope_theta": []}, {"rope_scaling": 5}, {"architectures": 5}, {"layer_types": 1}],
    ids=str,
)
def test_a_value_of_another_type_is_no_traceback(changes, tmp_path):
    with pytest.raises(CheckpointError, match="take config.json from the model's source"):
        load_spec(write(tmp_path, **changes))
