"""The trained tokens of a rollout as flat vectors, and the micro-batches that score them.

Only tokens whose loss mask is set get a place in the flat vectors, so nothing that is masked, empty or cut can reach a
loss, a gradient or a metric. Vectors stay in canonical order; a micro-batch knows the places of its tokens in them.

T: tokens fed to the decoder; R: trained tokens; S: samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.errors import NotFiniteError
from miles.model.context import ForwardContext, packed_context
from miles.ops.logprob import KeptIds
from miles.trainer.packing import MICRO_BATCH_COST, Bundle, bundles, pack
from miles.trainer.partition import TopLogProbs
from miles.types import TrainSample


@dataclass(frozen=True, slots=True)
class Targets:
    """The trained tokens of one sample. Place `rows[i]` of the sample's tokens predicts `ids[i]`, among the ids
    `kept[i]` when top-k, top-p or min-p had cut the others."""

    ids: list[int]
    rows: list[int]
    kept: list[np.ndarray] | None = None

    @property
    def num_inputs(self) -> int:
        """Tokens that the decoder must read: up to the last place that predicts something."""
        return self.rows[-1] + 1 if self.rows else 0


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
        return int(self.lengths_S.sum())

    @property
    def sample_R(self) -> Tensor:
        """Which sample a token belongs to."""
        return torch.arange(len(self.samples), device=self.lengths_S.device).repeat_interleave(self.lengths_S)

    def spread(self, values_S: Tensor) -> Tensor:
        """One number per sample -> the same number on each of its tokens."""
        return values_S.to(self.lengths_S.device).repeat_interleave(self.lengths_S)

    def part(self, start: int, stop: int) -> tuple[TokenBatch, slice]:
        """Samples `start` to `stop - 1`, and where their tokens lie in the vectors of this batch."""
        first, last = int(self.lengths_S[:start].sum()), int(self.lengths_S[:stop].sum())
        rollout, top, places = self.rollout_log_probs_R, self.engine_top, slice(first, last)
        part = TokenBatch(
            self.samples[start:stop],
            self.targets[start:stop],
            self.lengths_S[start:stop],
            None if rollout is None else rollout[places],
            None if top is None else top.take(places),
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
    rollout_log_probs: list[np.ndarray] = []
    broken: list[int] = []
    for sample in samples:
        rollout_log_probs.append(np.array(_trained(sample, sample.rollout_log_probs, "log-probs"), dtype=np.float32))
        if not np.isfinite(rollout_log_probs[-1]).all():
            broken.append(sample.index)
    if broken:
        raise NotFiniteError(
            f"the engine's log-probs of samples {name_samples(broken)} are not finite; nothing was updated", broken
        )
    rollout_log_probs_R = torch.from_numpy(np.concatenate(rollout_log_probs or [np.zeros(0, np.float32)])).to(device)
    return TokenBatch(list(samples), targets, lengths_S, rollout_log_probs_R, _engine_top(samples, device))


def micro_batches(
    batch: TokenBatch,
    members: Sequence[int],
    *,
    max_tokens: int,
    max_samples: int | None = None,
    learns: bool = False,
    share: bool = False,
) -> list[MicroBatch]:
    """Pack these samples of the batch; those without a trained token need no forward pass.

    With `share` the samples of a group that are in the same micro-batch compute their common prompt once, unless groups
    that stay together fill the micro-batches so badly that it takes longer.
    """
    members = [i for i in members if batch.targets[i].ids]
    starts_S = (batch.lengths_S.cumsum(0) - batch.lengths_S).tolist()
    choices = [[Bundle([i]) for i in members]]
    if share:
        choices.append(_bundles(batch, members, max_tokens, max_samples))
    packings = [_pack(batch, bundled, max_tokens, max_samples) for bundled in choices]
    packed, _ = min(packings, key=lambda packing: packing[1])
    return [_micro_batch(batch, bundled, starts_S, learns=learns) for bundled in packed]


def in_flat_order(micro_batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> Tensor:
    """Values per token of each micro-batch, which together cover a batch, as one vector in its flat order."""
    order_R = torch.cat([micro_batch.places_R for micro_batch in micro_batches]).argsort()
    return torch.cat(list(values))[order_R]


def name_samples(indices: Sequence[int], most: int = 20) -> str:
    """Sample indices for an error message."""
    named = ", ".join(map(str, indices[:most]))
    return named if len(indices) <= most else f"{named} and {len(indices) - most} more"


def _targets(sample: TrainSample) -> Targets:
    length, start = sample.response_length, len(sample.tokens) - sample.response_length
    assert len(sample.loss_mask) == length, f"sample {sample.index}: loss mask and response differ in length"
    trained = (start + np.flatnonzero(sample.loss_mask)).tolist()
    assert not trained or trained[0] > 0, f"sample {sample.index}: its first token has nothing to be predicted from"
    ids = sample.tokens[start:] if len(trained) == length else [sample.tokens[place] for place in trained]
    kept = None if sample.kept_token_ids is None else _trained(sample, sample.kept_token_ids, "kept sets")
    if kept is not None:
        lost = [token for token, token_ids in zip(ids, kept, strict=True) if token not in token_ids]
        assert not lost, f"sample {sample.index}: the drawn tokens {lost[:5]} are not among the kept ones"
    return Targets(ids, [place - 1 for place in trained], kept)


def _trained(sample: TrainSample, values: list[Any] | None, what: str) -> list[Any]:
    """The entries of a list over the response that belong to trained tokens."""
    if not any(sample.loss_mask):
        return []
    values = values or []
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
    ids_RK = torch.from_numpy(np.stack(ids)).to(device=device, dtype=torch.int64)
    return TopLogProbs(ids_RK, torch.from_numpy(np.stack(log_probs)).to(device))


def _bundles(batch: TokenBatch, members: Sequence[int], max_tokens: int, max_samples: int | None) -> list[Bundle]:
    bundled = []
    for _, group in itertools.groupby(members, lambda i: batch.samples[i].group_index):
        mine = list(group)
        targets = [batch.targets[i] for i in mine]
        made = bundles(
            [batch.samples[i].tokens for i in mine],
            [target.rows[0] for target in targets],
            [target.num_inputs for target in targets],
            max_tokens=max_tokens,
            max_samples=max_samples,
        )
        bundled += [Bundle([mine[i] for i in bundle.members], bundle.num_shared) for bundle in made]
    return bundled


def _pack(
    batch: TokenBatch, bundled: list[Bundle], max_tokens: int, max_samples: int | None
) -> tuple[list[list[Bundle]], int]:
    """Micro-batches, and their cost in tokens."""
    lengths = [
        bundle.num_shared + sum(batch.targets[i].num_inputs - bundle.num_shared for i in bundle.members)
        for bundle in bundled
    ]
    if max_samples is not None and bundled:
        max_samples = max_samples // max(len(bundle.members) for bundle in bundled)
    packed = pack(lengths, max_tokens=max_tokens, max_samples=max_samples)
    return [[bundled[i] for i in chosen] for chosen in packed], sum(lengths) + MICRO_BATCH_COST * len(packed)


def _micro_batch(batch: TokenBatch, bundled: list[Bundle], starts_S: list[int], *, learns: bool) -> MicroBatch:
    device = batch.lengths_S.device
    pieces: list[list[int]] = []  # token ids of each sequence
    heads: list[int] = []
    rows: list[np.ndarray] = []
    reads: list[tuple[int, int]] = []
    first = 0
    for bundle in bundled:
        head, num_shared = len(heads), bundle.num_shared
        if num_shared:
            pieces.append(batch.samples[bundle.members[0]].tokens[:num_shared])
            heads.append(head)
            first += num_shared
        for place, i in enumerate(bundle.members):
            target = batch.targets[i]
            pieces.append(batch.samples[i].tokens[num_shared : target.num_inputs])
            heads.append(head)
            rows.append(first - num_shared + np.array(target.rows, dtype=np.int64))
            reads.append((target.num_inputs, num_shared if place else 0))
            first += target.num_inputs - num_shared

    def upload(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    def integers(numbers: list[int]) -> np.ndarray:
        return np.array(numbers, dtype=np.int64)

    members = [i for bundle in bundled for i in bundle.members]
    targets = [batch.targets[i] for i in members]
    shares = any(bundle.num_shared for bundle in bundled)
    return MicroBatch(
        input_ids_T=upload([integers(ids) for ids in pieces]),
        context=packed_context([len(ids) for ids in pieces], device=device, heads=heads if shares else None),
        rows_R=upload(rows),
        targets_R=upload([integers(target.ids) for target in targets]),
        places_R=upload([starts_S[i] + np.arange(len(batch.targets[i].ids)) for i in members]),
        lengths_S=upload([integers([len(target.ids) for target in targets])]),
        kept=_kept_ids(targets, device),
        learns=learns,
        reads=reads,
    )


def _kept_ids(targets: Sequence[Targets], device: torch.device) -> KeptIds | None:
    if all(target.kept is None for target in targets):
        return None
    sets = [token_ids for target in targets for token_ids in target.kept or ()]
    assert len(sets) == sum(len(target.ids) for target in targets), "either all answers have kept sets or none"
    bounds = np.cumsum([0, *map(len, sets)])
    return KeptIds(torch.from_numpy(np.concatenate(sets).astype(np.int32)).to(device), bounds)
