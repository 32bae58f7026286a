from __future__ import annotations

import dataclasses
import random
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.plan.memory import default_chunk_size
from miles.trainer.packing import canonical_order, pack


@given(
    lengths=st.lists(st.integers(0, 60), max_size=40),
    power=st.integers(0, 2),
    max_tokens=st.integers(1, 100),
    max_samples=st.none() | st.integers(1, 5),
)
def test_every_sample_once_and_within_the_budget(
    lengths: list[int], power: int, max_tokens: int, max_samples: int | None
) -> None:
    costs = [length**power for length in lengths]
    bins = pack(lengths, costs, max_tokens=max_tokens, max_samples=max_samples)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    for members in bins:
        assert members == sorted(members)
        assert len(members) == 1 or sum(lengths[i] for i in members) <= max_tokens
        assert max_samples is None or len(members) <= max_samples


def test_a_sample_longer_than_the_budget_is_alone_and_does_not_scatter_the_others() -> None:
    lengths = [5, 100, 5, 5, 5]
    assert pack(lengths, lengths, max_tokens=10) == [[0, 3], [1], [2, 4]]


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_are_few_and_balanced(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(20, 140) for _ in range(128)]
    totals = [sum(lengths[i] for i in members) for members in pack(lengths, lengths, max_tokens=1500)]
    assert len(totals) <= -(-sum(lengths) // 1500) + 1
    assert max(totals) - min(totals) <= 20


@pytest.mark.parametrize("seed", range(5))
def test_what_is_balanced_is_the_cost(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [min(round(draw.lognormvariate(7.8, 1)), 16_384) for _ in range(256)]
    costs = [length * (6_000 + length) for length in lengths]
    by_tokens, by_cost = (
        [sum(costs[i] for i in members) for members in pack(lengths, of, max_tokens=40_000)] for of in (lengths, costs)
    )
    assert len(by_cost) <= len(by_tokens) + 1
    assert max(by_cost) / min(by_cost) < 1.11 < 1.17 < max(by_tokens) / min(by_tokens)


@pytest.mark.parametrize("shape", ["halves", "thirds", "few a micro-batch"])
def test_thousands_of_samples_are_packed_in_few_tries(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    lengths, most = [501 if shape == "halves" else 334] * 4000, None
    if shape == "few a micro-batch":
        lengths, most = [min(round(draw.lognormvariate(4, 1.5)), 1000) for _ in range(4000)], 12
    costs = [length * (400 + length) for length in lengths]
    tried = Mock(side_effect=np.full)  # the room in the micro-batches of one try
    monkeypatch.setattr(np, "full", tried)
    bins = pack(lengths, costs, max_tokens=1000, max_samples=most)
    assert tried.call_count <= {"halves": 1, "thirds": 20, "few a micro-batch": 8}[shape]
    at_least = max(-(-sum(lengths) // 1000), sum(length > 500 for length in lengths), -(-4000 // (most or 4000)))
    if shape == "thirds":  # only two fit together
        at_least = 2000
    assert len(bins) <= 1.1 * at_least


def test_canonical_order_is_by_group_then_sample(make_samples) -> None:
    samples = make_samples(num_groups=3, group_size=4)
    shuffled = random.Random(1).sample(samples, len(samples))
    assert canonical_order(shuffled) == samples


def test_default_chunk_holds_the_logits_that_fit(make_model) -> None:
    spec = dataclasses.replace(make_model().spec, vocab_size=1000)
    assert default_chunk_size(spec, memory_bytes=4 * 1000 * 2000) == 1792  # in steps of 256
    assert [default_chunk_size(spec, memory_bytes=size) for size in (1, 2**40)] == [256, 4096]
