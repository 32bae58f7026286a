from __future__ import annotations

from benchmarks.memory_step import OPTIONS, make_samples, measure
from tests.unit.engine.tiny import make_model


def test_options_change_what_they_say() -> None:
    model = make_model(num_layers=2, max_position_embeddings=256)
    samples = make_samples(3, 9, model.spec.vocab_size)
    names = ("default", "recompute", "selective", "adam_bfloat16")
    found = {name: measure(model, samples, OPTIONS[name]) for name in names}
    assert [found[name]["recompute"]["num_layers"] for name in found] == [0, 2, 0, 0]
    assert [found[name]["recompute"]["selective"] for name in found] == [False, False, True, False]
    assert all(run["seconds"] > 0 and run["num_micro_batches"] == 1 for run in found.values())
    assert all(parameter.grad is None for parameter in model.parameters())
