"""Write a model in the published Hugging Face form, so that other programs load it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from miles.errors import CheckpointError, StorageError

MAX_SHARD_BYTES = 5 * 10**9

# Everything besides config and weights that belongs to a model folder.
_COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def export_hf(
    target: Path,
    *,
    source: Path,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `tensors` (Hugging Face names, any device and dtype) as the model folder `target`, converted to `dtype`.

    Config, tokenizer and chat template come from the model folder `source`. The folder appears under its name only
    when it is whole; an earlier export there is replaced. Raises `CheckpointError` when `target` holds something that
    is not a model, `StorageError` when writing fails.
    """
    with new_folder(target) as folder:
        _write_config(folder, source, dtype)
        for name in _COPIED_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        _write_weights(folder, tensors, dtype, max_shard_bytes)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder that gets the name `target`, in the place of an earlier export there, when all went well."""
    check_export_target(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            folder = Path(scratch) / "new"
            folder.mkdir()
            yield folder
            if target.exists():
                target.rename(Path(scratch) / "old")
            folder.rename(target)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write the model folder {target}: {error}; nothing is left of it") from error


def check_export_target(target: Path) -> None:
    """Raise `CheckpointError` when `target` holds something that is not a model: an export would destroy it."""
    is_export = any((target / name).is_file() for name in ("config.json", "adapter_config.json"))
    if target.exists() and not is_export and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not a model folder; choose another folder for the export")


def _write_config(folder: Path, source: Path, dtype: torch.dtype) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # transformers 5 writes `dtype`, older versions `torch_dtype`; both are still read.
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)


def _write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, max_shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * dtype.itemsize
        if shards[-1] and shard_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += num_bytes

    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file_name = f"model{suffix}.safetensors"
        shard = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name in names}
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file_name))
    if len(shards) > 1:
        total_bytes = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
