"""What is computed again: the same bits, fewer bytes, as little as the budget allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from miles.config.lora_section import LoraConfig
from miles.model.activations import ActivationBudget, Recompute, layer_numbers
from miles.model.context import packed_context
from miles.model.decoder import Decoder
from miles.model.lora import add_lora
from miles.ops.numerics import invariant
from tests.unit.engine.tiny import make_model
from tests.unit.living import outcome

LENGTHS = [7, 30, 1, 12]
WAYS = [Recompute(num_layers=1), Recompute(num_layers=3), Recompute(selective=True), Recompute(True, 1)]


def kept_by(model: Decoder, again: Recompute) -> int:
    """Of 50 tokens in sequences of one length, so that nothing is padded."""
    return outcome(model, again, packed_context([10] * 5, device="cpu"))[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "qkv_bias": True, "mlp_bias": True}], ids=str)
def test_the_same_bits_whatever_is_computed_again(dtype: torch.dtype, changes: dict[str, bool]) -> None:
    model, context = make_model(num_layers=3, **changes).to(dtype), packed_context(LENGTHS, device="cpu")
    expected, _ = outcome(model, Recompute(), context)
    for again in WAYS:
        found, _ = outcome(model, again, context)
        assert len(found) == 1 + len(list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_same_bits_with_adapters(dropout: float) -> None:
    model = make_model(num_layers=3)
    add_lora(model, LoraConfig(lora_rank=4, lora_dropout=dropout), seed=1)
    for name, parameter in model.named_parameters():
        if ".b." in name:
            parameter.data.normal_()
    context = dataclasses.replace(packed_context([30, 9, 5], device="cpu", heads=[0, 0, 0]), dropout_seed=7)
    expected, _ = outcome(model, Recompute(), context)
    for again in WAYS:
        found, _ = outcome(model, again, context)
        assert len(found) > 30
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_made_again_uses_the_operations_of_the_forward_pass() -> None:
    """The backward pass is outside of the scope of invariant operations: as on a thread of its own."""
    model, found = make_model(num_layers=2, intermediate_size=131), []
    ids_T, context = torch.arange(sum(LENGTHS)) % 37, packed_context(LENGTHS, device="cpu")
    for again in (Recompute(), Recompute(selective=True)):
        model.recompute_for = lambda num_tokens, again=again: again
        with invariant():
            hidden_TD = model(ids_T, dataclasses.replace(context))
        found.append(torch.autograd.grad(hidden_TD.square().sum(), list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_each_layer_that_is_computed_again_keeps_less() -> None:
    model = make_model(num_layers=3)
    kept = [kept_by(model, Recompute(num_layers=n)) for n in range(4)]
    assert kept[0] > kept[1] > kept[2] > kept[3]
    assert kept[0] - kept[1] > 0.7 * 4 * 50 * (layer_numbers(model.spec) - 2 * model.spec.hidden_size)


def test_cheap_parts_of_each_layer_are_not_kept() -> None:
    """Two normed inputs, and gate times up; the CPU's attention keeps its padded queries, keys and values."""
    model = make_model(num_layers=3)
    saved = 4 * 50 * (2 * model.spec.hidden_size + model.spec.intermediate_size)
    none, whole, _, all_layers, but_one = (kept_by(model, again) for again in (Recompute(), *WAYS))
    assert none - all_layers == 3 * saved
    assert whole - but_one == 2 * saved


def test_adapters_keep_no_input_of_theirs_that_is_made_again() -> None:
    model = make_model(num_layers=3)
    add_lora(model, LoraConfig(lora_rank=4), seed=1)
    saved = 4 * 50 * (2 * model.spec.hidden_size + model.spec.intermediate_size)
    # The first layer's input, which has no gradient, is kept for the norm instead of its result.
    first = 4 * 50 * model.spec.hidden_size
    assert kept_by(model, Recompute()) - kept_by(model, Recompute(selective=True)) == 3 * saved - first


def test_nothing_is_computed_again_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(num_layers=2)
    model.recompute_for = lambda num_tokens: pytest.fail("asked")
    with torch.no_grad():
        model(torch.tensor([1, 2]), packed_context([2], device="cpu"))


def budget(make: Callable[..., Decoder] = make_model, **changes: Any) -> ActivationBudget:
    spec = dataclasses.replace(
        make().spec, hidden_size=100, intermediate_size=200, num_layers=10, num_heads=4, num_kv_heads=2, head_dim=25
    )
    return ActivationBudget(spec, **{"bytes_per_number": 2, "max_bytes": 10**6, **changes})


def test_numbers_of_a_layer_by_hand() -> None:
    """Two norms and their two results 400, projection 200, queries, keys and values 200, the attention's result 100,
    sums 8, gate and up 400, their product 200. The results of the norms, queries and so on, and the product are made
    again: 600."""
    spec = budget().spec
    assert layer_numbers(spec) == 400 + 200 + 200 + 100 + 8 + 400 + 200 == 1508
    assert Recompute().kept_numbers(spec) == 15_080
    assert Recompute(selective=True).kept_numbers(spec) == 9_080
    assert Recompute(num_layers=4).kept_numbers(spec) == 6 * 1508 + 4 * 200
    assert Recompute(True, 4).kept_numbers(spec) == 6 * 908 + 4 * 200


def test_as_little_as_the_budget_allows() -> None:
    tokens = 100
    full, cheap, inputs = 2 * tokens * 1508, 2 * tokens * 908, 2 * tokens * 200
    assert budget(max_bytes=10 * full).recompute_for(tokens) == Recompute()
    assert budget(max_bytes=10 * full - 1).recompute_for(tokens) == Recompute(selective=True)
    for expected in range(11):
        needed = (10 - expected) * cheap + expected * inputs
        assert budget(max_bytes=needed).recompute_for(tokens) == Recompute(True, expected)
        if expected:
            assert budget(max_bytes=needed + cheap - inputs - 1).recompute_for(tokens) == Recompute(True, expected)
    assert budget(max_bytes=1).recompute_for(tokens) == Recompute(True, 10)  # it cannot do more
    assert budget(fixed=Recompute(num_layers=4)).recompute_for(1) == Recompute(num_layers=4)
    assert budget(fixed=Recompute(num_layers=40)).recompute_for(1) == Recompute(num_layers=10)


def test_tokens_of_a_micro_batch() -> None:
    """No layer is computed again while that leaves enough tokens; then layers are, and only then tokens fall."""
    per_token, recomputed = 2 * 10 * 1508, 2 * 10 * 200
    assert budget(max_bytes=5000 * per_token).default_tokens(fewest=4096) == 5000
    assert budget(max_bytes=3000 * per_token).default_tokens(fewest=4096) == 4096
    assert budget(max_bytes=2000 * recomputed).default_tokens(fewest=4096) == 2000
    assert budget(max_bytes=1).default_tokens(fewest=4096) == 512
    assert budget(max_bytes=10**12).default_tokens(fewest=4096) == 32768
