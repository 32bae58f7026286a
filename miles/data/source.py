"""The order in which prompts are used: by seed and epoch, and exactly resumable."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy

from miles.errors import CheckpointError
from miles.types import Sample


class PromptSource:
    """Implements `DataSource`. A group is `n_samples_per_prompt` deep copies of a prompt, so prompts never change.

    `group_index` and `index` count over the whole run. With `shuffle` the order of an epoch depends on (seed, epoch)
    only, so a position is all that a checkpoint needs.
    """

    def __init__(self, prompts: Sequence[Sample], *, n_samples_per_prompt: int, seed: int, shuffle: bool) -> None:
        assert prompts, "load_prompts refuses an empty file"
        self._prompts = prompts
        self._n_samples_per_prompt = n_samples_per_prompt
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0  # groups handed out since the start of the run
        self._order_epoch = -1
        self._order: Sequence[int] = ()

    def __len__(self) -> int:
        """Prompts of an epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to, counted from 0."""
        return self._position // len(self._prompts)

    def next(self, count: int) -> list[list[Sample]]:
        """The next `count` groups; passes into a new epoch when one ends."""
        return [self._next_group() for _ in range(count)]

    def _next_group(self) -> list[Sample]:
        epoch, offset = divmod(self._position, len(self._prompts))
        prompt = self._prompts[self._epoch_order(epoch)[offset]]
        group = []
        for member in range(self._n_samples_per_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index = self._position
            sample.index = self._position * self._n_samples_per_prompt + member
            group.append(sample)
        self._position += 1
        return group

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        if epoch != self._order_epoch:
            self._order_epoch = epoch
            self._order = range(len(self._prompts))
            if self._shuffle:
                generator = numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence((self._seed, epoch))))
                self._order = generator.permutation(len(self._prompts)).tolist()
        return self._order

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. `CheckpointError` when prompts, seed or group size are others now: the
        position would mean something else."""
        changed = [name for name, value in self._identity().items() if state.get(name) != value]
        if changed:
            raise CheckpointError(
                f"the checkpoint was written with other prompt data ({', '.join(changed)} changed): resuming would "
                "skip or repeat prompts; use the same --prompt-data, --rollout-seed, --rollout-shuffle and "
                "--n-samples-per-prompt, or another run folder"
            )
        self._position = state["position"]

    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self._prompts),
            "prompts_digest": _digest(self._prompts),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "n_samples_per_prompt": self._n_samples_per_prompt,
        }


def _digest(prompts: Sequence[Sample]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(json.dumps([prompt.tokens, prompt.response_length, prompt.label], default=str).encode())
    return digest.hexdigest()
