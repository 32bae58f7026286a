"""Which samples share a micro-batch. Pure Python.

Samples are packed to a token budget, without padding, in as few micro-batches as the balance allows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from miles.types import TrainSample


def canonical_order(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """By group, then by sample: the order in which answers happened to finish must not change a bit of the result."""
    return sorted(samples, key=lambda sample: (sample.group_index, sample.index))


def pack(lengths: Sequence[int], *, max_tokens: int, max_samples: int | None = None) -> list[list[int]]:
    """Micro-batches as lists of positions in `lengths`, each of at most `max_tokens` tokens and `max_samples` samples.

    A sample longer than the budget gets a micro-batch of its own. The others go, longest first, to the emptiest
    micro-batch, which balances them; their number grows until all fit. Positions are ascending within a micro-batch.
    """
    assert max_tokens > 0, f"the token budget must be positive, got {max_tokens}"
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    oversize = [i for i in longest_first if lengths[i] > max_tokens]
    rest = longest_first[len(oversize) :]
    most = max_samples or max(len(rest), 1)
    num_bins = max(-(-sum(lengths[i] for i in rest) // max_tokens), -(-len(rest) // most))
    while (bins := _spread(lengths, rest, num_bins=num_bins, max_tokens=max_tokens, max_samples=most)) is None:
        num_bins += 1
    return sorted([[i] for i in oversize] + bins)


def _spread(
    lengths: Sequence[int], longest_first: list[int], *, num_bins: int, max_tokens: int, max_samples: int
) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, b) for b in range(num_bins)]
    for i in longest_first:
        while len(bins[emptiest[0][1]]) == max_samples:
            heapq.heappop(emptiest)
        used, b = emptiest[0]
        if used + lengths[i] > max_tokens:
            return None
        heapq.heapreplace(emptiest, (used + lengths[i], b))
        bins[b].append(i)
    return [sorted(members) for members in bins if members]
