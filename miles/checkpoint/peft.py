"""LoRA adapters in the form of the peft library: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles.checkpoint.hf import new_folder, write_json
from miles.config.lora_section import LoraConfig, module_names
from miles.errors import CheckpointError
from miles.model.decoder import Decoder
from miles.model.lora import PEFT_PREFIX, to_peft

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_A, _B = ".lora_A.weight", ".lora_B.weight"
# Of what peft can do besides, and what it is when it is not done.
_NOT_DONE = {"use_dora": False, "use_rslora": False, "bias": "none", "fan_in_fan_out": False, "modules_to_save": None}


def export_adapter(target: Path, *, source: Path, tensors: Mapping[str, Tensor], lora: LoraConfig) -> None:
    """Write `tensors` (PEFT names, any device) in float32 as the folder `target`, which appears when it is whole.
    `source` is the folder of the model that the adapter belongs to."""
    modules = [name.removesuffix(_A).removeprefix(PEFT_PREFIX) for name in tensors if name.endswith(_A)]
    patterns = module_names(lora.target_modules + lora.exclude_modules)
    if all(pattern.isidentifier() for pattern in patterns):  # the same in every layer
        modules = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source.absolute()),
        "r": lora.lora_rank,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": modules,
        "inference_mode": True,
        **_NOT_DONE,
    }
    with new_folder(target) as folder:
        write_json(folder / CONFIG_NAME, config)
        written = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
        save_file(written, folder / WEIGHTS_NAME, metadata={"format": "pt"})


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and tensors of an adapter folder. `CheckpointError` when it is damaged or of a kind that is not
    computed here."""
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        tensors = load_file(folder / WEIGHTS_NAME)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} is not a whole PEFT adapter ({type(error).__name__}: {error}); expected {CONFIG_NAME} with r "
            f"and lora_alpha, and {WEIGHTS_NAME}"
        ) from None
    given = {name: config.get(name, normal) for name, normal in _NOT_DONE.items()}
    found = [f"{name} {value}" for name, value in given.items() if value and value != _NOT_DONE[name]]
    found += [name for name in ("rank_pattern", "alpha_pattern") if config.get(name)]
    found += [name for name in tensors if not name.startswith(PEFT_PREFIX) or not name.endswith((_A, _B))][:1]
    if found or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder}: only plain LoRA is done here, not {', '.join(found) or 'this peft_type'}")
    return {"r": rank, "lora_alpha": alpha, "base": config.get("base_model_name_or_path")}, tensors


@torch.no_grad()
def load_adapter(model: Decoder, folder: Path) -> None:
    """Copy an adapter into those of `model`. `CheckpointError` names the flags that the folder does not agree with."""
    assert model.lora is not None, "the model has no adapters"
    config, tensors = read_adapter(folder)
    if (config["r"], config["lora_alpha"]) != (model.lora.lora_rank, model.lora.lora_alpha):
        raise CheckpointError(
            f"--lora-adapter-path {folder} was made with --lora-rank {config['r']} --lora-alpha "
            f"{config['lora_alpha']:g}, asked for are {model.lora.lora_rank} and {model.lora.lora_alpha:g}"
        )
    live = to_peft(model, dict(model.named_parameters()))
    if odd := sorted(live.keys() ^ tensors.keys()):
        more, less = ("has", "do not ask") if odd[0] in tensors else ("lacks", "ask")
        raise CheckpointError(
            f"--lora-adapter-path {folder} {more} {odd[0]}, for which --target-modules and --exclude-modules {less}: "
            "name the modules that the adapter has"
        )
    for name, target in live.items():
        if target.shape != tensors[name].shape:
            raise CheckpointError(
                f"--lora-adapter-path {folder}: {name} has shape {tuple(tensors[name].shape)} and this model needs "
                f"{tuple(target.shape)}: it is the adapter of another model"
            )
        target.copy_(tensors[name])


def merge_adapter(weights: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The weights of a model, by Hugging Face names, with what the adapter adds, in float32 where it adds something."""
    config, tensors = read_adapter(folder)
    merged = dict(weights)
    for name in (name for name in tensors if name.endswith(_A)):
        stem = name.removesuffix(_A)
        target, a, b = stem.removeprefix(PEFT_PREFIX) + ".weight", tensors[name].float(), tensors.get(stem + _B)
        if b is None or target not in weights or weights[target].shape != (b.shape[0], a.shape[1]):
            raise CheckpointError(f"{folder}: {stem} does not fit the model; --origin-hf-dir must name its own")
        merged[target] = weights[target].float() + config["lora_alpha"] / config["r"] * (b.float() @ a)
    return merged
