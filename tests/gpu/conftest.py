"""Before anything is allocated on the GPU: memory as a run takes it."""

from __future__ import annotations

from miles.loop.placement import keep_memory_in_one_piece

keep_memory_in_one_piece()
