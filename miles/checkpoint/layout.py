"""Where things are in a checkpoint folder, and what makes one complete.

    ROOT/iter_0000012/model/                    Hugging Face folder with the float32 master weights; of LoRA only
                     /adapter/                  PEFT folder with the float32 adapters
                     /optimizer.safetensors     and further tensors, one file per kind
                     /state.json                counters, schedule, RNG; size and CRC-32 of every other file
        /latest_checkpointed_iteration.txt      `12`

A folder gets its name when everything in it is on disk, and the tracker file is written after that: whenever a
process is killed, the tracker names a complete checkpoint. Names that begin with `.tmp-` are leftovers of a kill;
`.tmp-replaced-iter_0000012-...` is a complete checkpoint that was being replaced by another of the same iteration.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles.errors import CheckpointError
from miles.observe.atomic import sync, write_atomically

TRACKER_NAME = "latest_checkpointed_iteration.txt"
STATE_NAME = "state.json"
MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"
FORMAT = 1

REPLACED = "replaced-"
REMOVED = "removed-"

_TEMPORARY_PREFIX = ".tmp-"
_NAME = re.compile(r"iter_(\d{7,})")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileMark:
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What `state.json` holds. `files` has paths relative to the checkpoint."""

    iteration: int
    files: dict[str, FileMark]
    state: dict[str, Any]


def checkpoint_path(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def temporary_path(root: Path, iteration: int, *, pid: int, what: str = "") -> Path:
    return root / f"{_TEMPORARY_PREFIX}{what}{checkpoint_path(root, iteration).name}-{pid}"


def leftovers(root: Path) -> list[Path]:
    """Folders of saves that were cut off."""
    return sorted(root.glob(_TEMPORARY_PREFIX + "*"))


def put_back_replaced(root: Path) -> list[Path]:
    """A kill between the two renames of a replacement leaves the old checkpoint under a temporary name: give it its
    own again. Returns what was put back."""
    done = []
    for path in root.glob(f"{_TEMPORARY_PREFIX}{REPLACED}iter_*"):
        target = root / path.name.removeprefix(_TEMPORARY_PREFIX + REPLACED).rpartition("-")[0]
        if not target.exists():
            path.rename(target)
            done.append(target)
    if done:
        sync(root)
    return done


def checkpoints(root: Path) -> dict[int, Path]:
    """The checkpoints of a folder by iteration, rising."""
    found = {int(match[1]): path for path in root.glob("iter_*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def read_tracker(root: Path) -> int | None:
    """The iteration to resume from; None when no save has ended here."""
    path = root / TRACKER_NAME
    if not path.exists():
        return None
    text = path.read_text(errors="replace").strip()
    if not text.isascii() or not text.isdigit():
        raise CheckpointError(f"{path}: expected the number of an iteration, found {text[:40]!r}; {go_back(root)}")
    return int(text)


def write_tracker(root: Path, iteration: int) -> None:
    write_atomically(root / TRACKER_NAME, f"{iteration}\n")


def mark_files(folder: Path) -> dict[str, FileMark]:
    """Size and checksum of every file below a folder."""
    return {str(path.relative_to(folder)): _mark(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    body = asdict(manifest)
    write_atomically(folder / STATE_NAME, json.dumps({"format": FORMAT, "crc32": _body_crc(body), **body}))


def read_manifest(folder: Path) -> Manifest:
    """`state.json`, checked against its own checksum. Raises `CheckpointError`."""
    path = folder / STATE_NAME
    try:
        content = json.loads(path.read_bytes())
        version, crc, body = content.pop("format"), content.pop("crc32"), content
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"it cannot be read ({type(error).__name__})") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path}: has format {version}, this version of Miles reads {FORMAT}; use the one that saved it"
        )
    if _body_crc(body) != crc:
        raise _damaged(path, "its checksum is wrong")
    if outside := [name for name in body["files"] if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise _damaged(path, f"it names {outside[0]!r}, which is not in the checkpoint")
    files = {name: FileMark(**mark) for name, mark in body["files"].items()}
    return Manifest(iteration=body["iteration"], files=files, state=body["state"])


def verify(folder: Path, manifest: Manifest) -> None:
    """Read every file and compare. Raises `CheckpointError` that names the first one that is missing or differs."""
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise _damaged(path, "it is missing")
        if path.stat().st_size != expected.bytes:
            raise _damaged(path, f"it has {path.stat().st_size} bytes, not {expected.bytes}")
        if _mark(path) != expected:
            raise _damaged(path, "its checksum is wrong")


def go_back(root: Path, *, bad: int | None = None) -> str:
    """What a user can do when the tracker leads nowhere."""
    others = [str(iteration) for iteration in checkpoints(root) if iteration != bad]
    if not others:
        return f"there is no other checkpoint in {root}: move the folder away to start fresh"
    return f"write one of these iterations into {root / TRACKER_NAME} to resume from it: {', '.join(others)}"


def _damaged(path: Path, what: str) -> CheckpointError:
    folder = next(parent for parent in path.parents if _NAME.fullmatch(parent.name))
    bad = int(folder.name.removeprefix("iter_"))
    return CheckpointError(f"checkpoint {folder} is damaged: {path}: {what}; {go_back(folder.parent, bad=bad)}")


def _mark(path: Path) -> FileMark:
    crc = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return FileMark(size, crc)


def _body_crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, allow_nan=False).encode())
