from __future__ import annotations

import pytest

from benchmarks.gradient_error import errors, group_of, make_samples, measure
from tests.unit.engine.tiny import make_model


def test_float32_sums_keep_the_error_of_many_micro_batches_where_it_is_with_one() -> None:
    """Rounding inside a pass dominates in bfloat16; sums of 27 terms in 8 bits add an error of their own, which sums
    in float32 do not have."""
    model = make_model(num_layers=1).bfloat16()
    found = {way: by["all"] for way, by in measure(model, make_samples(27, 8, model.spec.vocab_size), 27).items()}
    assert found["float32_1"] < 1e-6
    assert 1e-4 < found["bfloat16_27"] < 1.2 * found["bfloat16_1"]
    assert found["bfloat16_sums_alone"] > 2e-3


def test_errors_by_kind_of_parameter() -> None:
    import torch

    reference = {"layers.0.mlp.down.weight": torch.tensor([3.0]), "layers.1.mlp.down.weight": torch.tensor([4.0])}
    reference["norm.weight"] = torch.tensor([12.0])
    found = {name: tensor + (tensor == 4.0) for name, tensor in reference.items()}
    assert errors(found, reference) == pytest.approx({"mlp.down": 1 / 5, "all": 1 / 13, "norm": 0.0})
    assert group_of("embedding.weight") == "embedding"
