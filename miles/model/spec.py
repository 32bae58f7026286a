"""What a published config file says about a decoder. Reads the file itself, so that no library decides the defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.errors import CheckpointError

MAX_COUNT = 2**27  # of layers, tokens or numbers in a row: beyond what any model has
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's stretch of the rotary embedding; see `ops/rope.py: llama3_frequencies`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that fixes the decoder's shape and arithmetic. `eos_token_ids` joins config and generation config."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    max_position_embeddings: int
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...] = ()

    @property
    def qkv_size(self) -> int:
        """Rows of the fused projection: queries, then keys, then values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_layer_matrix_parameters(self) -> int:
        """Entries of the matrices of one layer: what every token is multiplied with."""
        attention = self.hidden_size * (self.qkv_size + self.num_heads * self.head_dim)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied head is counted once."""
        biases = self.qkv_bias * self.qkv_size + self.output_bias * self.hidden_size
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        layers = self.num_layers * (self.num_layer_matrix_parameters + biases + norms)
        num_vocab_matrices = 1 if self.tied_head else 2
        return layers + self.hidden_size + num_vocab_matrices * self.vocab_size * self.hidden_size

    def context_len(self, wanted: int | None) -> int:
        """Tokens of prompt and answer together: what was asked for, and never more than the model's positions."""
        return min(wanted or self.max_position_embeddings, self.max_position_embeddings)


def load_spec(folder: Path) -> ModelSpec:
    """Read `config.json` (and `generation_config.json` for end tokens). Raises `CheckpointError` when the folder is
    not a model or asks for something this decoder does not do."""
    path = folder / "config.json"
    config = _read_json(path)
    try:
        _refuse_unsupported(path, config)
        return _spec_from_config(path, config)
    except KeyError as error:
        raise CheckpointError(f"{path}: the key {error} is missing; take config.json from the model's source") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; take config.json from the model's source") from None


def _spec_from_config(path: Path, config: dict[str, Any]) -> ModelSpec:
    architecture = config["architectures"][0]
    is_qwen2, is_qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"

    def count(name: str, default: int | None = None) -> int:
        value = config[name] if default is None else config.get(name) or default
        if type(value) is not int or not 0 < value < MAX_COUNT:
            raise ValueError(f"{name} is {value!r:.80}, expected a whole number from 1 to below {MAX_COUNT:,}")
        return value

    num_heads, hidden_size = count("num_attention_heads"), count("hidden_size")
    theta, scaling = _rope(path, config)
    attention_bias = not is_qwen2 and config.get("attention_bias", False)
    return ModelSpec(
        architecture=architecture,
        vocab_size=count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count("intermediate_size"),
        num_layers=count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=count("num_key_value_heads", num_heads),
        head_dim=count("head_dim", 128 if is_qwen3 else hidden_size // num_heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=count("max_position_embeddings"),
        tied_head=config.get("tie_word_embeddings", False),
        qkv_bias=is_qwen2 or attention_bias,
        output_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and config.get("mlp_bias", False),
        qk_norm=is_qwen3,
        eos_token_ids=_eos_token_ids(path.parent, config),
    )


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    # Two spellings exist: `rope_theta` beside `rope_scaling`, and since transformers 5 both in `rope_parameters`.
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(f"{path}: rotary embedding of type {kind!r} is not supported; supported: default, llama3")
    scaling = Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_max_position_embeddings"]),
    )
    return theta, scaling


def _refuse_unsupported(path: Path, config: dict[str, Any]) -> None:
    architectures = config.get("architectures") or ["(none named)"]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        own_code = "; it needs code of its own (auto_map), which is never run here" if "auto_map" in config else ""
        raise CheckpointError(
            f"{path}: architecture {architectures[0]} is not supported{own_code}; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    layer_types = set(config.get("layer_types") or ())
    rope = {**config, **(config.get("rope_parameters") or {})}
    reasons = {
        "sliding-window attention": config.get("use_sliding_window", False) or layer_types - {"full_attention"},
        "quantised weights (quantization_config)": config.get("quantization_config"),
        f"activation {config.get('hidden_act')!r} (only silu)": config.get("hidden_act", "silu") != "silu",
        "a partial rotary embedding": rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    found = [what for what, is_set in reasons.items() if is_set]
    if found:
        raise CheckpointError(f"{path}: not supported: {'; '.join(found)}")


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    sources = [config] + ([_read_json(generation)] if generation.is_file() else [])
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        ids.update([] if value is None else [value] if isinstance(value, int) else value)
    return tuple(sorted(ids))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointError(f"{path} does not exist; expected a Hugging Face model folder with {path.name}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content
