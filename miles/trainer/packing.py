"""Which samples share a micro-batch.

Samples are packed to a token budget, without padding, in as few micro-batches as the balance allows.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

import numpy as np

from miles.plan.memory import SHARED_MULTIPLE
from miles.types import TrainSample


@dataclass(frozen=True, slots=True)
class Bundle:
    """Samples that stay together, by position, and how many first tokens they have in common and share."""

    members: list[int]
    num_shared: int = 0


def canonical_order(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """By group, then by sample: the order in which answers happened to finish must not change a bit of the result."""
    return sorted(samples, key=lambda sample: (sample.group_index, sample.index))


def pack(
    lengths: Sequence[int], costs: Sequence[int], *, max_tokens: int, max_samples: int | None = None
) -> list[list[int]]:
    """Micro-batches as lists of positions in `lengths`, each of at most `max_tokens` tokens and `max_samples` samples.

    A sample longer than the budget gets a micro-batch of its own. The others go, the costliest first, to the one that
    costs least so far of those with room, which balances them; there are about as few as can hold all. Positions are
    ascending within a micro-batch.
    """
    assert max_tokens > 0, f"the token budget must be positive, got {max_tokens}"
    oversize = [i for i, length in enumerate(lengths) if length > max_tokens]
    rest = sorted((i for i, length in enumerate(lengths) if length <= max_tokens), key=lambda i: (-costs[i], i))
    most = max_samples or max(len(rest), 1)

    @functools.cache
    def spread(num_bins: int) -> list[list[int]] | None:
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        room, spent = np.full(num_bins, max_tokens), np.zeros(num_bins, np.int64)
        for i in rest:
            fits = np.flatnonzero(room >= lengths[i])
            if len(fits) == 0:
                return None
            b = fits[spent[fits].argmin()]
            bins[b].append(i)
            spent[b] += costs[i]
            room[b] = room[b] - lengths[i] if len(bins[b]) < most else -1
        return [sorted(members) for members in bins if members]

    num_halves = sum(2 * lengths[i] > max_tokens for i in rest)  # no two of them fit together
    enough = least = max(-(-sum(lengths[i] for i in rest) // max_tokens), -(-len(rest) // most), num_halves)
    # Thousands of samples may need hundreds more than the least: ever larger steps up, then halves down to the last
    # number that was not enough.
    while spread(enough) is None:
        enough += enough - least + 1
    fewest = bisect.bisect_left(range(enough), True, (least + enough + 1) // 2, key=lambda n: spread(n) is not None)
    bins = spread(fewest)
    assert bins is not None, "the search ends at a number of them that holds all"
    return sorted([[i] for i in oversize] + bins)


def bundles(
    tokens: Sequence[list[int]],
    first_rows: Sequence[int],
    lengths: Sequence[int],
    *,
    max_tokens: int,
    max_samples: int | None = None,
) -> list[Bundle]:
    """The samples of a group in as few bundles as the budgets allow; each computes the shared tokens once.

    Sample i is read up to `lengths[i]`; place `first_rows[i]` is the first that predicts a trained token. It and what
    follows stays with the sample, so that every place of the shared part predicts a token that is given.
    """
    num_common = len(commonprefix([ids[:first] for ids, first in zip(tokens, first_rows, strict=True)]))
    num_shared = num_common // SHARED_MULTIPLE * SHARED_MULTIPLE
    if len(lengths) == 1 or num_shared == 0:
        return [Bundle([i]) for i in range(len(lengths))]
    own = [length - num_shared for length in lengths]
    parts = pack(own, own, max_tokens=max(max_tokens - num_shared, 1), max_samples=max_samples)
    return [Bundle(members, num_shared if len(members) > 1 else 0) for members in parts]
