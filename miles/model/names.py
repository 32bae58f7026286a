"""The one map between Hugging Face parameter names and ours, used by load, checkpoint and export.

Ours fuse query, key, value and gate, up by rows, so a Hugging Face tensor is a range of rows of one of ours. The map
holds for anything with a parameter's shape: weights, float32 masters, Adam moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from miles.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class NameEntry:
    """Rows `start` to `stop - 1` of our parameter are the Hugging Face tensor; `num_rows` is what ours has in all."""

    hf_name: str
    name: str
    start: int
    stop: int
    num_rows: int


@cache
def name_table(spec: ModelSpec) -> tuple[NameEntry, ...]:
    """Every Hugging Face tensor of this model, in the order of its parameters and rows."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    entries = [NameEntry("model.embed_tokens.weight", "embedding.weight", 0, spec.vocab_size, spec.vocab_size)]
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        entries += _fused(f"{ours}.attention_norm", {f"{theirs}.input_layernorm": hidden})
        attention = f"{theirs}.self_attn"
        qkv = {f"{attention}.q_proj": q_rows, f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows}
        entries += _fused(f"{ours}.attention.qkv", qkv, bias=spec.qkv_bias)
        entries += _fused(f"{ours}.attention.output", {f"{attention}.o_proj": hidden}, bias=spec.output_bias)
        if spec.qk_norm:
            entries += _fused(f"{ours}.attention.q_norm", {f"{attention}.q_norm": spec.head_dim})
            entries += _fused(f"{ours}.attention.k_norm", {f"{attention}.k_norm": spec.head_dim})
        entries += _fused(f"{ours}.mlp_norm", {f"{theirs}.post_attention_layernorm": hidden})
        gate_up = {f"{theirs}.mlp.gate_proj": inner, f"{theirs}.mlp.up_proj": inner}
        entries += _fused(f"{ours}.mlp.gate_up", gate_up, bias=spec.mlp_bias)
        entries += _fused(f"{ours}.mlp.down", {f"{theirs}.mlp.down_proj": hidden}, bias=spec.mlp_bias)
    entries += _fused("norm", {"model.norm": hidden})
    if not spec.tied_head:
        entries += _fused("head", {"lm_head": spec.vocab_size})
    return tuple(entries)


def _fused(ours: str, rows_by_hf_module: dict[str, int], *, bias: bool = False) -> list[NameEntry]:
    num_rows = sum(rows_by_hf_module.values())
    entries = []
    for kind in ("weight", "bias") if bias else ("weight",):
        start = 0
        for hf_module, rows in rows_by_hf_module.items():
            entries.append(NameEntry(f"{hf_module}.{kind}", f"{ours}.{kind}", start, start + rows, num_rows))
            start += rows
    return entries


def to_hf(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of our tensors under Hugging Face names. `tensors` must hold every parameter of the decoder."""
    return {entry.hf_name: tensors[entry.name][entry.start : entry.stop] for entry in name_table(spec)}
