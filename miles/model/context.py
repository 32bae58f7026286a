"""What a forward pass must know besides the token ids. An argument of every layer, never a global."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from miles.ops.attention import LengthBuckets, length_buckets
from miles.ops.paged_attention import PagedView


@dataclass(frozen=True)
class ForwardContext:
    """Positions and borders of B sequences in T packed tokens.

    `positions_T` (int64) are positions in each token's own sequence; `cu_seqlens` (int32, sequences + 1) the borders in
    T; `max_seqlen` the longest sequence. With a `cache` the tokens are new ones of sequences whose beginning is stored:
    each layer stores their keys and values and attends over the cache; without one the batch is all there is.
    Without `adapter` a model with LoRA computes what it did before. A `dropout_seed` is the key of the dropout of this
    pass; None drops nothing. `groups_B2` says which sequences continue which (`ops/attention.py`); None: none does.
    With `remakes` the backward pass makes what is cheap again instead of keeping it (`activations.remade_numbers`).
    """

    positions_T: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    cache: PagedView | None = None
    adapter: bool = True
    dropout_seed: int | None = None
    groups_B2: Tensor | None = None
    remakes: bool = False

    @cached_property
    def buckets(self) -> LengthBuckets:
        """The padded layout, worked out once for all layers."""
        heads = None if self.groups_B2 is None else self.groups_B2[:, 0].tolist()
        return length_buckets(self.cu_seqlens.diff().tolist(), device=self.positions_T.device, heads=heads)


def packed_context(
    lengths: Sequence[int], *, device: torch.device | str, heads: Sequence[int] | None = None
) -> ForwardContext:
    """Context of sequences that lie one after the other, without a cache: what training runs on.

    Sequence b continues sequence `heads[b]`, or none when that is b. A head continues none, and those that continue it
    follow it directly.
    """
    length_B = torch.tensor(lengths, dtype=torch.int64)
    end_B = length_B.cumsum(0)
    start_B, groups_B2 = end_B - length_B, None
    if heads is not None:
        last = list(range(len(heads)))
        for sequence, head in enumerate(heads):
            last[head] = sequence
        groups_B2 = torch.tensor([heads, last], dtype=torch.int32).T.contiguous().to(device)
        head_B = torch.tensor(heads)
        start_B = start_B - length_B[head_B] * (head_B != torch.arange(len(heads)))
    positions_T = torch.arange(int(end_B[-1])) - start_B.repeat_interleave(length_B)
    cu_seqlens = torch.nn.functional.pad(end_B, (1, 0)).to(torch.int32)
    return ForwardContext(positions_T.to(device), cu_seqlens.to(device), max(lengths), groups_B2=groups_B2)
