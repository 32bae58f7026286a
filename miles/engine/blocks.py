"""Who uses which block of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from miles.engine.prefix import PrefixIndex


class BlockPool:
    """Reference counts of all cache blocks.

    A block is in use (count above 0), free, or idle: unused but known to the prefix index. Idle blocks are given out
    last, those unused for longest first. Block 0 is never given out: block tables are padded with it.
    """

    def __init__(self, *, num_blocks: int, index: PrefixIndex) -> None:
        self.index = index
        self.num_usable = num_blocks - 1
        self.references = np.zeros(num_blocks, dtype=np.int32)
        self._free = list(range(num_blocks - 1, 0, -1))
        self._idle: dict[int, None] = {}  # a dict keeps the order in which blocks became idle

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give out."""
        return len(self._free) + len(self._idle)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks would leave the free ones when they are shared."""
        return sum(block in self._idle for block in blocks)

    def allocate(self) -> int:
        """A block for one user; forgets the oldest idle one when none is free."""
        assert self.num_free, "allocate() needs a free block"
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self.index.forget(block)
        self.references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more user of each block."""
        for block in blocks:
            self._idle.pop(block, None)
            self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """One user less of each block; returns those that nobody uses any more."""
        unused = []
        for block in blocks:
            self.references[block] -= 1
            assert self.references[block] >= 0, f"cache block {block} was released more often than shared"
            if self.references[block] == 0:
                unused.append(block)
                if block in self.index:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        return unused

    def flush(self, version: int) -> None:
        """Empty the prefix index for a new weight version; blocks in use stay with their users."""
        self.index.flush(version)
        self._free.extend(self._idle)
        self._idle.clear()
