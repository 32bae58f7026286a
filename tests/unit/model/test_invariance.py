"""What a start finds out about a device: here devices whose products depend on the number of rows."""

import pytest
import torch
import torch.nn.functional as F

from miles.errors import ConfigError
from miles.model import invariance
from miles.model.context import packed_context
from miles.model.invariance import differing, require_invariance
from miles.ops import matmul, numerics
from miles.ops.logprob import token_log_probs
from miles.ops.numerics import CpuTiles
from tests.unit.engine.tiny import make_model


@pytest.fixture(autouse=True)
def nothing_proven(monkeypatch):
    monkeypatch.setattr(invariance, "_proven", {})
    monkeypatch.setattr(numerics, "_tiles", CpuTiles())


def uneven(x, weight, bias=None):
    """A product that begins to depend on the number of rows when tiles are small."""
    rows = 0 if numerics.cpu_tiles().rows >= 32 else len(x)
    return F.linear(matmul.pad_rows(x, 64), weight, bias)[: len(x)] * (1 + rows * 2**-20)


def test_this_device_keeps_to_it():
    assert list(differing(make_model())) == []


@torch.no_grad()
def test_a_sequence_has_the_same_bits_in_any_packing():
    """Alone, between others, and in another order: the whole model and the head, as the trainer runs them."""
    model = make_model(num_layers=2, vocab_size=300)
    require_invariance(model, flag="--deterministic-mode")
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(300, (n,), generator=generator) for n in (40, 3, 17, 90, 1, 64, 33)]

    def scores(order):
        ids_T = torch.cat([sequences[i] for i in order])
        with numerics.invariant():
            hidden_TD = model(ids_T, packed_context([len(sequences[i]) for i in order], device="cpu"))
            log_probs_T, _ = token_log_probs(hidden_TD, model.head_weight, ids_T.roll(-1), chunk_size=16)
        parts = log_probs_T.split([len(sequences[i]) for i in order])
        return {i: part[:-1] for i, part in zip(order, parts, strict=True)}  # the last target is the next sequence's

    expected = scores(range(7))
    for packing in ([[0], [1], [2], [3], [4], [5], [6]], [[6, 3, 1], [5, 0], [4, 2]], [[5, 4, 3, 2, 1, 0, 6]]):
        for order in packing:
            assert all(torch.equal(part, expected[i]) for i, part in scores(order).items())


def test_a_larger_tile_is_taken(monkeypatch):
    monkeypatch.setattr(matmul, "_in_whole_tiles", uneven)
    require_invariance(make_model(), flag="--true-on-policy-mode")
    assert numerics.cpu_tiles().rows == 32


def test_without_a_tile_that_does_the_flag_is_refused(monkeypatch):
    monkeypatch.setattr(matmul, "_in_whole_tiles", uneven)
    monkeypatch.setattr(invariance, "CANDIDATES", (CpuTiles(16),))
    with pytest.raises(ConfigError, match=r"--true-on-policy-mode: .*the matrix product attention\.qkv.*a layer"):
        require_invariance(make_model(), flag="--true-on-policy-mode")
    assert numerics.cpu_tiles() == CpuTiles(), "as before"


def test_a_second_model_does_not_take_tiles_from_the_first(monkeypatch):
    monkeypatch.setattr(matmul, "_in_whole_tiles", uneven)
    require_invariance(make_model(), flag="x")
    monkeypatch.undo()
    monkeypatch.setattr(numerics, "_tiles", CpuTiles(rows=32))
    require_invariance(make_model(vocab_size=50), flag="x")
    assert numerics.cpu_tiles().rows == 32
