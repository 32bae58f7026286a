"""A checkpoint of a run as a Hugging Face folder for serving, in another dtype if asked for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from miles.checkpoint import layout
from miles.checkpoint.hf import export_hf
from miles.errors import CheckpointError
from miles.model.load import weight_files
from miles.model.spec import load_spec


def convert_checkpoint(source: Path, target: Path, *, origin: Path | None = None, dtype: str | None = None) -> None:
    """Write the weights of `source`, an `iter_...` folder or a model folder, as the model folder `target`.

    Config and tokenizer come from `origin`, which must have the same architecture, or from the checkpoint itself.
    `dtype` None keeps what the config of `origin` says. Raises `CheckpointError` when something is missing or damaged.
    """
    if (source / layout.STATE_NAME).is_file():
        layout.verify(source, layout.read_manifest(source))
        source = source / layout.MODEL_FOLDER
    elif layout.checkpoints(source):
        newest = max(layout.checkpoints(source).values())
        raise CheckpointError(f"--input-dir {source} holds several checkpoints; name one of them, such as {newest}")
    origin = origin or source
    ours, theirs = load_spec(source), load_spec(origin)
    if ours.num_parameters != theirs.num_parameters or ours.architecture != theirs.architecture:
        raise CheckpointError(
            f"--origin-hf-dir {origin} is a {theirs.architecture} of {theirs.num_parameters} parameters, the weights "
            f"in {source} are a {ours.architecture} of {ours.num_parameters}; take the folder that the run started from"
        )
    tensors = {name: tensor for path in weight_files(source) for name, tensor in load_file(path).items()}
    export_hf(target, source=origin, tensors=tensors, dtype=getattr(torch, dtype or _config_dtype(origin)))


def _config_dtype(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
