"""The path of a GPU with invariant operations, interpreted: the engine's log-probs equal the trainer's, whatever the
batch. The interpreter multiplies with NumPy, whose rows get bits by their place in a tile; so products are made in
float64 here, and what is proven is that both sides cut and join alike. That the instructions of a device are one chain
is proven on the device (`tests/gpu/test_true_on_policy.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.ops.references import relative_error, require_interpreter

require_interpreter()

from triton.runtime import interpreter  # noqa: E402

from miles.config.flags import with_values  # noqa: E402
from miles.config.sections import RunConfig  # noqa: E402
from miles.loop import exactness  # noqa: E402
from miles.model.context import packed_context  # noqa: E402
from miles.ops import kernels, triton_matmul  # noqa: E402
from miles.ops.logprob import token_log_probs  # noqa: E402
from miles.ops.numerics import invariant  # noqa: E402
from miles.ops.triton_matmul import TILES, row_product, tile_for  # noqa: E402
from tests.unit.engine.tiny import make_model  # noqa: E402


@pytest.mark.parametrize("tile", TILES[2:])
def test_product(tile: triton_matmul.Tile) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(70, 40), torch.randn(50, 40), torch.randn(50)
    expected = x.double() @ weight.double().T
    assert relative_error(row_product(x, weight, tile=tile), expected) < 1e-6
    assert relative_error(row_product(x, weight, bias, tile=tile), expected + bias) < 1e-6
    assert row_product(x[:0], weight).shape == (0, 50)


def test_tiles_fill_the_device() -> None:
    assert tile_for(8192, 6144) == tile_for(1000, 4096) == TILES[1]
    assert tile_for(256, 151936) == TILES[0] and tile_for(256, 151936, has_large_tiles=False) == TILES[1]
    assert tile_for(256, 4096) == TILES[2] and tile_for(64, 6144) == TILES[3]
    assert tile_for(256, 1024) == TILES[4]
    assert tile_for(1, 1024) == tile_for(16, 6144) == TILES[5]


def dot_in_float64(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    product = np.matmul(a.data, b.data, dtype=np.float64) + total.data
    return interpreter.TensorHandle(product.astype(total.data.dtype), total.dtype.scalar)


def test_engine_equals_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_float64)
    monkeypatch.setattr(kernels, "on_cpu_too", True)
    monkeypatch.setitem(exactness.SIZES, "cpu", ((18, 3), 4))
    monkeypatch.setattr(exactness, "ANSWERS_PER_PROMPT", 2)
    model = make_model(head_dim=32, num_heads=2, num_kv_heads=1, num_layers=1, qkv_bias=True)
    config = with_values(RunConfig(), {"true_on_policy_mode": True, "rollout_temperature": 0.8})
    monkeypatch.setattr("miles.engine.core.require_invariance", lambda model, flag: None)  # slow when interpreted
    found = exactness.compare(model, config)
    assert (found.num_differ, found.max_gap) == (0, 0.0)
    assert found.num_tokens >= 6


def test_gradients_are_those_of_the_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(head_dim=32, num_heads=2, num_kv_heads=1, num_layers=1, qkv_bias=True)
    ids = torch.randint(0, 37, (10,), generator=torch.Generator().manual_seed(0))

    def gradients() -> list[torch.Tensor]:
        hidden = model(ids, packed_context([3, 1, 6], device="cpu"))
        log_probs, _ = token_log_probs(hidden, model.head_weight, ids.roll(-1), temperature=0.9)
        model.zero_grad()
        log_probs.cos().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    monkeypatch.setattr(kernels, "on_cpu_too", True)
    with invariant():
        actual = gradients()
    assert all(relative_error(a, b) < 1e-4 for a, b in zip(actual, expected, strict=True))
