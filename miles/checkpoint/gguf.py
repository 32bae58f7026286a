"""A GGUF file into a Hugging Face folder: weights, config, tokenizer and chat template.

Covers files of the Llama architecture with a byte-level BPE tokenizer, whatever the quantisation. What splits a text
before BPE is given in the metadata by name only, and a wrong guess changes ids: unknown names are refused.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers import decoders as token_decoders
from tokenizers import pre_tokenizers as splitters
from tokenizers.models import BPE

from miles.errors import CheckpointError, StorageError

Array = np.ndarray[Any, np.dtype[np.float32]]

_ARCHITECTURE = "llama"
_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # values of tokenizer.ggml.token_type
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _byte_level() -> splitters.PreTokenizer:
    return splitters.ByteLevel(add_prefix_space=False)


# What `tokenizer.ggml.pre` means.
_PRE_TOKENIZERS = {
    "gpt-2": _byte_level,
    "smollm": lambda: splitters.Sequence([splitters.Digits(individual_digits=True), _byte_level()]),
}


@dataclass(frozen=True, slots=True)
class _GgufFile:
    path: Path
    fields: dict[str, Any]
    tensors: list[gguf.ReaderTensor]

    def field(self, key: str) -> Any:
        if key not in self.fields:
            raise CheckpointError(f"{self.path}: the metadata key {key!r} is missing; this file cannot be converted")
        return self.fields[key]


def convert_gguf(gguf_file: Path, target: Path) -> None:
    """Write the model in `gguf_file` as the Hugging Face folder `target`, weights in float32 (so nothing is rounded).

    The folder appears under its name only when it is whole. Raises `CheckpointError` when the file is damaged or of
    an unsupported kind, or when `target` exists with something in it, `StorageError` when writing fails.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty; move it away or choose another folder")
    source = _open(gguf_file)
    tensors = _tensors(source)
    config = _config(source, tied_head="lm_head.weight" not in tensors)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            folder = Path(scratch) / target.name
            folder.mkdir()
            _write_json(folder / "config.json", config)
            _write_json(folder / "generation_config.json", _token_ids(source))
            _write_tokenizer(source, folder)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            folder.replace(target)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write the model folder {target}: {error}; nothing is left of it") from error


def _open(path: Path) -> _GgufFile:
    if not path.is_file():
        raise CheckpointError(f"the GGUF file {path} does not exist")
    try:
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete GGUF file ({error}); download it again") from None
    file = _GgufFile(path, fields, reader.tensors)
    architecture = file.field("general.architecture")
    if architecture != _ARCHITECTURE:
        raise CheckpointError(
            f"{path}: GGUF architecture {architecture!r} is not supported; supported: {_ARCHITECTURE}"
        )
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise CheckpointError(f"{path}: GGUF files with a scaled rotary embedding are not supported")
    return file


def _tensors(source: _GgufFile) -> dict[str, Array]:
    num_heads, num_kv_heads = source.field("llama.attention.head_count"), source.field("llama.attention.head_count_kv")
    heads_of = {"attn_q": num_heads, "attn_k": num_kv_heads}
    tensors = {}
    for tensor in source.tensors:
        parts = tensor.name.split(".")
        if parts[0] == "blk" and len(parts) == 4 and parts[2] in _BLOCK_NAMES:
            module = f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}"
        elif len(parts) == 2 and parts[0] in _TOP_NAMES:
            module = _TOP_NAMES[parts[0]]
        else:
            raise CheckpointError(f"{source.path}: tensor {tensor.name!r} has no place in a Llama model")
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if parts[-2] in heads_of:
            weight = _paired_halves(weight, num_heads=heads_of[parts[-2]])
        tensors[f"{module}.{parts[-1]}"] = np.ascontiguousarray(weight, dtype=np.float32)
    return tensors


def _paired_halves(weight: Array, *, num_heads: int) -> Array:
    """Rows of queries or keys from GGUF's order, where rotary pairs are neighbours, to pairs half a head apart."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _config(source: _GgufFile, *, tied_head: bool) -> dict[str, Any]:
    hidden_size, num_heads = source.field("llama.embedding_length"), source.field("llama.attention.head_count")
    head_dim = source.fields.get("llama.attention.key_length", hidden_size // num_heads)
    if source.fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{source.path}: a partial rotary embedding is not supported")
    # Stored as float32: its shortest decimal form is the number that the authors wrote.
    norm_eps = float(str(np.float32(source.field("llama.attention.layer_norm_rms_epsilon"))))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(source.field("tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": source.field("llama.feed_forward_length"),
        "num_hidden_layers": source.field("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": source.field("llama.attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": norm_eps,
        "rope_theta": float(source.fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "max_position_embeddings": source.field("llama.context_length"),
        "tie_word_embeddings": tied_head,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **_token_ids(source),
    }


def _token_ids(source: _GgufFile) -> dict[str, int]:
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    ids = {ours: source.fields.get(f"tokenizer.ggml.{theirs}") for ours, theirs in keys.items()}
    return {key: int(value) for key, value in ids.items() if value is not None}


def _write_tokenizer(source: _GgufFile, folder: Path) -> None:
    tokens: list[str] = source.field("tokenizer.ggml.tokens")
    pre = source.field("tokenizer.ggml.pre")
    if source.field("tokenizer.ggml.model") != "gpt2" or source.fields.get("tokenizer.ggml.add_bos_token", False):
        raise CheckpointError(f"{source.path}: only byte-level BPE tokenizers that add no start token are supported")
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{source.path}: it is not known how the pre-tokenizer {pre!r} splits a text; "
            f"known: {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [tuple(pair.split(" ")) for pair in source.field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = token_decoders.ByteLevel()
    added = {
        id: AddedToken(tokens[id], special=kind == _CONTROL_TOKEN, normalized=False)
        for id, kind in enumerate(source.field("tokenizer.ggml.token_type"))
        if kind in (_CONTROL_TOKEN, _USER_TOKEN)
    }
    tokenizer.add_tokens(list(added.values()))
    tokenizer.save(str(folder / "tokenizer.json"))

    ids = {**_token_ids(source), "unk_token_id": source.fields.get("tokenizer.ggml.unknown_token_id")}
    named = {key.removesuffix("_id"): tokens[id] for key, id in ids.items() if id is not None}
    _write_json(folder / "special_tokens_map.json", named)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(id): _token_record(token) for id, token in added.items()},
        **named,
        "model_max_length": source.field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in source.fields:
        config["chat_template"] = source.fields["tokenizer.chat_template"]
    _write_json(folder / "tokenizer_config.json", config)


def _token_record(token: AddedToken) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": token.content, **flags, "special": token.special}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
