"""What a forward pass must know besides the token ids. An argument of every layer, never a global."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
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
    length_B = np.array(lengths, dtype=np.int64)
    end_B = length_B.cumsum()
    start_B, groups_B2 = end_B - length_B, None
    if heads is not None:
        head_B, place_B = np.array(heads), np.arange(len(heads))
        last_B = place_B.copy()
        last_B[head_B] = place_B  # of those that continue a head the last one stays
        groups_B2 = on_device(np.stack((head_B, last_B), 1).astype(np.int32), device)
        start_B = start_B - length_B[head_B] * (head_B != place_B)
    positions_T = on_device(np.arange(end_B[-1]) - start_B.repeat(length_B), device)
    cu_seqlens = on_device(np.concatenate(([0], end_B)).astype(np.int32), device)
    return ForwardContext(positions_T, cu_seqlens, max(lengths), groups_B2=groups_B2)


def on_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """The array on the device, on a CPU its own memory. On a GPU it is copied, and nothing waits for what the device is
    doing: from memory that is not pinned the host would."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
