"""A request from its arrival to its result, and the table of those that are running.

Shapes: R rows of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from miles.text.detokenize import Detokenizer
from miles.types import FinishReason, GenerationRequest, GenerationResult

UNKNOWN = -1  # a token that has been drawn on the device and is not on the host yet
_NO_IDS = np.zeros(0, dtype=np.int64)
_NO_LOG_PROBS = np.zeros(0, dtype=np.float32)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has no result yet. What it has written is up to date only while it is not in the table."""

    request: GenerationRequest
    order: int  # arrivals are counted; the older of two requests keeps its blocks
    prompt: np.ndarray
    prompt_key: bytes  # equal prompts have equal keys
    limit: int  # prompt and answer together, in tokens
    stop_set: int  # row of `StopSets`
    detokenizer: Detokenizer | None = None
    output_ids: np.ndarray = field(default_factory=lambda: _NO_IDS)
    log_probs: np.ndarray = field(default_factory=lambda: _NO_LOG_PROBS)
    versions: np.ndarray = field(default_factory=lambda: _NO_IDS)
    kept: list[np.ndarray] | None = None  # None unless asked for and something can be cut
    top: list[tuple[np.ndarray, np.ndarray]] | None = None  # None unless asked for
    cached_tokens: int = 0

    def result(self, reason: FinishReason, *, error: str | None = None) -> GenerationResult:
        """The final record; decodes the text, once."""
        output_ids = self.output_ids.tolist()
        text = ""
        if self.detokenizer is not None:
            self.detokenizer.append(output_ids[self.detokenizer.num_tokens :])
            text = self.detokenizer.text
        return GenerationResult(
            request_id=self.request.request_id,
            output_ids=output_ids,
            log_probs=self.log_probs.tolist(),
            weight_versions=self.versions.tolist(),
            finish_reason=reason,
            text=text,
            cached_tokens=self.cached_tokens,
            kept_token_ids=self.kept,
            top_token_ids=None if self.top is None else [ids for ids, _ in self.top],
            top_log_probs=None if self.top is None else [log_probs for _, log_probs in self.top],
            error=error,
        )


