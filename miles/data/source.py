"""The order in which prompts are used: by seed and epoch, and exactly resumable."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from miles.errors import CheckpointError
from miles.types import Sample

PASS_RATE = "pass_rate"  # where the metadata of a prompt may say how often it was solved before the run
ROW, SET = "prompt_row", "prompt_set"  # what is written there, so that a scored answer leads back to its prompt


class PromptSource:
    """Implements `DataSource`. A group is `n_samples_per_prompt` deep copies of a prompt, so prompts never change.

    `group_index` and `index` count over the whole run. With `shuffle` the order of an epoch depends on (seed, epoch)
    only. With `pass_rates` (low, high) a prompt whose answers were right less or more often than this is left out of
    the next epoch, and comes back in the one after it to be measured again.
    """

    def __init__(
        self,
        prompts: Sequence[Sample],
        *,
        n_samples_per_prompt: int,
        seed: int,
        shuffle: bool,
        pass_rates: tuple[float, float] | None = None,
    ) -> None:
        assert prompts, "load_prompts refuses an empty file"
        self._prompts = prompts
        self._n_samples_per_prompt = n_samples_per_prompt
        self._seed = seed
        self._shuffle = shuffle
        self._pass_rates = pass_rates
        self._position = 0  # groups handed out since the start of the run
        self._epoch, self._offset = 0, 0
        self._rates: dict[int, float] = {}  # measured in this epoch, by row
        self._left_out: set[int] = self._outside(self._given_rates())  # of this epoch
        self._order = self._epoch_order()

    def __len__(self) -> int:
        """Prompts of an epoch of which none is left out."""
        return len(self._prompts)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.tokens) for prompt in self._prompts)

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to, counted from 0."""
        return self._epoch + (self._offset == len(self._order))

    def next(self, count: int) -> list[list[Sample]]:
        """The next `count` groups; passes into a new epoch when one ends."""
        return [self._next_group() for _ in range(count)]

    def note(self, groups: Iterable[tuple[Sample, float]]) -> None:
        """How often the answers to these prompts were right: a sample of the group, and its share of right answers."""
        if self._pass_rates is not None:
            self._rates |= {sample.metadata[ROW]: rate for sample, rate in groups}

    def _next_group(self) -> list[Sample]:
        if self._offset == len(self._order):
            self._epoch, self._offset = self._epoch + 1, 0
            self._left_out, self._rates = self._outside(self._rates), {}
            self._order = self._epoch_order()
        row = int(self._order[self._offset])
        prompt = self._prompts[row]
        group = []
        for member in range(self._n_samples_per_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index = self._position
            sample.index = self._position * self._n_samples_per_prompt + member
            if self._pass_rates is not None:
                sample.metadata[ROW] = row
            group.append(sample)
        self._position, self._offset = self._position + 1, self._offset + 1
        return group

    def _epoch_order(self) -> np.ndarray:
        order = np.arange(len(self._prompts))
        if self._shuffle:
            order = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self._seed, self._epoch)))).permutation(
                len(self._prompts)
            )
        return order[~np.isin(order, list(self._left_out))] if self._left_out else order

    def _given_rates(self) -> dict[int, float]:
        if self._pass_rates is None:
            return {}
        given = ((row, prompt.metadata.get(PASS_RATE)) for row, prompt in enumerate(self._prompts))
        return {row: float(rate) for row, rate in given if isinstance(rate, (int, float)) and math.isfinite(rate)}

    def _outside(self, rates: dict[int, float]) -> set[int]:
        """Rows outside the wanted pass rates; none when nothing else would be left."""
        if self._pass_rates is None:
            return set()
        low, high = self._pass_rates
        outside = {row for row, rate in rates.items() if not low <= rate <= high}
        return outside if len(outside) < len(self._prompts) else set()

    def state_dict(self) -> dict[str, Any]:
        state = {"position": self._position, "epoch": self._epoch, "offset": self._offset, **self._identity}
        if self._pass_rates is not None:
            state |= {"rates": sorted(self._rates.items()), "left_out": sorted(self._left_out)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. `CheckpointError` when prompts, seed or group size are others now: the
        position would mean something else."""
        changed = [name for name, value in self._identity.items() if state.get(name) != value]
        if changed:
            raise CheckpointError(
                f"the checkpoint was written with other prompt data ({', '.join(changed)} changed): resuming would "
                "skip or repeat prompts; use the same --prompt-data, --rollout-seed, --rollout-shuffle and "
                "--n-samples-per-prompt, or another run folder"
            )
        self._position = state["position"]
        epoch, offset = divmod(self._position, len(self._prompts))  # what a checkpoint without pass rates said
        self._epoch, self._offset = state.get("epoch", epoch), state.get("offset", offset)
        self._rates = {row: rate for row, rate in state.get("rates", [])}
        self._left_out = set(state.get("left_out", ()))
        self._order = self._epoch_order()

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self._prompts),
            "prompts_digest": _digest(self._prompts),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "n_samples_per_prompt": self._n_samples_per_prompt,
        }


class MixedSource:
    """Implements `DataSource` over several, each with a weight. The next group comes from the source that is furthest
    behind its share, so that any stretch of the run has the shares to within one group per source."""

    def __init__(self, sources: Sequence[PromptSource], weights: Sequence[float]) -> None:
        self._sources = sources
        self._shares = [weight / math.fsum(weights) for weight in weights]
        self._taken = [0] * len(sources)

    @property
    def longest_prompt(self) -> int:
        return max(source.longest_prompt for source in self._sources)

    def __len__(self) -> int:
        """Groups until the source that ends first by its share has been used once."""
        return math.ceil(min(len(source) / share for source, share in zip(self._sources, self._shares, strict=True)))

    def next(self, count: int) -> list[list[Sample]]:
        return [self._next_group() for _ in range(count)]

    def _next_group(self) -> list[Sample]:
        position = sum(self._taken)
        behind = [share * (position + 1) - taken for share, taken in zip(self._shares, self._taken, strict=True)]
        chosen = behind.index(max(behind))
        self._taken[chosen] += 1
        (group,) = self._sources[chosen].next(1)
        for member, sample in enumerate(group):
            sample.group_index, sample.index = position, position * len(group) + member
            sample.metadata[SET] = chosen
        return group

    def note(self, groups: Iterable[tuple[Sample, float]]) -> None:
        for sample, rate in groups:
            self._sources[sample.metadata[SET]].note([(sample, rate)])

    def state_dict(self) -> dict[str, Any]:
        return {"shares": self._shares, "taken": self._taken, "sources": [one.state_dict() for one in self._sources]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("shares") != self._shares:
            raise CheckpointError("the checkpoint was written with another --mix-prompt-data: use the same one")
        self._taken = list(state["taken"])
        for source, its_state in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(its_state)


def _digest(prompts: Sequence[Sample]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(json.dumps([prompt.tokens, prompt.response_length, prompt.label], default=str).encode())
    return digest.hexdigest()
