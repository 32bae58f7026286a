"""Reference counts and eviction of cache blocks."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.engine.blocks import BlockPool
from miles.engine.prefix import PrefixIndex


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, index=PrefixIndex(num_blocks=num_blocks, page_size=2))


def test_idle_blocks_go_last_and_the_oldest_first() -> None:
    pool = make_pool(6)
    blocks = [pool.allocate() for _ in range(5)]
    ids = np.arange(6)
    pool.index.insert(ids, np.array(blocks[:3]))
    pool.release([blocks[2], blocks[0]])
    pool.release([blocks[4], blocks[1]])
    assert pool.num_free == 4
    assert [pool.allocate() for _ in range(4)] == [blocks[4], blocks[2], blocks[0], blocks[1]]
    assert pool.index.match(ids) == ([], 0)


def test_an_idle_block_comes_back_when_it_is_shared() -> None:
    pool = make_pool(3)
    block = pool.allocate()
    pool.index.insert(np.arange(2), np.array([block]))
    pool.release([block])
    pool.share([block])
    other = pool.allocate()
    assert other != block and pool.num_free == 0
    assert pool.index.match(np.arange(2)) == ([block], 2)


def test_a_flush_forgets_everything_but_the_users() -> None:
    pool = make_pool(4)
    used, idle = pool.allocate(), pool.allocate()
    pool.index.insert(np.arange(4), np.array([used, idle]))
    pool.release([idle])
    pool.flush(1)
    assert pool.index.match(np.arange(4)) == ([], 0)
    assert pool.num_free == 2
    assert used not in {pool.allocate(), pool.allocate()}


def test_one_release_too_many_is_a_bug() -> None:
    pool = make_pool(3)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])


@given(seed=st.integers(0, 10_000))
def test_counts_match_a_plain_counter(seed: int) -> None:
    rng, pool, users = random.Random(seed), make_pool(9), Counter()
    for step in range(200):
        action = rng.choice(["allocate", "share", "release", "insert"])
        used = sorted(+users)
        if action == "allocate" and pool.num_free:
            block = pool.allocate()
            assert block != 0 and not users[block]
            users[block] += 1
        elif action == "share" and used:
            block = rng.choice(used)
            pool.share([block])
            users[block] += 1
        elif action == "release" and used:
            block = rng.choice(used)
            users[block] -= 1
            assert pool.release([block]) == ([] if users[block] else [block])
        elif action == "insert" and used:
            pool.index.insert(np.array([step, step]), np.array([rng.choice(used)]))
        assert pool.num_free == 8 - len(+users)
        assert pool.references.tolist() == [users[block] for block in range(9)]
