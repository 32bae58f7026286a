"""Saves a checkpoint so that a kill, a crash or a full disk at any moment leaves the previous one in place."""

from __future__ import annotations

import fcntl
import json
import os
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

from miles.checkpoint import layout
from miles.checkpoint.hf import export_hf
from miles.checkpoint.layout import Manifest
from miles.checkpoint.peft import export_adapter
from miles.config.lora_section import LoraConfig
from miles.errors import CheckpointError, StorageError
from miles.observe.atomic import sync

# Config, tokenizer and state files, and what a file system needs for itself.
_SPARE_BYTES = 4 << 20


def save_checkpoint(
    root: Path,
    iteration: int,
    *,
    tensors: Mapping[str, dict[str, Tensor]],
    state: dict[str, Any],
    model_source: Path,
    lora: LoraConfig | None = None,
) -> Path:
    """Save `tensors` by file stem and the JSON `state` as the checkpoint of `iteration` (rollouts done).

    `tensors["model"]` has Hugging Face names and becomes a folder that `transformers` loads; config and tokenizer come
    from `model_source`. In its place there can be `tensors["adapter"]`, with the PEFT names of `lora`. Everything is on
    disk on return. Raises `StorageError` when it cannot be written; the checkpoint before this one is then still the
    one to resume from.
    """
    temporary = layout.temporary_path(root, iteration, pid=os.getpid())
    try:
        root.mkdir(parents=True, exist_ok=True)
        layout.put_back_replaced(root)
        for leftover in layout.leftovers(root):
            shutil.rmtree(leftover)
        _check_space(root, tensors)
        temporary.mkdir()
        for stem, content in tensors.items():
            if stem == layout.MODEL_FOLDER:
                export_hf(temporary / stem, source=model_source, tensors=content, dtype=torch.float32)
            elif stem == layout.ADAPTER_FOLDER:
                assert lora is not None, "adapters have settings"
                export_adapter(temporary / stem, source=model_source, tensors=content, lora=lora)
            else:
                save_file(content, temporary / f"{stem}.safetensors")
        # As a load will see it: tuples become lists.
        plain_state = json.loads(json.dumps(state, allow_nan=False))
        manifest = Manifest(iteration=iteration, files=layout.mark_files(temporary), state=plain_state)
        layout.write_manifest(temporary, manifest)
        _sync_tree(temporary)
        return _publish(root, temporary, manifest)
    except (OSError, SafetensorError, StorageError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StorageError(
            f"{root}: cannot save the checkpoint of iteration {iteration}: {reason}; {_what_is_left(root)}"
        ) from error


def remove_checkpoint(root: Path, iteration: int) -> None:
    """Remove a checkpoint; a kill meanwhile leaves a leftover, never a part of one under its name."""
    doomed = layout.temporary_path(root, iteration, pid=os.getpid(), what=layout.REMOVED)
    layout.checkpoint_path(root, iteration).rename(doomed)
    shutil.rmtree(doomed)


@contextmanager
def saving_to(root: Path) -> Iterator[None]:
    """Make the folder of the checkpoints and keep other runs from saving there. Raises `StorageError` now if nothing
    can be written or another run is there: two would remove each other's unfinished saves."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            lock_fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(
            f"--save {root}: no checkpoint could be saved here: {error.strerror}; choose another folder or get the "
            "rights to it"
        ) from error
    try:
        _lock(lock_fd, root)
        yield
    finally:
        os.close(lock_fd)


def _lock(lock_fd: int, root: Path) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(
            f"--save {root}: another run is saving here; wait for it, stop it, or choose another folder"
        ) from error


def _check_space(root: Path, tensors: Mapping[str, dict[str, Tensor]]) -> None:
    needed = _SPARE_BYTES + sum(
        tensor.numel() * (4 if stem == layout.MODEL_FOLDER else tensor.element_size())
        for stem, content in tensors.items()
        for tensor in content.values()
    )
    free = shutil.disk_usage(root).free
    if free < needed:
        raise StorageError(f"it needs {needed:,} bytes and {free:,} are free")


def _what_is_left(root: Path) -> str:
    done = layout.read_tracker(root)
    kept = "nothing had been saved before" if done is None else f"the checkpoint of iteration {done} is intact"
    return f"{kept}. Free space or give another --save, then resume"


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def _publish(root: Path, temporary: Path, manifest: Manifest) -> Path:
    """Give the complete folder its name and write the tracker."""
    target = layout.checkpoint_path(root, manifest.iteration)
    replaced = layout.temporary_path(root, manifest.iteration, pid=os.getpid(), what=layout.REPLACED)
    if _is_saved(target, manifest):
        # Replacing it would leave a moment without the checkpoint that the tracker may name.
        shutil.rmtree(temporary)
    else:
        if target.exists():
            # A kill between these two renames is undone by `layout.put_back_replaced`.
            target.rename(replaced)
        temporary.rename(target)
        sync(root)
    layout.write_tracker(root, manifest.iteration)
    if replaced.exists():
        shutil.rmtree(replaced)
    return target


def _is_saved(target: Path, manifest: Manifest) -> bool:
    if not target.exists():
        return False
    try:
        layout.verify(target, manifest)
        return layout.read_manifest(target) == manifest
    except CheckpointError:
        return False
