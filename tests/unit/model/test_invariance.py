"""What a start finds out about a device: here devices whose products depend on the number of rows."""

import pytest
import torch.nn.functional as F

from miles.errors import ConfigError
from miles.model import invariance
from miles.model.invariance import differing, require_invariance
from miles.ops import matmul, numerics
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
