"""The trained tokens of a rollout as flat vectors, and the micro-batches that score them.

Only tokens whose loss mask is set get a place in the flat vectors, so nothing that is masked, empty or cut can reach a
loss, a gradient or a metric. Vectors stay in canonical order; a micro-batch knows the places of its tokens in them.

T: tokens fed to the decoder; R: trained tokens; S: samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.errors import NotFiniteError, TrainError
from miles.model.context import ForwardContext, on_device, packed_context
from miles.ops.logprob import KeptIds
from miles.plan.memory import MICRO_BATCH_COST
from miles.trainer.packing import Bundle, bundles, pack
from miles.trainer.partition import TopLogProbs
from miles.types import TrainSample


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The trained tokens of one sample. Place `rows[i]` of its tokens predicts `ids[i]`. The decoder must read the
    `inputs`: up to the last place that predicts something. All int64.

    When top-k, top-p or min-p had cut the other ids, `kept` has the ids of all kept sets, one after the other (int32),
    and how many each has.
    """

    inputs: np.ndarray
    ids: np.ndarray
    rows: np.ndarray
    kept: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Samples in canonical order with their trained tokens."""

    samples: list[TrainSample]
    targets: list[Targets]
    lengths_S: Tensor  # trained tokens of each sample
    rollout_log_probs_R: Tensor | None  # the engine's; None when the samples have none
    engine_top: TopLogProbs | None = None  # the engine's most likely tokens; None when it was not asked for them

    @property
    def num_tokens(self) -> int:
        return sum(len(target.ids) for target in self.targets)  # without waiting for the device

    @property
    def sample_R(self) -> Tensor:
        """Which sample a token belongs to."""
        return torch.arange(len(self.samples), device=self.lengths_S.device).repeat_interleave(self.lengths_S)

    def spread(self, values_S: Tensor) -> Tensor:
        """One number per sample -> the same number on each of its tokens."""
        return values_S.to(self.lengths_S.device).repeat_interleave(self.lengths_S)

    def part(self, start: int, stop: int) -> tuple[TokenBatch, slice]:
        """Samples `start` to `stop - 1`, and where their tokens lie in the vectors of this batch."""
        first, last = (sum(len(target.ids) for target in self.targets[:end]) for end in (start, stop))
        rollout, top, places = self.rollout_log_probs_R, self.engine_top, slice(first, last)
        part = TokenBatch(
            self.samples[start:stop],
            self.targets[start:stop],
            self.lengths_S[start:stop],
            None if rollout is None else rollout[places],
            None if top is None else top[places],
        )
        return part, places


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed inputs for one forward pass. `places_R` says where its trained tokens lie in the flat vectors.

    `reads` has for each sample the tokens it is read up to, and how many of them were read for another one before.
    """

    input_ids_T: Tensor
    context: ForwardContext
    rows_R: Tensor
    targets_R: Tensor
    places_R: Tensor
    lengths_S: Tensor  # trained tokens of each of its samples
    kept: KeptIds | None
    learns: bool  # False: scored for the metrics only, without a backward pass
    reads: list[tuple[int, int]]


def token_batch(samples: Sequence[TrainSample], device: torch.device) -> TokenBatch:
    """Collect the trained tokens. An engine log-prob that is not finite is a `NotFiniteError`."""
    targets = [_targets(sample) for sample in samples]
    lengths_S = torch.tensor([len(target.ids) for target in targets], dtype=torch.int64, device=device)
    if samples and all(sample.rollout_log_probs is None for sample in samples):
        return TokenBatch(list(samples), targets, lengths_S, None)
    by_sample = [np.array(_trained(s, s.rollout_log_probs, "log-probs"), dtype=np.float32) for s in samples]
    rollout_R = np.concatenate(by_sample or [np.zeros(0, np.float32)])
    if not np.isfinite(rollout_R).all():
        broken = [s.index for s, values in zip(samples, by_sample, strict=True) if not np.isfinite(values).all()]
        raise NotFiniteError(
            f"the engine's log-probs of samples {name_samples(broken)} are not finite (nan or inf)", broken
        )
    return TokenBatch(list(samples), targets, lengths_S, on_device(rollout_R, device), _engine_top(samples, device))


