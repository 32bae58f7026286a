"""Which checkpoints stay: the newest, the last n, the best k by evaluation. The others are removed after each save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.checkpoint import layout
from miles.checkpoint.save import remove_checkpoint
from miles.errors import CheckpointError, StorageError

NOTE = "note"  # key of the state of a checkpoint


@dataclass(frozen=True)
class Note:
    """What pruning needs to know of a checkpoint. `temporary`: made only for repair, so it goes once a newer one is
    there. `score`: mean of its evaluation sets, None when it was not evaluated."""

    temporary: bool = False
    score: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {"temporary": self.temporary, "score": self.score}


@dataclass(frozen=True)
class Keep:
    """`last` and `best` None: keep all that are not temporary."""

    last: int | None = None
    best: int | None = None


def to_remove(notes: Mapping[int, Note], keep: Keep) -> list[int]:
    """The iterations that may go, rising. The newest always stays; of equal scores the later one is better."""
    if not notes:
        return []
    lasting = sorted(iteration for iteration, note in notes.items() if not note.temporary)
    kept = {max(notes)}
    if keep.last is None and keep.best is None:
        kept |= set(lasting)
    if keep.last is not None:
        kept |= set(lasting[-keep.last :])
    if keep.best is not None:
        scored = sorted(
            (note.score, iteration) for iteration in lasting if (note := notes[iteration]).score is not None
        )
        kept |= {iteration for _, iteration in scored[-keep.best :]}
    return sorted(set(notes) - kept)


def prune(root: Path, keep: Keep) -> list[int]:
    """Remove what `keep` lets go and return it. A checkpoint that cannot be read, or is newer than the tracker says,
    is left alone. Raises `StorageError` when removing fails."""
    tracked = layout.read_tracker(root)
    notes = {
        iteration: note
        for iteration, path in layout.checkpoints(root).items()
        if tracked is not None and iteration <= tracked and (note := read_note(path)) is not None
    }
    removed = [iteration for iteration in to_remove(notes, keep) if iteration != tracked]
    for iteration in removed:
        try:
            remove_checkpoint(root, iteration)
        except OSError as error:
            path = layout.checkpoint_path(root, iteration)
            raise StorageError(f"{path}: cannot remove the old checkpoint: {error.strerror}; get the rights") from error
    return removed


def read_note(folder: Path) -> Note | None:
    """The note of a checkpoint; None when `state.json` is damaged."""
    try:
        note = layout.read_manifest(folder).state.get(NOTE, {})
    except CheckpointError:
        return None
    score = note.get("score")
    return Note(bool(note.get("temporary")), None if score is None else float(score))
