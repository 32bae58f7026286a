"""Layers that are computed again: the same bits, fewer bytes, as few layers as the budget allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from miles.model.activations import ActivationBudget, layer_numbers
from miles.model.context import packed_context
from miles.model.decoder import Decoder
from tests.unit.engine.tiny import make_model

LENGTHS = [7, 30, 1, 12]


def backward(model: Decoder, num_recomputed: int) -> tuple[Tensor, list[Tensor], int]:
    """Hidden states, gradients, and bytes that the forward kept besides the parameters."""
    model.num_recomputed = lambda num_tokens: num_recomputed
    ids_T = torch.arange(sum(LENGTHS)) * 7 % model.spec.vocab_size
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        hidden_TD = model(ids_T, packed_context(LENGTHS, device="cpu"))
    scale_TD = torch.linspace(-1, 1, hidden_TD.numel()).view_as(hidden_TD)
    gradients = list(torch.autograd.grad((hidden_TD * scale_TD).sum(), list(model.parameters()), allow_unused=True))
    return hidden_TD.detach(), gradients, sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_whatever_is_computed_again(dtype: torch.dtype) -> None:
    model = make_model(num_layers=3).to(dtype)
    hidden_TD, gradients, _ = backward(model, 0)
    for num_recomputed in (1, 3):
        again_TD, again, _ = backward(model, num_recomputed)
        assert torch.equal(again_TD, hidden_TD)
        assert all(torch.equal(a, b) for a, b in zip(again, gradients, strict=True))


def test_each_layer_that_is_computed_again_keeps_less() -> None:
    """Hooks see what a recomputed layer keeps only when it is an input of another node, so the fall is what counts."""
    model = make_model(num_layers=3)
    kept = [backward(model, n)[2] for n in range(4)]
    assert kept[0] > kept[1] > kept[2] > kept[3]
    assert kept[0] - kept[1] > 0.7 * 4 * sum(LENGTHS) * (layer_numbers(model.spec) - 2 * model.spec.hidden_size)


def test_nothing_is_computed_again_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(num_layers=2)
    model.num_recomputed = lambda num_tokens: pytest.fail("asked")
    with torch.no_grad():
        model(torch.tensor([1, 2]), packed_context([2], device="cpu"))


def budget(make: Callable[..., Decoder] = make_model, **changes: int | None) -> ActivationBudget:
    spec = dataclasses.replace(
        make().spec, hidden_size=100, intermediate_size=200, num_layers=10, num_heads=4, num_kv_heads=2, head_dim=25
    )
    return ActivationBudget(spec, **{"bytes_per_number": 2, "max_bytes": 10**6, **changes})


def test_numbers_of_a_layer_by_hand() -> None:
    """Two norms and their two results 400, projection 200, queries, keys and values 200, the attention's result 100,
    sums 8, gate and up 400, their product 200."""
    assert layer_numbers(budget().spec) == 400 + 200 + 200 + 100 + 8 + 400 + 200 == 1508


def test_as_few_layers_as_the_budget_allows() -> None:
    tokens = 100
    full, inputs = 2 * tokens * 1508, 2 * tokens * 200
    for expected in range(11):
        needed = (10 - expected) * full + expected * inputs
        assert budget(max_bytes=needed).recomputed_for(tokens) == expected
        if expected:
            assert budget(max_bytes=needed + full - inputs - 1).recomputed_for(tokens) == expected
    assert budget(max_bytes=1).recomputed_for(tokens) == 10  # it cannot do more
    assert budget(num_recomputed=4).recomputed_for(1) == 4
    assert budget(num_recomputed=40).recomputed_for(1) == 10


def test_tokens_of_a_micro_batch() -> None:
    """No layer is computed again while that leaves enough tokens; then layers are, and only then tokens fall."""
    per_token, recomputed = 2 * 10 * 1508, 2 * 10 * 200
    assert budget(max_bytes=5000 * per_token).default_tokens(fewest=4096) == 5000
    assert budget(max_bytes=3000 * per_token).default_tokens(fewest=4096) == 4096
    assert budget(max_bytes=2000 * recomputed).default_tokens(fewest=4096) == 2000
    assert budget(max_bytes=1).default_tokens(fewest=4096) == 512
    assert budget(max_bytes=10**12).default_tokens(fewest=4096) == 32768
