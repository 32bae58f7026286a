"""Writes small GGUF files from transformers models, with the row order that GGUF gives to queries and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.unit.checkpoint.reference_bpe import byte_letters

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("1", "2"), ("a", "b"), ("Ġ", "a"), ("Ġ", "Ġ"), ("ab", "c"), ("12", "3"), ("Ġ", "1")]
TOKENS = [*SPECIAL, *byte_letters().values(), *("".join(pair) for pair in MERGES)]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"

_HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama(*, tied: bool) -> LlamaForCausalLM:
    """A random float32 Llama of two layers, with the vocabulary of `TOKENS`."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
            tie_word_embeddings=tied,
        )
    ).eval()


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    pre: str = "smollm",
    architecture: str = "llama",
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    eight_bit: tuple[str, ...] = (),
) -> None:
    """A GGUF file of a Llama model in float32, with a tokenizer of `TOKENS` and `MERGES`. The tensors `eight_bit` (GGUF
    names) are quantised."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    parameters = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    tensors = {gguf_name(name): _rows(name, tensor, config) for name, tensor in parameters.items()} | (extra or {})
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if name in eight_bit else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(hf_name: str) -> str:
    module, kind = hf_name.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{_HF_TO_GGUF[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_HF_TO_GGUF[part]}.{kind}"


def _rows(hf_name: str, tensor: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = hf_name.split(".")[-2]
    if part not in heads:
        return tensor
    # row i and row i + H/2 of each head become neighbours
    half = config.head_dim // 2
    order = [h * 2 * half + i + side * half for h in range(heads[part]) for i in range(half) for side in (0, 1)]
    return np.ascontiguousarray(tensor[order])
