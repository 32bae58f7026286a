"""Shapes of published models, so that a run can be planned before its model is there."""

from __future__ import annotations

from pathlib import Path

from miles.config.flags import closest
from miles.errors import CheckpointError
from miles.model.spec import ModelSpec, load_spec

QWEN3, QWEN2, LLAMA = "Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"
# hidden, feed-forward, layers, query heads, key/value heads, head size, vocabulary, tied head, positions
_SHAPES = {
    "SmolLM2-135M": (LLAMA, 576, 1536, 30, 9, 3, 64, 49_152, True, 8192),
    "SmolLM2-360M": (LLAMA, 960, 2560, 32, 15, 5, 64, 49_152, True, 8192),
    "Qwen2.5-0.5B": (QWEN2, 896, 4864, 24, 14, 2, 64, 151_936, True, 32_768),
    "Qwen3-0.6B": (QWEN3, 1024, 3072, 28, 16, 8, 128, 151_936, True, 40_960),
    "Llama-3.2-1B": (LLAMA, 2048, 8192, 16, 32, 8, 64, 128_256, True, 131_072),
    "Qwen2.5-1.5B": (QWEN2, 1536, 8960, 28, 12, 2, 128, 151_936, True, 32_768),
    "SmolLM2-1.7B": (LLAMA, 2048, 8192, 24, 32, 32, 64, 49_152, True, 8192),
    "Qwen3-1.7B": (QWEN3, 2048, 6144, 28, 16, 8, 128, 151_936, True, 40_960),
    "Qwen2.5-3B": (QWEN2, 2048, 11_008, 36, 16, 2, 128, 151_936, True, 32_768),
    "Llama-3.2-3B": (LLAMA, 3072, 8192, 28, 24, 8, 128, 128_256, True, 131_072),
    "Qwen3-4B": (QWEN3, 2560, 9728, 36, 32, 8, 128, 151_936, True, 40_960),
    "Qwen2.5-7B": (QWEN2, 3584, 18_944, 28, 28, 4, 128, 152_064, False, 32_768),
    "Llama-3.1-8B": (LLAMA, 4096, 14_336, 32, 32, 8, 128, 128_256, False, 131_072),
    "Qwen3-8B": (QWEN3, 4096, 12_288, 36, 32, 8, 128, 151_936, False, 40_960),
    "Qwen3-14B": (QWEN3, 5120, 17_408, 40, 40, 8, 128, 151_936, False, 40_960),
    "Qwen2.5-14B": (QWEN2, 5120, 13_824, 48, 40, 8, 128, 152_064, False, 32_768),
    "Qwen3-32B": (QWEN3, 5120, 25_600, 64, 64, 8, 128, 151_936, False, 40_960),
}


def _spec(
    architecture: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
    tied: bool, positions: int,
) -> ModelSpec:  # fmt: skip
    return ModelSpec(
        architecture=architecture, vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, norm_eps=1e-6, rope_theta=1e6, rope_scaling=None,
        max_position_embeddings=positions, tied_head=tied, qkv_bias=architecture == QWEN2, output_bias=False,
        mlp_bias=False, qk_norm=architecture == QWEN3,
    )  # fmt: skip


SHAPES = {name: _spec(*numbers) for name, numbers in _SHAPES.items()}


def find_spec(name: str) -> ModelSpec:
    """The shape of a model folder, or the one that the last part of a hub name says. Raises `CheckpointError`."""
    if Path(name).is_dir():
        return load_spec(Path(name))
    wanted = name.rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-base")
    known = {shape.lower(): spec for shape, spec in SHAPES.items()}
    if wanted not in known:
        raise CheckpointError(
            f"--hf-checkpoint {name}: no such folder, and no shape is known by this name{closest(wanted, known)}; give "
            f"a folder with the model's config.json, or one of {', '.join(SHAPES)}"
        )
    return known[wanted]
