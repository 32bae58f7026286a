"""From logits to one token per row, on the device; from there to the host in one piece.

Shapes: R rows that get a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from miles.engine.request import RequestTable
from miles.ops.logprob import CUT_LOGIT
from miles.ops.sampling import Cuts, row_seeds, sample


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens of one step on the host. `failures`, `kept` and `top` hold only the rows (0 to R - 1) that need them: what
    was wrong with the logits, the ids that the cuts left, and the most likely ids with their log-probs."""

    tokens_R: np.ndarray
    log_probs_R: np.ndarray
    failures: dict[int, str]
    kept: dict[int, np.ndarray]
    top: dict[int, tuple[np.ndarray, np.ndarray]]


class Drawing(Protocol):
    """Tokens of a step that may still be computed. `is_late`: another step may be launched before `wait`."""

    @property
    def is_late(self) -> bool: ...

    def wait(self) -> Drawn: ...


@dataclass(frozen=True, slots=True)
class Done:
    """Tokens that are here already."""

    drawn: Drawn
    is_late: bool = False

    def wait(self) -> Drawn:
        return self.drawn


class OnTheWay:
    """Tokens that a device is still working on, as `draw_rows` returns them."""

    is_late = True

    def __init__(self, results_3R: Tensor) -> None:
        self._results_3R = results_3R
        self._event: torch.cuda.Event | None = None
        if results_3R.is_cuda:
            pinned = torch.empty(results_3R.shape, dtype=results_3R.dtype, pin_memory=True)
            self._results_3R = pinned.copy_(results_3R, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Drawn:
        if self._event is not None:
            self._event.synchronize()
        tokens_R, bits_R, finite_R = self._results_3R.numpy()
        failures = dict.fromkeys(np.flatnonzero(finite_R == 0).tolist(), "logits that are not finite")
        return Drawn(tokens_R.astype(np.int64), bits_R.view(np.float32), failures, {}, {})


Upload = Callable[[np.ndarray], Tensor]


def draw(logits_RV: Tensor, table: RequestTable, rows_R: np.ndarray, upload: Upload) -> Drawn:
    """Draw a token for each row of the table from its logits (float32, overwritten), and wait for it."""
    greedy_R, temperature_R, cut_R = table.greedy[rows_R], table.temperature[rows_R], table.cut[rows_R]
    seeds_R2 = None if greedy_R.all() else upload(next_seeds(table, rows_R)).unsqueeze(1).view(torch.int32)
    drawn = sample(
        logits_RV,
        seeds_R2=seeds_R2,
        temperature_R=None if (temperature_R == 1.0).all() else upload(temperature_R),
        greedy_R=upload(greedy_R) if greedy_R.any() else None,
        cuts=_cuts(table, rows_R, np.flatnonzero(cut_R), upload) if cut_R.any() else None,
    )
    finite_R = drawn.finite_R.cpu().numpy()
    failures = {i: _describe(logits_RV[i], cut=cut_R[i]) for i in np.flatnonzero(~finite_R).tolist()}
    scanned = [(i, table.live[rows_R[i]]) for i in np.flatnonzero(table.scanned[rows_R]).tolist()]
    kept = _kept(logits_RV, [i for i, live in scanned if live is not None and live.kept is not None])
    num_top = {i: live.request.sampling.num_top_log_probs for i, live in scanned if live is not None}
    top = _top(logits_RV, {i: num for i, num in num_top.items() if num > 0})
    return Drawn(drawn.tokens_R.cpu().numpy(), drawn.log_probs_R.cpu().numpy(), failures, kept, top)


def draw_on_device(
    logits_RV: Tensor, table: RequestTable, rows_R: np.ndarray, last_tokens: Tensor, upload: Upload
) -> Tensor:
    """Draw without waiting for the tokens, for rows without cuts; returns what `draw_rows` does."""
    return draw_rows(
        logits_RV,
        rows_R=upload(rows_R),
        seeds_R=upload(next_seeds(table, rows_R)),
        temperature_R=upload(table.temperature[rows_R]),
        greedy_R=upload(table.greedy[rows_R]),
        last_tokens=last_tokens,
    )


def next_seeds(table: RequestTable, rows_R: np.ndarray) -> np.ndarray:
    """64 bits for the next draw of each row. They depend on its place in the whole text, so a continued answer goes on
    with the same draws. Worked out on the host: a dozen kernels for so few numbers would cost more."""
    keys_R, lengths_R = torch.from_numpy(table.key[rows_R]), torch.from_numpy(table.length[rows_R])
    return row_seeds(keys_R, lengths_R).view(torch.int64).squeeze(1).numpy()


def draw_rows(
    logits_RV: Tensor,
    *,
    rows_R: Tensor,
    seeds_R: Tensor,
    temperature_R: Tensor,
    greedy_R: Tensor,
    last_tokens: Tensor,
) -> Tensor:
    """Token, bits of its log-prob and whether the logits were finite, as int32 (3 x R): one small transfer to the host.
    Tokens also go to `last_tokens[rows_R]`."""
    drawn = sample(
        logits_RV,
        seeds_R2=seeds_R.unsqueeze(1).view(torch.int32),
        temperature_R=temperature_R,
        greedy_R=greedy_R,
        needs_tempered=False,
    )
    last_tokens.index_copy_(0, rows_R, drawn.tokens_R)
    results = (drawn.tokens_R.to(torch.int32), drawn.log_probs_R.view(torch.int32), drawn.finite_R.to(torch.int32))
    return torch.stack(results)


def _kept(logits_RV: Tensor, rows: list[int]) -> dict[int, np.ndarray]:
    """The ids that the cuts left in these rows, int32, fetched from the device at once."""
    if not rows:
        return {}
    places_N2 = logits_RV[rows].isfinite().nonzero().to(torch.int32).cpu().numpy()
    starts = np.searchsorted(places_N2[:, 0], np.arange(1, len(rows)))
    # copies: a view would keep the ids of all rows alive for as long as those of one
    return {i: ids.copy() for i, ids in zip(rows, np.split(places_N2[:, 1], starts), strict=True)}


def _top(logits_RV: Tensor, num_top: dict[int, int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """The most likely ids of these rows (int32) and their log-probs (float32), most likely first. Ids that were cut are
    as unlikely as the trainer says they are: a checkpoint that holds them has no place for an infinite number."""
    if not num_top:
        return {}
    tempered_RV = logits_RV[list(num_top)]
    best = tempered_RV.topk(min(max(num_top.values()), tempered_RV.shape[1]))
    log_probs = (best.values - tempered_RV.logsumexp(-1, keepdim=True)).clamp(min=CUT_LOGIT).cpu().numpy()
    ids = best.indices.to(torch.int32).cpu().numpy()
    return {i: (ids[row, :num], log_probs[row, :num]) for row, (i, num) in enumerate(num_top.items())}


def _cuts(table: RequestTable, rows_R: np.ndarray, which: np.ndarray, upload: Upload) -> Cuts:
    rows = rows_R[which]
    top_k, top_p = table.top_k[rows], table.top_p[rows]
    if (top_p[top_k <= 0] < 1.0).any():
        num_candidates = np.iinfo(np.int64).max
    else:
        num_candidates = max(int(top_k.max()), 0)
    return Cuts(upload(which), upload(top_k), upload(top_p), upload(table.min_p[rows]), num_candidates)


def _describe(logits_V: Tensor, *, cut: bool) -> str:
    # -inf is also the mark of a token that was cut
    num_nan, num_inf = int(logits_V.isnan().sum()), int((logits_V.isposinf() if cut else logits_V.isinf()).sum())
    return f"{num_nan} NaN and {num_inf} infinite of {len(logits_V)} logits"