def micro_batches(
    batch: TokenBatch,
    members: Sequence[int],
    *,
    max_tokens: int,
    max_samples: int | None = None,
    learns: bool = False,
    share: bool = False,
    cost: Callable[[int], int] = int,
) -> list[MicroBatch]:
    """Pack these samples of the batch; those without a trained token need no forward pass. What each micro-batch takes
    is evened out: tokens, or the `cost` of so many tokens in one sequence.

    With `share` the samples of a group that are in the same micro-batch compute their common prompt once, unless groups
    that stay together fill the micro-batches so badly that it takes longer.
    """
    members = [i for i in members if len(batch.targets[i].ids)]
    starts = list(itertools.accumulate((len(target.ids) for target in batch.targets), initial=0))
    choices = [[Bundle([i]) for i in members]]
    if share:
        choices.append(_bundles(batch, members, max_tokens, max_samples))
    packings = [_pack(batch, bundled, max_tokens, max_samples, cost) for bundled in choices]
    packed, _ = min(packings, key=lambda packing: packing[1])
    return [_micro_batch(batch, bundled, starts, learns=learns) for bundled in packed]


def in_flat_order(micro_batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> Tensor:
    """Values per token of each micro-batch, which together cover a batch, as one vector in its flat order."""
    packed = torch.cat(list(values))
    return torch.empty_like(packed).index_copy_(0, torch.cat([one.places_R for one in micro_batches]), packed)


def name_samples(indices: Sequence[int], most: int = 20) -> str:
    """Sample indices for an error message."""
    named = ", ".join(map(str, indices[:most]))
    return named if len(indices) <= most else f"{named} and {len(indices) - most} more"


def _targets(sample: TrainSample) -> Targets:
    length, start = sample.response_length, len(sample.tokens) - sample.response_length
    assert len(sample.loss_mask) == length, f"sample {sample.index}: loss mask and response differ in length"
    trained = np.arange(length) if all(sample.loss_mask) else np.flatnonzero(sample.loss_mask)
    rows = start - 1 + trained
    assert len(rows) == 0 or rows[0] >= 0, f"sample {sample.index}: its first token has nothing to be predicted from"
    tokens = np.array(sample.tokens, dtype=np.int64)
    ids = tokens[rows + 1]
    return Targets(tokens[: rows[-1] + 1 if len(rows) else 0], ids, rows, _kept_sets(sample, ids))


def _kept_sets(sample: TrainSample, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    if sample.kept_token_ids is None:
        return None
    kept = _trained(sample, sample.kept_token_ids, "kept sets")
    counts = np.array([len(token_ids) for token_ids in kept], dtype=np.int64)
    flat = np.concatenate([*kept, np.zeros(0, np.int32)]).astype(np.int32)
    hits = np.concatenate(([0], np.cumsum(flat == np.repeat(ids, counts))))
    found = np.diff(hits[counts.cumsum()], prepend=0)
    assert found.all(), f"sample {sample.index}: the drawn tokens {ids[found == 0][:5]} are not among the kept ones"
    return flat, counts


def _trained(sample: TrainSample, values: list[Any] | None, what: str) -> list[Any]:
    """The entries of a list over the response that belong to trained tokens."""
    if not any(sample.loss_mask):
        return []
    if values is None:
        raise TrainError(f"sample {sample.index} has no {what}, others have; a hook must give them to all or to none")
    assert len(values) == sample.response_length, f"sample {sample.index}: {what} and response differ in length"
    if all(sample.loss_mask):
        return values
    return [value for value, mask in zip(values, sample.loss_mask, strict=True) if mask]


def _engine_top(samples: Sequence[TrainSample], device: torch.device) -> TopLogProbs | None:
    if all(sample.top_token_ids is None for sample in samples):
        return None
    ids = [row for sample in samples for row in _trained(sample, sample.top_token_ids, "most likely ids")]
    log_probs = [row for sample in samples for row in _trained(sample, sample.top_log_probs, "their log-probs")]
    if not ids:
        return None
    both = [(s.index, (*(s.top_token_ids or ()), *(s.top_log_probs or ()))) for s in samples]
    odd = [index for index, rows in both if {*map(len, rows)} - {len(ids[0])}]
    assert not odd, f"samples {name_samples(odd)}: not all tokens have {len(ids[0])} most likely ids with log-probs"
    # `stack` would make a view of each row.
    ids_RK, log_probs_RK = (on_device(np.concatenate(rows).reshape(len(ids), -1), device) for rows in (ids, log_probs))
    return TopLogProbs(ids_RK.long(), log_probs_RK)


def _bundles(batch: TokenBatch, members: Sequence[int], max_tokens: int, max_samples: int | None) -> list[Bundle]:
    bundled = []
    for _, group in itertools.groupby(members, lambda i: batch.samples[i].group_index):
        mine = list(group)
        targets = [batch.targets[i] for i in mine]
        tokens, first_rows = [batch.samples[i].tokens for i in mine], [int(target.rows[0]) for target in targets]
        lengths = [len(target.inputs) for target in targets]
        made = bundles(tokens, first_rows, lengths, max_tokens=max_tokens, max_samples=max_samples)
        bundled += [Bundle([mine[i] for i in bundle.members], bundle.num_shared) for bundle in made]
    return bundled


def _pack(
    batch: TokenBatch, bundled: list[Bundle], max_tokens: int, max_samples: int | None, cost: Callable[[int], int]
) -> tuple[list[list[Bundle]], int]:
    """Micro-batches, and their time in tokens."""

    def together(bundle: Bundle, of: Callable[[int], int]) -> int:
        shared = of(bundle.num_shared)
        return shared + sum(of(len(batch.targets[i].inputs)) - shared for i in bundle.members)

    lengths, costs = ([together(bundle, of) for bundle in bundled] for of in (int, cost))
    if max_samples is not None and bundled:
        max_samples = max_samples // max(len(bundle.members) for bundle in bundled)
    packed = pack(lengths, costs, max_tokens=max_tokens, max_samples=max_samples)
    return [[bundled[i] for i in chosen] for chosen in packed], sum(lengths) + MICRO_BATCH_COST * len(packed)


def _micro_batch(batch: TokenBatch, bundled: list[Bundle], starts: list[int], *, learns: bool) -> MicroBatch:
    device = batch.lengths_S.device
    pieces: list[np.ndarray] = []  # token ids of each sequence
    heads: list[int] = []
    rows: list[np.ndarray] = []
    reads: list[tuple[int, int]] = []
    first = 0
    for bundle in bundled:
        head, num_shared = len(heads), bundle.num_shared
        if num_shared:
            pieces.append(batch.targets[bundle.members[0]].inputs[:num_shared])
            heads.append(head)
            first += num_shared
        for place, i in enumerate(bundle.members):
            target = batch.targets[i]
            pieces.append(target.inputs[num_shared:])
            heads.append(head)
            rows.append(first - num_shared + target.rows)
            reads.append((len(target.inputs), num_shared if place else 0))
            first += len(target.inputs) - num_shared
    members = [i for bundle in bundled for i in bundle.members]
    targets = [batch.targets[i] for i in members]
    shares = any(bundle.num_shared for bundle in bundled)
    ids, places = [target.ids for target in targets], [np.arange(starts[i], starts[i + 1]) for i in members]
    vectors = [np.concatenate(parts) for parts in (ids, pieces, rows, places)] + [np.array([len(part) for part in ids])]
    # In one copy. The targets come first: kernels are compiled anew for a vector that is not at 16 bytes.
    moved = on_device(np.concatenate(vectors), device).split([len(vector) for vector in vectors])
    targets_R, input_ids_T, rows_R, places_R, lengths_S = moved
    context = packed_context([len(part) for part in pieces], device=device, heads=heads if shares else None)
    kept = _kept_ids(targets, device)
    return MicroBatch(input_ids_T, context, rows_R, targets_R, places_R, lengths_S, kept, learns, reads)


def _kept_ids(targets: Sequence[Targets], device: torch.device) -> KeptIds | None:
    kept = [target.kept for target in targets if target.kept is not None]
    if not kept:
        return None
    assert len(kept) == len(targets), "either all answers have kept sets or none"
    flat, counts = zip(*kept, strict=True)
    return KeptIds(on_device(np.concatenate(flat), device), np.concatenate(([0], *counts)).cumsum())
