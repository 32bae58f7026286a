"""Decides who runs: admission in order of arrival, blocks for those who run, prompt chunks under a token budget."""

from __future__ import annotations

from collections import deque

import numpy as np

from miles.engine.batch import Plan
from miles.engine.blocks import BlockPool
from miles.engine.request import LiveRequest, RequestTable


class Scheduler:
    """Owns the queue, the rows of the table and the blocks.

    Every choice depends on the order of arrival and on the steps so far, never on time. Requests with equal prompts
    that run together are prefilled once: the first leads, the others wait for it and then share its blocks; a shared
    block is copied when one of them has to write into it.
    """

    def __init__(
        self,
        *,
        table: RequestTable,
        pool: BlockPool,
        prefill_tokens: int,
        share_prompts: bool,
        longest_first: bool = False,
    ) -> None:
        self.table, self.pool = table, pool
        self.waiting: deque[LiveRequest] = deque()
        self.num_retractions = 0
        self.version = 0
        self._prefill_tokens = prefill_tokens
        self._share_prompts = share_prompts
        # A GPU should start with the most work; the plain attention of a CPU wants neighbours by growing length.
        self._length_sign = -1 if longest_first else 1
        self._leaders: dict[bytes, int] = {}
        self._followers: dict[int, list[int]] = {}

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can run."""
        self._admit()
        copies = self._grow()
        table = self.table
        rows = np.flatnonzero(table.occupied & ~table.waits & (table.length < table.limit))
        num_pending = table.length[rows] - table.computed[rows]
        decoding = rows[num_pending == 1]
        # Answers of a prompt lie together, so that a GPU finds what they share in its second-level cache.
        decoding = decoding[np.lexsort((table.order[decoding], self._length_sign * table.length[decoding]))]
        chunks = self._chunks(rows[num_pending > 1])
        if not len(decoding) and not chunks:
            return None
        rows_B = np.concatenate((decoding, np.array([row for row, _ in chunks], dtype=np.int64)))
        num_new_B = np.ones(len(rows_B), dtype=np.int64)
        num_new_B[len(decoding) :] = [num_tokens for _, num_tokens in chunks]
        last_B = np.cumsum(num_new_B) - 1
        draws_B = table.computed[rows_B] + num_new_B == table.length[rows_B]
        drawn_rows, drawn_from = rows_B[draws_B], last_B[draws_B]
        if self._followers:
            sizes = [1 + len(self._followers.get(row, ())) for row in drawn_rows.tolist()]
            drawn_from = np.repeat(drawn_from, sizes)
            drawn_rows = np.array(
                [each for row in drawn_rows.tolist() for each in (row, *self._followers.get(row, ()))], dtype=np.int64
            )
        return Plan(rows_B, num_new_B, copies, drawn_rows, drawn_from)

    @property
    def must_retract(self) -> bool:
        """Whether blocks run out in the next step."""
        return len(self._rows_without_a_place()[0]) > self.pool.num_free

    def advance(self, plan: Plan) -> None:
        """Note that the step's keys and values are in the cache; share prompts that are now complete."""
        table = self.table
        before_B = table.computed[plan.rows_B]
        after_B = before_B + plan.num_new_B
        table.computed[plan.rows_B] = after_B
        prompt_B = table.prompt_len[plan.rows_B]
        for row in plan.rows_B[(before_B < prompt_B) & (after_B >= prompt_B)].tolist():
            self._prompt_done(row)

    def release(self, row: int) -> LiveRequest:
        """End a row; its full blocks stay known to the prefix index."""
        table = self.table
        blocks = table.blocks[row, : table.num_blocks[row]]
        if self._share_prompts and table.cache_version[row] == self.version:
            num_full = table.computed[row] // table.page_size * table.page_size
            self.pool.index.insert(table.tokens[row, :num_full], blocks)
        self.pool.release(blocks[::-1].tolist())
        return self._leave(row)

    def release_damaged(self, row: int) -> tuple[LiveRequest, list[int]]:
        """End a row whose keys and values are not finite: nothing of it is found again. Also returns the blocks that
        must be cleared before they are used again."""
        blocks = self.table.blocks[row, : self.table.num_blocks[row]].tolist()
        for block in blocks:
            self.pool.index.forget(block)
        unused = self.pool.release(blocks)
        return self._leave(row), unused

    def retract(self, row: int) -> None:
        """Back to its place in the queue; keys and values are computed again when its turn comes."""
        self.num_retractions += 1
        self._requeue(self.release(row))

    def retract_all(self) -> None:
        for row in self.table.rows()[::-1].tolist():
            if self.table.occupied[row]:
                self.retract(row)

    def withdraw(self, request_ids: set[int] | None) -> list[LiveRequest]:
        """Take these requests, or all, out of the rows and the queue."""
        withdrawn = []
        for row in self.table.rows().tolist():
            live = self.table.live[row]
            if live is not None and (request_ids is None or live.request.request_id in request_ids):
                withdrawn.append(self.release(row))
        staying: deque[LiveRequest] = deque()
        for live in self.waiting:
            wanted = request_ids is None or live.request.request_id in request_ids
            (withdrawn if wanted else staying).append(live)
        self.waiting = staying
        return withdrawn

    def set_version(self, version: int) -> None:
        """New weights: keys and values computed so far are not found again."""
        self.version = version
        self.pool.flush(version)
        self._leaders.clear()

    def _admit(self) -> None:
        """Give rows to waiting requests while rows, blocks and the prefill budget last."""
        table, pool = self.table, self.pool
        num_pending = (table.length - table.computed)[table.occupied & ~table.waits]
        budget = self._prefill_tokens - int(num_pending[num_pending > 1].sum())
        while self.waiting and table.num_free_rows:
            live = self.waiting[0]
            # every running row can need a block before the next admission
            num_reserved = table.num_rows - table.num_free_rows
            fresh = not len(live.output_ids)
            if fresh and (leader := self._leaders.get(live.prompt_key)) is not None:
                if pool.num_free <= num_reserved:
                    return
                self._follow(self.waiting.popleft(), leader)
                continue
            if budget <= 0:
                return
            ids = np.concatenate((live.prompt, live.output_ids))
            shared, num_cached = pool.index.match(ids) if self._share_prompts else ([], 0)
            num_missing = -(-len(ids) // table.page_size) - len(shared)
            if pool.num_free - pool.num_idle(shared) - num_missing < num_reserved:
                return
            self.waiting.popleft()
            row = table.put(live, cache_version=self.version)
            pool.share(shared)
            for block in (*shared, *(pool.allocate() for _ in range(num_missing))):
                table.add_block(row, block)
            # the last token is computed in any case: its logits give the next one
            table.computed[row] = min(num_cached, len(ids) - 1)
            budget -= len(ids) - int(table.computed[row])
            if fresh:
                live.cached_tokens = int(table.computed[row])
                if self._share_prompts:
                    self._leaders[live.prompt_key] = row

    def _follow(self, live: LiveRequest, leader: int) -> None:
        """Give a row to a request that waits for another row to prefill the same prompt."""
        row = self.table.put(live, cache_version=self.version)
        self.table.waits[row] = True
        live.cached_tokens = len(live.prompt)
        self._followers.setdefault(leader, []).append(row)

    def _grow(self) -> list[tuple[int, int]]:
        """Give every decoding row a block to write its token's key and value to; returns the blocks to copy first.

        The youngest requests are retracted when blocks run out. They come last here, so none of them has a copy yet.
        """
        table = self.table
        rows, places = self._rows_without_a_place()
        oldest_first = np.argsort(table.order[rows])
        copies: list[tuple[int, int]] = []
        for row, place in zip(rows[oldest_first].tolist(), places[oldest_first].tolist(), strict=True):
            while table.occupied[row] and not self._make_writable(row, place, copies):
                self.retract(int(table.rows()[-1]))
        return copies

    def _rows_without_a_place(self) -> tuple[np.ndarray, np.ndarray]:
        """Decoding rows that cannot write their token's key and value yet, and the places of the blocks in question."""
        table, pool = self.table, self.pool
        num_pending = table.length - table.computed
        rows = np.flatnonzero(table.occupied & ~table.waits & (num_pending == 1) & (table.length < table.limit))
        places = table.computed[rows] // table.page_size
        blocks = table.blocks[rows, places]
        missing = places >= table.num_blocks[rows]
        needy = missing | (pool.references[blocks] > 1) | pool.index.full[blocks]
        return rows[needy], places[needy]

    def _make_writable(self, row: int, place: int, copies: list[tuple[int, int]]) -> bool:
        """Whether the row's block at this place is now its own; False when that needs a block and none is free."""
        table, pool = self.table, self.pool
        if place >= table.num_blocks[row]:
            if pool.num_free:
                table.add_block(row, pool.allocate())
                return True
            return False
        block = int(table.blocks[row, place])
        is_shared, is_known = pool.references[block] > 1, pool.index.full[block]
        if (is_shared or is_known) and pool.num_free:
            table.blocks[row, place] = copy = pool.allocate()
            copies.append((block, copy))
            pool.release([block])
        elif is_known and not is_shared:
            pool.index.forget(block)
        return bool(pool.references[table.blocks[row, place]] == 1)

    def _chunks(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """Rows that are being prefilled and how many tokens each computes now, oldest first within the budget."""
        chunks, budget = [], self._prefill_tokens
        for row in rows[np.argsort(self.table.order[rows])].tolist():
            num_tokens = min(int(self.table.length[row] - self.table.computed[row]), budget)
            if num_tokens == 0:
                break
            chunks.append((row, num_tokens))
            budget -= num_tokens
        return chunks

    def _prompt_done(self, row: int) -> None:
        """Let the prefix index and the rows that wait know the blocks of a complete prompt."""
        table, pool = self.table, self.pool
        live = table.live[row]
        assert live is not None, "a scheduled row is in use"
        if self._leaders.get(live.prompt_key) == row:
            del self._leaders[live.prompt_key]
        num_blocks = -(-len(live.prompt) // table.page_size)
        blocks = table.blocks[row, :num_blocks]
        if self._share_prompts and table.cache_version[row] == self.version:
            pool.index.insert(live.prompt, blocks)
        for follower in self._followers.pop(row, ()):
            pool.share(blocks.tolist())
            table.blocks[follower, :num_blocks] = blocks
            table.num_blocks[follower] = num_blocks
            table.computed[follower] = len(live.prompt)
            table.waits[follower] = False

    def _requeue(self, live: LiveRequest) -> None:
        place = 0
        while place < len(self.waiting) and self.waiting[place].order < live.order:
            place += 1
        self.waiting.insert(place, live)

    def _leave(self, row: int) -> LiveRequest:
        """Take a row out of the table and out of its group of equal prompts."""
        live = self.table.take(row)
        if self._leaders.get(live.prompt_key) == row:
            del self._leaders[live.prompt_key]
        for follower in self._followers.pop(row, ()):
            self._requeue(self.table.take(follower))
        for followers in self._followers.values():
            if row in followers:
                followers.remove(row)
        return live
