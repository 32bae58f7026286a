"""A model folder with random weights, as every library reads it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config

from benchmarks.recipe import random_model, spec_of
from miles.model.names import to_hf


def write_model_folder(folder: Path, shape: str, *, dtype: torch.dtype, device: str) -> None:
    """Config, weights, and a tokenizer in which the text "t17" is token 17."""
    spec = spec_of(shape)
    end, pad = spec.vocab_size - 291, spec.vocab_size - 293
    Qwen3Config(
        architectures=[spec.architecture],
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied_head,
        attention_bias=False,
        bos_token_id=pad,
        eos_token_id=end,
        pad_token_id=pad,
        dtype=str(dtype).removeprefix("torch."),
    ).save_pretrained(folder)
    model = random_model(shape, dtype=dtype, device=device)
    tensors = to_hf(spec, {name: parameter.detach() for name, parameter in model.named_parameters()})
    cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(cpu, folder / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(spec.vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=f"t{end}", pad_token=f"t{pad}", unk_token="t0"
    ).save_pretrained(folder)


@contextmanager
def model_for_peers(arguments: argparse.Namespace, dtype: torch.dtype) -> Iterator[tuple[Path, Path]]:
    """A folder for what the processes of a benchmark print and find (`--logs`, else one that goes), and a model folder
    of `--shape` that goes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, model = arguments.logs or Path(scratch), Path(scratch) / "model"
        folder.mkdir(parents=True, exist_ok=True)
        write_model_folder(model, arguments.shape, dtype=dtype, device=arguments.device)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        yield folder, model
