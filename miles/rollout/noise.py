"""Keys of the random draws: what a request draws depends on who it is, not on when or beside whom it runs."""

from __future__ import annotations

import hashlib
import struct

ROLLOUT_STREAM = "rollout"
EVAL_STREAM = "eval"


def noise_key(seed: int, rollout_id: int, group: int, index: int, *, stream: str = ROLLOUT_STREAM) -> int:
    """64 bits that name the draws of answer `index` of prompt `group` in a rollout.

    Streams never meet: an evaluation draws other numbers than training, so training is the same with and without it.
    """
    name = struct.pack("<Qqqq", seed, rollout_id, group, index) + stream.encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
