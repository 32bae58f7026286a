"""Small random models of every supported family, made by transformers, which is the reference here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Name of the case -> family and what differs from _SIZES.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-llama3-rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6, "eos_token_id": 7}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-bias": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
}


def random_model(case: str) -> PreTrainedModel:
    """A float32 transformers model whose weights, norms and biases are all far from their initial values."""
    family, changes = CHECKPOINTS[case]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **changes})
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def write_checkpoint(case: str, folder: Path, **options: Any) -> PreTrainedModel:
    """Save the model of `case` in `folder` the way transformers does, and return it."""
    model = random_model(case)
    model.save_pretrained(folder, **options)
    return model
