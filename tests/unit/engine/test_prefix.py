"""What the prefix index finds, against comparing texts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles.engine.prefix import PrefixIndex

TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=8)


def common(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@given(texts=TEXTS, query=st.lists(st.integers(0, 1), min_size=1, max_size=14), page_size=st.integers(1, 4))
def test_finds_the_longest_known_beginning(texts: list[list[int]], query: list[int], page_size: int) -> None:
    index = PrefixIndex(num_blocks=200, page_size=page_size)
    contents: dict[int, list[int]] = {}  # all the text up to the end of a block
    next_block = 1
    for text in texts:
        blocks = []
        for start in range(0, len(text), page_size):
            contents[next_block] = text[: start + page_size]
            blocks.append(next_block)
            next_block += 1
        index.insert(np.array(text), np.array(blocks))
    found, num_tokens = index.match(np.array(query))
    expected = max(common(query, text) // page_size * page_size for text in texts)
    if query in texts:  # the last block too, though it is not full
        expected = len(query)
    full = len(query) // page_size * page_size
    if any(common(query, text) >= full and text[full:] == query[full:] for text in texts):
        expected = len(query)
    assert num_tokens == expected
    assert len(found) == -(-num_tokens // page_size)
    for place, block in enumerate(found):
        end = min((place + 1) * page_size, num_tokens)
        assert contents[block][:end] == query[:end]


def test_the_first_block_of_a_text_stays_its_block() -> None:
    index = PrefixIndex(num_blocks=9, page_size=2)
    index.insert(np.array([1, 2, 3]), np.array([5, 6]))
    index.insert(np.array([1, 2, 3]), np.array([7, 8]))
    assert index.match(np.array([1, 2, 3])) == ([5, 6], 3)
    assert 7 not in index


def test_a_forgotten_block_ends_the_chain() -> None:
    index = PrefixIndex(num_blocks=9, page_size=2)
    index.insert(np.array([1, 2, 3, 4, 5]), np.array([5, 6, 7]))
    index.forget(6)
    assert index.match(np.array([1, 2, 3, 4, 5])) == ([5], 2)
    assert not index.full[6] and index.full[5] and not index.full[7]


def test_a_half_full_block_can_become_full() -> None:
    index = PrefixIndex(num_blocks=9, page_size=4)
    index.insert(np.array([1, 2]), np.array([3]))
    assert not index.full[3]
    index.insert(np.array([1, 2, 8, 9]), np.array([3]))
    assert index.full[3]
    assert index.match(np.array([1, 2])) == ([3], 2)
    index.forget(3)
    assert index.match(np.array([1, 2])) == ([], 0) and 3 not in index


def test_the_version_is_part_of_the_key() -> None:
    index = PrefixIndex(num_blocks=9, page_size=2)
    index.insert(np.array([1, 2]), np.array([5]))
    first_root = index.match(np.array([1, 2]))
    index.flush(1)
    assert first_root == ([5], 2) and index.match(np.array([1, 2])) == ([], 0)
    index.insert(np.array([1, 2]), np.array([6]))
    assert index.match(np.array([1, 2])) == ([6], 2)
