"""Saves while training goes on: the state is copied first, which takes a fraction of the time that writing takes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from miles.checkpoint.keep import NOTE, Keep, prune
from miles.checkpoint.save import save_checkpoint
from miles.config.lora_section import LoraConfig
from miles.observe.log import get_logger

# Free memory that a copy of the state must leave, as a multiple of the copy: writing takes memory too.
_HEADROOM = 2.0

logger = get_logger(__name__)


@dataclass(frozen=True)
class Saved:
    path: Path
    iteration: int
    removed: list[int]  # older checkpoints that went
    is_temporary: bool


class Saver:
    """Saves checkpoints below `root`, one at a time, and removes those that `keep` lets go.

    With `background` a save returns once the state is copied. What became of it is said by `finished` and `wait`,
    which raise the `StorageError` of a save that failed. Belongs to one thread.
    """

    def __init__(
        self, root: Path, *, model_source: Path, keep: Keep, background: bool, lora: LoraConfig | None = None
    ) -> None:
        self._root = root
        self._model_source, self._lora = model_source, lora
        self._keep = keep
        self._background = background
        self._thread: threading.Thread | None = None
        self._saved: list[Saved] = []
        self._error: Exception | None = None

    def save(self, iteration: int, *, tensors: Mapping[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Save, or begin to once the save before has ended. The tensors may change when this returns."""
        self._join()
        if not self._background or not _fits(tensors):
            self._saved.append(self._write(iteration, tensors, state))
            return
        copies = {
            stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in content.items()}
            for stem, content in tensors.items()
        }
        self._thread = threading.Thread(target=self._run, args=(iteration, copies, state), name="checkpoint")
        self._thread.start()

    def finished(self) -> list[Saved]:
        """The saves that have ended since the last call. Does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self._join()
        return self._take()

    def wait(self) -> list[Saved]:
        """The same once no save is running."""
        self._join()
        return self._take()

    def close(self) -> None:
        """Let a running save end; it is on disk or its error is in the log."""
        if (error := self._ended()) is not None:
            logger.error("%s", error)

    def _run(self, iteration: int, tensors: Mapping[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        try:
            saved = self._write(iteration, tensors, state)
            self._saved.append(saved)
        except Exception as error:  # fault boundary of the thread: raised again in the thread of the run
            self._error = error

    def _write(self, iteration: int, tensors: Mapping[str, dict[str, Tensor]], state: dict[str, Any]) -> Saved:
        path = save_checkpoint(
            self._root, iteration, tensors=tensors, state=state, model_source=self._model_source, lora=self._lora
        )
        is_temporary = bool(state.get(NOTE, {}).get("temporary"))
        return Saved(path, iteration, prune(self._root, self._keep), is_temporary)

    def _join(self) -> None:
        if (error := self._ended()) is not None:
            raise error

    def _ended(self) -> Exception | None:
        """The error of a save, once it has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _take(self) -> list[Saved]:
        saved, self._saved = self._saved, []
        return saved


def _fits(tensors: Mapping[str, dict[str, Tensor]]) -> bool:
    """Whether the machine has room for a copy. Without it, saving before going on is slower and safe."""
    needed = sum(tensor.numel() * tensor.element_size() for content in tensors.values() for tensor in content.values())
    free = psutil.virtual_memory().available
    if free < _HEADROOM * needed:
        logger.warning(
            f"--async-save: a copy of the state takes {needed / 2**30:.1f} GB and {free / 2**30:.1f} GB of memory are "
            "free; saving before going on"
        )
        return False
    return True
