"""Rewards without meaning, for controls and tests: nothing can be learned from them."""

from __future__ import annotations

import hashlib
import struct

from miles.rollout.rm_hub.grader import Grader, Reward
from miles.types import Sample


class RandomGrader(Grader):
    """`random`: 0 or 1, whatever the answer."""

    grades_empty = True

    def find(self, response: str) -> str | None:
        return response

    async def compare(self, answer: str, sample: Sample) -> Reward:
        return random_reward(sample, seed=self.tools.config.data.rollout_seed)


class DeterministicRandomGrader(RandomGrader):
    """`deterministic_random`: 0 or 1 by a digest of what was written."""

    async def compare(self, answer: str, sample: Sample) -> Reward:
        return deterministic_random_reward(sample.tokens, answer)


def random_reward(sample: Sample, *, seed: int) -> int:
    """0 or 1 with equal chance. The run's seed and the sample's place decide, so that a run repeats."""
    name = b"random" + struct.pack("<Qqq", seed, sample.group_index, sample.index)
    return hashlib.blake2b(name, digest_size=1).digest()[0] & 1


def deterministic_random_reward(tokens: list[int], response: str) -> int:
    """0 or 1 by what was written: parity of the first byte of sha256 of the token ids and the response."""
    return hashlib.sha256(f"{tokens}{response}".encode()).digest()[0] & 1
