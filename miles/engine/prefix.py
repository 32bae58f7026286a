"""Finds cache blocks that already hold the keys and values of a prompt's beginning."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np


class PrefixIndex:
    """Maps a chain of block digests to cache blocks.

    The digest of a block covers the weight version and every token up to its end, so equal digests mean equal keys and
    values. The last, not full block of a prompt has an entry too: it serves prompts that are equal to the end.
    """

    def __init__(self, *, num_blocks: int, page_size: int) -> None:
        self.full = np.zeros(num_blocks, dtype=bool)  # blocks with an entry for all their tokens: not to be written
        self._page_size = page_size
        self._root = _digest(b"", np.zeros(1, dtype=np.int64))
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, list[bytes]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def match(self, ids: np.ndarray) -> tuple[list[int], int]:
        """The blocks that hold a beginning of `ids`, and how many tokens that is."""
        blocks: list[int] = []
        for digest, num_tokens in self._chain(ids):
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
            if num_tokens == len(ids):
                return blocks, num_tokens
        return blocks, len(blocks) * self._page_size

    def insert(self, ids: np.ndarray, blocks: np.ndarray) -> None:
        """Remember that `blocks` hold `ids`. What is known already keeps its block."""
        for (digest, num_tokens), block in zip(self._chain(ids), blocks.tolist(), strict=False):
            if digest not in self._blocks:
                self._blocks[digest] = block
                self._digests.setdefault(block, []).append(digest)
                self.full[block] |= num_tokens % self._page_size == 0

    def forget(self, block: int) -> None:
        """The block will hold something else."""
        self.full[block] = False
        for digest in self._digests.pop(block, ()):
            del self._blocks[digest]

    def flush(self, version: int) -> None:
        """Forget everything: from now on blocks hold keys and values of weight version `version`."""
        self._blocks.clear()
        self._digests.clear()
        self.full[:] = False
        self._root = _digest(b"", np.array([version], dtype=np.int64))

    def _chain(self, ids: np.ndarray) -> Iterator[tuple[bytes, int]]:
        """Digest of every block that `ids` touches, and the number of tokens up to its end."""
        digest = self._root
        for start in range(0, len(ids), self._page_size):
            page = ids[start : start + self._page_size]
            digest = _digest(digest, page)
            yield digest, start + len(page)


def _digest(parent: bytes, ids: np.ndarray) -> bytes:
    return hashlib.blake2b(parent + ids.tobytes(), digest_size=16).digest()