class StopSets:
    """Which token ids end an answer: one row of a V-wide table for each distinct set in use, so that a step looks all
    its tokens up at once. A row that nobody uses any more is taken for the next set."""

    def __init__(self, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._rows: dict[frozenset[int], int] = {}
        self._users: list[int] = []  # of each row
        self._table = np.zeros((0, vocab_size), dtype=bool)

    def row_for(self, stop_token_ids: Sequence[int], *, ignore_eos: bool) -> int:
        stop = frozenset(stop_token_ids) | (frozenset() if ignore_eos else self._eos)
        row = self._rows.get(stop)
        if row is None:
            if 0 not in self._users:
                self._users.append(0)
                self._table = np.concatenate((self._table, np.zeros((1, self._vocab_size), dtype=bool)))
            row = self._users.index(0)
            self._rows = {known: other for known, other in self._rows.items() if other != row} | {stop: row}
            self._table[row] = False
            self._table[row, [token_id for token_id in stop if 0 <= token_id < self._vocab_size]] = True
        self._users[row] += 1
        return row

    def give_back(self, row: int) -> None:
        """One user less."""
        self._users[row] -= 1

    def hits(self, rows_R: np.ndarray, tokens_R: np.ndarray) -> np.ndarray:
        return self._table[rows_R, tokens_R]


class RequestTable:
    """The running requests as columns, one row each, so that a step handles all of them in a few array operations.

    `length` counts the known tokens of a request (prompt and answer so far), `computed` those whose keys and values
    are in the cache. A row with one token to compute is decoding, one with more is being prefilled, and one at its
    `limit` computes nothing more. Rows that `waits` marks get their first token from the prefill of another row with
    the same prompt.
    """

    def __init__(self, *, num_rows: int, page_size: int) -> None:
        self.page_size = page_size
        self.live: list[LiveRequest | None] = [None] * num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self.occupied, self.waits, self.greedy, self.cut = np.zeros((4, num_rows), dtype=bool)
        self.scanned, self.needs_logits = np.zeros((2, num_rows), dtype=bool)
        self.prompt_len, self.length, self.computed, self.limit = np.zeros((4, num_rows), dtype=np.int64)
        self.order, self.num_blocks, self.stop_set, self.key = np.zeros((4, num_rows), dtype=np.int64)
        self.cache_version, self.top_k = np.zeros((2, num_rows), dtype=np.int64)
        self.temperature, self.top_p, self.min_p = np.zeros((3, num_rows), dtype=np.float32)
        self.tokens, self.versions = np.zeros((2, num_rows, 0), dtype=np.int64)
        self.log_probs = np.zeros((num_rows, 0), dtype=np.float32)
        self.blocks = np.zeros((num_rows, 0), dtype=np.int64)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_rows(self) -> int:
        return len(self.live)

    def rows(self) -> np.ndarray:
        """All running rows, oldest request first."""
        rows_R = np.flatnonzero(self.occupied)
        return rows_R[np.argsort(self.order[rows_R])]

    def put(self, live: LiveRequest, *, cache_version: int) -> int:
        """Give the request a row, without blocks and with nothing computed."""
        self._widen(live.limit)
        row, sampling = self._free_rows.pop(), live.request.sampling
        prompt_len, length = len(live.prompt), len(live.prompt) + len(live.output_ids)
        self.live[row] = live
        self.occupied[row], self.waits[row] = True, False
        self.greedy[row] = sampling.temperature == 0.0
        self.cut[row] = sampling.cuts_tokens
        self.needs_logits[row] = sampling.cuts_tokens or live.top is not None
        self.scanned[row] = bool(sampling.stop) or live.kept is not None or live.top is not None
        self.prompt_len[row], self.length[row], self.computed[row], self.limit[row] = prompt_len, length, 0, live.limit
        self.order[row], self.num_blocks[row], self.stop_set[row] = live.order, 0, live.stop_set
        self.key[row : row + 1] = np.array([live.request.noise_key % 2**64], dtype=np.uint64).view(np.int64)
        self.cache_version[row] = cache_version
        self.temperature[row] = sampling.temperature or 1.0
        self.top_k[row], self.top_p[row], self.min_p[row] = sampling.top_k, sampling.top_p, sampling.min_p
        self.tokens[row, :prompt_len] = live.prompt
        self.tokens[row, prompt_len:length] = live.output_ids
        self.log_probs[row, prompt_len:length] = live.log_probs
        self.versions[row, prompt_len:length] = live.versions
        return row

    def take(self, row: int) -> LiveRequest:
        """Free the row; the request keeps what it has written. Its blocks are the caller's business."""
        live, written = self.live[row], slice(self.prompt_len[row], self.length[row])
        assert live is not None, f"row {row} is not in use"
        live.output_ids = self.tokens[row, written].copy()
        assert (live.output_ids != UNKNOWN).all(), "a request leaves the table while tokens of it are on their way"
        live.log_probs = self.log_probs[row, written].copy()
        live.versions = self.versions[row, written].copy()
        self.live[row] = None
        self.occupied[row] = self.waits[row] = False
        self.blocks[row, : self.num_blocks[row]] = 0
        self._free_rows.append(row)
        return live

    def add_block(self, row: int, block: int) -> None:
        self.blocks[row, self.num_blocks[row]] = block
        self.num_blocks[row] += 1

    def reserve(self, rows_R: np.ndarray) -> None:
        """One more token for each row, which `fill` will name."""
        self.tokens[rows_R, self.length[rows_R]] = UNKNOWN
        self.length[rows_R] += 1

    def fill(
        self, rows_R: np.ndarray, places_R: np.ndarray, tokens_R: np.ndarray, log_probs_R: np.ndarray, version: int
    ) -> None:
        """Name a token of each row."""
        self.tokens[rows_R, places_R] = tokens_R
        self.log_probs[rows_R, places_R] = log_probs_R
        self.versions[rows_R, places_R] = version

    def _widen(self, num_tokens: int) -> None:
        missing = num_tokens - self.tokens.shape[1]
        if missing > 0:
            missing = max(missing, self.tokens.shape[1])  # at least double, so that widening stays rare
            wider = ((0, 0), (0, missing))
            self.tokens, self.versions = np.pad(self.tokens, wider), np.pad(self.versions, wider)
            self.log_probs = np.pad(self.log_probs, wider)
            num_blocks = -(-self.tokens.shape[1] // self.page_size)
            self.blocks = np.pad(self.blocks, ((0, 0), (0, num_blocks - self.blocks.shape[1])))
