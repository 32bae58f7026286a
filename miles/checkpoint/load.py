"""Loads the checkpoint that a run resumes from. Nothing is unpickled: safetensors and JSON only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from miles.checkpoint import layout
from miles.errors import CheckpointError
from miles.observe.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """`iteration` rollouts were done. `tensors` are on the CPU, by file stem, as they were given to be saved."""

    path: Path
    iteration: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def load_checkpoint(root: Path) -> LoadedCheckpoint | None:
    """The checkpoint that the tracker of `root` names; None when nothing has been saved there.

    Folders that are passed over are named in the log. Raises `CheckpointError` when the checkpoint is missing or
    damaged: starting fresh, or from an older one, is for the user to decide.
    """
    for path in layout.put_back_replaced(root):
        logger.warning("%s: its replacement was cut off; it is back under its name", path)
    found = layout.checkpoints(root)
    for leftover in layout.leftovers(root):
        logger.warning("%s: skipped, its save was cut off; the next save removes it", leftover)
    iteration = layout.read_tracker(root)
    if iteration is None:
        if not found:
            return None
        # The very first save was cut off before it could write the tracker.
        iteration = max(found)
        logger.warning("%s has no %s; taking the newest checkpoint", root, layout.TRACKER_NAME)
    for newer in (path for other, path in found.items() if other > iteration):
        logger.warning("%s: skipped, its save was cut off before %s named it", newer, layout.TRACKER_NAME)
    path = layout.checkpoint_path(root, iteration)
    if iteration not in found:
        raise CheckpointError(
            f"{root / layout.TRACKER_NAME} says {iteration}, but {path} does not exist; {layout.go_back(root)}"
        )
    manifest = layout.read_manifest(path)
    layout.verify(path, manifest)
    return LoadedCheckpoint(path, manifest.iteration, _read_tensors(path, manifest), manifest.state)


def weights_folder(folder: Path, part: str = layout.MODEL_FOLDER) -> Path:
    """The model folder in a run folder, a folder of checkpoints (the one its tracker names) or one checkpoint; another
    folder is taken for a model folder. Raises `CheckpointError` when the checkpoint is damaged or lacks this `part`."""
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    iteration = layout.read_tracker(root)
    if iteration is not None:
        folder = layout.checkpoint_path(root, iteration)
    if not (folder / layout.STATE_NAME).is_file():
        return folder
    layout.verify(folder, layout.read_manifest(folder))
    if not (folder / part).is_dir():
        raise CheckpointError(
            f"{folder} has no {part}: a LoRA run saves its adapter only (--lora-adapter-path takes it, and "
            "`miles convert` merges it into the weights), another run its model only (--init-from takes it)"
        )
    return folder / part


def _read_tensors(folder: Path, manifest: layout.Manifest) -> dict[str, dict[str, Tensor]]:
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in manifest.files:
        path = Path(name)
        if path.suffix == ".safetensors":
            stem = path.stem if path.parent == Path() else path.parts[0]
            tensors.setdefault(stem, {}).update(load_file(folder / path))
    return tensors
