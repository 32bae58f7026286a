"""How Adam's moments are kept: exact, rounded, in 8 bits, in pieces, saved and restored."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

from miles.config.sections import OptimConfig
from miles.errors import CheckpointError
from miles.trainer.moments import Moments, round_at_random_
from miles.trainer.optim import Optimizer
from miles.trainer.trainer import LocalTrainer

KINDS = ["float32", "bfloat16", "8bit"]


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(torch.randn(40, 64, generator=generator))
        self.odd = nn.Parameter(torch.randn(9, 33, generator=generator))
        self.vector = nn.Parameter(torch.randn(70, generator=generator))


def train(optimizer: Optimizer, toy: Toy, num_steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for parameter in toy.parameters():
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator) + 0.3)
        optimizer.step()


@pytest.fixture(autouse=True)
def library(request: pytest.FixtureRequest) -> None:
    if "8bit" in request.node.name:
        pytest.importorskip("bitsandbytes")


def config_of(kind: str) -> OptimConfig:
    return OptimConfig(lr=1e-2, weight_decay=0.1, adam_state=kind)


def test_float32_is_adamw_of_torch_bit_for_bit() -> None:
    ours, theirs = Toy(), Toy()
    optimizer = Optimizer(ours, config_of("float32"), total_steps=5)
    groups = [
        {"params": [theirs.large, theirs.odd], "weight_decay": 0.1},
        {"params": [theirs.vector], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    generator = torch.Generator().manual_seed(1)
    train(optimizer, ours, 5)
    for _ in range(5):
        for parameter in theirs.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.3
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize(("kind", "tolerance"), [("bfloat16", 0.02), ("8bit", 0.06)])
def test_rounded_moments_take_nearly_the_same_way(kind: str, tolerance: float) -> None:
    """Eight bits of a bfloat16 are 0.4 percent of a number; a block of 8 bits has 1 to 2 percent of its largest."""
    exact, rounded, start = Toy(), Toy(), Toy()
    for toy, name in ((exact, "float32"), (rounded, kind)):
        train(Optimizer(toy, config_of(name), total_steps=30), toy, 30)
    assert torch.equal(exact.vector, rounded.vector)  # vectors stay float32
    for name in ("large", "odd"):
        way = getattr(exact, name) - getattr(start, name)
        error = (getattr(exact, name) - getattr(rounded, name)).norm() / way.norm()
        assert 0 < error < tolerance


@pytest.mark.parametrize(("kind", "expected"), [("float32", 8.0), ("bfloat16", 4.0), ("8bit", 2 + 8 / 256)])
def test_bytes_of_a_parameter(kind: str, expected: float) -> None:
    matrix = nn.Parameter(torch.zeros(64, 64))
    (state,) = Moments({"matrix": matrix}, config_of(kind)).states.values()
    assert sum(tensor.numel() * tensor.element_size() for tensor in state.values()) / matrix.numel() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_give_the_same_update(kind: str) -> None:
    whole, cut = Toy(), Toy()
    first = Optimizer(whole, config_of(kind), total_steps=3)
    torch.manual_seed(0)
    train(first, whole, 3)
    second = Optimizer(cut, config_of(kind), total_steps=3)
    second._moments._batches = list(second._moments._in_batches(512))
    assert max(sum(span.stop - span.start for _, span in batch) for batch in second._moments._batches) == 512
    torch.manual_seed(0)
    train(second, cut, 3)
    for ours, theirs in zip(whole.parameters(), cut.parameters(), strict=True):
        if kind == "bfloat16":  # other draws
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=2e-3)
        else:
            assert torch.equal(ours, theirs)


def test_random_rounding_keeps_the_mean() -> None:
    """A third of the way between two neighbours: a third of the draws go up, within five standard deviations."""
    low, high = 1.0, 1.0 + 2**-7
    for sign in (1.0, -1.0):
        exact = torch.full((100_000,), sign * (low + (high - low) / 3))
        kept = torch.empty(100_000, dtype=torch.bfloat16)
        round_at_random_(kept, exact)
        assert set(kept.abs().tolist()) == {low, high}
        assert abs((kept.abs() == high).double().mean() - 1 / 3) < 5 * math.sqrt(2 / 9 / 100_000)
    numbers = torch.randn(1000).bfloat16()
    kept = torch.empty_like(numbers)
    round_at_random_(kept, numbers.float())
    assert torch.equal(kept, numbers)  # what fits is kept


def test_a_slow_second_moment_still_falls_in_bfloat16() -> None:
    """beta2 0.999 and gradients of 0 after one of 1: to the nearest, it would stay where it is for ever."""
    matrix = nn.Parameter(torch.zeros(200, 200))
    kept = Moments({"m": matrix}, OptimConfig(adam_state="bfloat16", adam_beta2=0.999))
    kept.states["m"]["exp_avg_sq"].fill_(1.0)
    matrix.grad = torch.zeros_like(matrix)
    for step in range(1, 101):
        kept.update(step=step, learning_rate=0.0)
    assert kept.states["m"]["exp_avg_sq"].float().mean() == pytest.approx(0.999**100, abs=2e-3)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_for_bit(make_model, make_config, make_samples, kind: str, dtype: torch.dtype) -> None:
    config = make_config(lr=1e-3, weight_decay=0.1, adam_state=kind)

    def trainer(seed: int = 0) -> LocalTrainer:
        return LocalTrainer(make_model(seed=seed, dtype=dtype), None, config, total_steps=8)

    straight = trainer()
    expected = [straight.train(make_samples(seed=i), rollout_id=i, weight_version=i) for i in range(4)]
    first = trainer()
    for i in range(2):
        first.train(make_samples(seed=i), rollout_id=i, weight_version=i)
    tensors, state = copy.deepcopy(first.save())
    resumed = trainer(seed=9)
    resumed.load(tensors, json.loads(json.dumps(state)))
    results = [resumed.train(make_samples(seed=i), rollout_id=i, weight_version=i) for i in (2, 3)]
    assert [(r.rollout, r.steps) for r in results] == [(r.rollout, r.steps) for r in expected[2:]]
    ours, theirs = resumed.save()[0], straight.save()[0]
    assert all(torch.equal(ours[stem][name], theirs[stem][name]) for stem in theirs for name in theirs[stem])


@pytest.mark.parametrize(("saved", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_another_float_setting_is_converted(make_model, make_config, make_samples, saved: str, wanted: str) -> None:
    first = LocalTrainer(make_model(), None, make_config(adam_state=saved), total_steps=4)
    first.train(make_samples(), rollout_id=0, weight_version=0)
    tensors, state = copy.deepcopy(first.save())
    other = LocalTrainer(make_model(seed=3), None, make_config(adam_state=wanted), total_steps=4)
    other.load(tensors, state)
    for name, moment in other.save()[0]["optimizer"].items():
        torch.testing.assert_close(moment.float(), tensors["optimizer"][name].float(), rtol=2**-8, atol=0)


@pytest.mark.parametrize(("saved", "wanted"), [("8bit", "float32"), ("bfloat16", "8bit")])
def test_8_bits_are_not_converted_but_refused(make_model, make_config, saved: str, wanted: str) -> None:
    tensors, state = LocalTrainer(make_model(), None, make_config(adam_state=saved), total_steps=4).save()
    other = LocalTrainer(make_model(seed=3), None, make_config(adam_state=wanted), total_steps=4)
    before = copy.deepcopy(other.save()[0])
    with pytest.raises(CheckpointError, match="--adam-state it was saved with"):
        other.load(tensors, state)
    after = other.save()[0]
    assert all(torch.equal(after[stem][name], before[stem][name]) for stem in before for name in before[stem])


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_to_the_host_comes_back_and_parameters_stay(make_model, make_config, make_samples, kind) -> None:
    """Between two steps masters and moments move and gradients go; nothing that is saved or trained changes."""
    outcomes = []
    for moves in (False, True):
        config = make_config(lr=1e-2, adam_state=kind)
        trainer = LocalTrainer(make_model(dtype=torch.bfloat16), None, config, total_steps=3)
        torch.manual_seed(0)
        addresses = [parameter.data_ptr() for parameter in trainer.model.parameters()]
        for i in range(3):
            trainer.train(make_samples(seed=i), rollout_id=i, weight_version=i)
            if moves:
                optimizer = trainer.optimizer
                before = {name: master.data_ptr() for name, master in optimizer.masters.items()}
                optimizer.offload()
                assert all(p.grad is None for p in trainer.model.parameters())
                assert all(master.data_ptr() != before[name] for name, master in optimizer.masters.items())
                tensors, state = copy.deepcopy(trainer.save())
                trainer.load(tensors, state)  # as a resumed run does before its first step
                optimizer.onload()
        assert [parameter.data_ptr() for parameter in trainer.model.parameters()] == addresses
        outcomes.append(trainer.save())
    (ours, our_state), (theirs, their_state) = outcomes
    assert our_state == their_state
    assert all(torch.equal(ours[stem][name], theirs[stem][name]) for stem in theirs for name in theirs[stem])
