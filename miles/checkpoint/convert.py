"""A checkpoint of a run as a Hugging Face folder for serving, in another dtype if asked for.

The adapter of a LoRA run is added to the weights that it was trained for, or becomes a PEFT folder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from miles.checkpoint import layout
from miles.checkpoint.hf import export_hf, new_folder
from miles.checkpoint.load import weights_folder
from miles.checkpoint.peft import CONFIG_NAME, merge_adapter, read_adapter
from miles.errors import CheckpointError
from miles.model.load import weight_files
from miles.model.spec import load_spec


def convert_checkpoint(source: Path, target: Path, *, origin: Path | None = None, dtype: str | None = None) -> None:
    """Write the weights of `source`, an `iter_...` folder, a model folder or a PEFT adapter, as the model folder
    `target`.

    Config and tokenizer come from `origin`, which must have the same architecture, or from the checkpoint itself; the
    weights under an adapter come from `origin` too, or from the folder that the adapter names. `dtype` None keeps what
    the config of `origin` says. Raises `CheckpointError` when something is missing or damaged.
    """
    if (source / layout.STATE_NAME).is_file():
        layout.verify(source, layout.read_manifest(source))
        has_adapter = (source / layout.ADAPTER_FOLDER).is_dir()
        source = source / (layout.ADAPTER_FOLDER if has_adapter else layout.MODEL_FOLDER)
    elif found := layout.checkpoints(source) or layout.checkpoints(source / "checkpoints"):
        newest = found[max(found)]
        raise CheckpointError(f"--input-dir {source} holds several checkpoints; name one of them, such as {newest}")
    adapter = source if (source / CONFIG_NAME).is_file() else None
    if adapter is not None:
        source = origin = origin or Path(read_adapter(adapter)[0]["base"] or "")
        if not (source / "config.json").is_file():
            raise CheckpointError(
                f"the model that {adapter} was made for is not in {source}; give --origin-hf-dir, its folder"
            )
    origin = origin or source
    ours, theirs = load_spec(source), load_spec(origin)
    if ours.num_parameters != theirs.num_parameters or ours.architecture != theirs.architecture:
        raise CheckpointError(
            f"--origin-hf-dir {origin} is a {theirs.architecture} of {theirs.num_parameters} parameters, the weights "
            f"in {source} are a {ours.architecture} of {ours.num_parameters}; take the folder that the run started from"
        )
    tensors = {name: tensor for path in weight_files(source) for name, tensor in load_file(path).items()}
    if adapter is not None:
        tensors = merge_adapter(tensors, adapter)
    export_hf(target, source=origin, tensors=tensors, dtype=getattr(torch, dtype or _config_dtype(origin)))


def convert_adapter(source: Path, target: Path) -> None:
    """Write the adapter of `source`, an `iter_...` folder of a LoRA run, as the PEFT folder `target`."""
    adapter = weights_folder(source, layout.ADAPTER_FOLDER)
    with new_folder(target) as folder:
        read_adapter(adapter)
        shutil.copytree(adapter, folder, dirs_exist_ok=True)


def _config_dtype(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
