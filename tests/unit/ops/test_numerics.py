"""The scope of invariant operations, and that their gradients are those of the fast ones."""

import threading

import pytest
import torch

from miles.model.activations import Recompute
from miles.model.context import packed_context
from miles.ops import numerics
from miles.ops.logprob import token_log_probs
from miles.ops.numerics import CpuTiles, invariant, is_invariant
from tests.gpu.ops.references import relative_error
from tests.unit.engine.tiny import make_model

LENGTHS = [3, 1, 140, 17]


def test_a_scope_ends_also_with_an_error_and_is_of_one_thread():
    seen = []
    with pytest.raises(KeyError), invariant():
        other = threading.Thread(target=lambda: seen.append(is_invariant()))
        other.start()
        other.join()
        with invariant(False):
            seen.append(is_invariant())
        raise KeyError
    assert seen == [False, True], "an inner scope switches nothing off"
    assert not is_invariant()


def scores_and_gradients(model):
    ids = torch.randint(0, 37, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    hidden = model(ids, packed_context(LENGTHS, device="cpu"))
    log_probs, entropy = token_log_probs(hidden, model.head_weight, ids.roll(-1), temperature=0.9)
    model.zero_grad()
    (log_probs.cos().sum() + entropy.sum()).backward()
    return [log_probs.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("tiles", [CpuTiles(), CpuTiles(64, 64), CpuTiles(doubles=True)])
def test_values_and_gradients_are_those_of_the_fast_operations(tiles, monkeypatch):
    monkeypatch.setattr(numerics, "_tiles", tiles)
    model = make_model(max_position_embeddings=200, qkv_bias=True, mlp_bias=True)
    fast = scores_and_gradients(model)
    with invariant():
        exact = scores_and_gradients(model)
    for actual, wanted in zip(exact, fast, strict=True):
        assert relative_error(actual, wanted) < 2e-5  # float32 sums in another order, through two layers
    assert all(torch.equal(a, b) for a, b in zip(scores_and_gradients(model), fast, strict=True)), "nothing is left"


def test_layers_that_are_computed_again_use_the_operations_of_the_forward_pass():
    model = make_model(max_position_embeddings=200)
    with invariant():
        kept = scores_and_gradients(model)
    model.recompute_for = lambda num_tokens: Recompute(num_layers=2)
    ids = torch.randint(0, 37, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    with invariant():
        hidden = model(ids, packed_context(LENGTHS, device="cpu"))
        log_probs, entropy = token_log_probs(hidden, model.head_weight, ids.roll(-1), temperature=0.9)
    model.zero_grad()
    (log_probs.cos().sum() + entropy.sum()).backward()  # outside: as on a thread of its own
    again = [log_probs.detach(), *(parameter.grad for parameter in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))
