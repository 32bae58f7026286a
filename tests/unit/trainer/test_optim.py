from __future__ import annotations

import pytest
import torch
from torch import nn

from miles.config.sections import OptimConfig
from miles.trainer.optim import Optimizer, learning_rate


def rates(total: int, **flags) -> list[float]:
    return [learning_rate(OptimConfig(**flags), step, total_steps=total) for step in range(total)]


def test_schedules() -> None:
    assert rates(3, lr=2.0) == [2.0, 2.0, 2.0]
    assert rates(4, lr=4.0, lr_warmup_iters=4) == [1.0, 2.0, 3.0, 4.0]
    assert rates(6, lr=4.0, lr_warmup_iters=2, lr_decay_style="linear") == [2.0, 4.0, 4.0, 3.0, 2.0, 1.0]
    assert rates(4, lr=4.0, min_lr=2.0, lr_decay_style="linear") == [4.0, 3.5, 3.0, 2.5]
    assert rates(4, lr=2.0, lr_decay_style="cosine") == pytest.approx([2.0, 1.7071068, 1.0, 0.2928932])
    assert rates(4, lr=4.0, lr_warmup_fraction=0.5, lr_warmup_init=2.0) == [3.0, 4.0, 4.0, 4.0]
    assert rates(4, lr=4.0, min_lr=1.0, lr_decay_style="linear", lr_decay_iters=2) == [4.0, 2.5, 1.0, 1.0]
    assert rates(2, lr=0.0, lr_decay_style="cosine") == [0.0, 0.0]


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(5, 3, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(5, generator=generator).to(dtype))


def test_adamw_follows_the_formula_and_decays_matrices_only() -> None:
    config = OptimConfig(lr=0.1, weight_decay=0.2, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3, lr_warmup_iters=2)
    toy = Toy(torch.float64)
    optimizer = Optimizer(toy, config, total_steps=4)
    expected = {name: p.detach().clone() for name, p in toy.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step, lr in enumerate([0.05, 0.1, 0.1], start=1):
        optimizer.zero_grad()
        ((toy.matrix.sum(1) + toy.vector).square() * step).sum().backward()
        for name, parameter in toy.named_parameters():
            grad = parameter.grad.clone()
            first[name] = 0.8 * first[name] + 0.2 * grad
            second[name] = 0.9 * second[name] + 0.1 * grad.square()
            decay = 0.2 if name == "matrix" else 0.0
            update = (first[name] / (1 - 0.8**step)) / ((second[name] / (1 - 0.9**step)).sqrt() + 1e-3)
            expected[name] = expected[name] * (1 - lr * decay) - lr * update
        optimizer.step()
    torch.testing.assert_close(dict(toy.named_parameters()), expected, rtol=1e-9, atol=1e-9)


def test_clipping_scales_the_whole_gradient_to_the_limit() -> None:
    toy = Toy(torch.float32)
    optimizer = Optimizer(toy, OptimConfig(clip_grad=1.0), total_steps=1)
    toy.matrix.grad.fill_(2.0)
    toy.vector.grad.fill_(-1.0)
    norm = optimizer.grad_norm()
    assert norm == pytest.approx((15 * 4 + 5) ** 0.5)
    optimizer.clip(norm)
    assert optimizer.grad_norm() == pytest.approx(1.0)
    assert toy.matrix.grad[0, 0].item() == pytest.approx(2.0 / norm)
    optimizer.clip(optimizer.grad_norm() / 2)
    assert optimizer.grad_norm() == pytest.approx(1.0)


def test_clip_grad_0_switches_clipping_off() -> None:
    toy = Toy(torch.float32)
    optimizer = Optimizer(toy, OptimConfig(clip_grad=0.0), total_steps=1)
    toy.matrix.grad.fill_(100.0)
    optimizer.clip(optimizer.grad_norm())
    assert toy.matrix.grad[0, 0].item() == 100.0


def test_bfloat16_has_float32_masters_moments_and_gradient_sums() -> None:
    """64 micro-batches that each add 1/256 to a gradient of 1: bfloat16 sums would stay at 1."""
    toy = Toy(torch.bfloat16)
    optimizer = Optimizer(toy, OptimConfig(lr=1e-4, clip_grad=0.0), total_steps=2)
    toy.vector.sum().backward()
    for _ in range(64):
        (toy.vector.sum() / 256).backward()
    assert toy.vector.grad.tolist() == [1.25] * 5
    bytes_per_parameter = sum(
        tensor.element_size()
        for tensor in (
            toy.matrix,
            toy.matrix.grad,
            optimizer.masters["matrix"],
            *(optimizer.moments(dict)[f"{moment}.matrix"] for moment in ("exp_avg", "exp_avg_sq")),
        )
    )
    assert bytes_per_parameter == 18
    before = optimizer.masters["vector"].detach().clone()
    optimizer.step()
    # A step of 1e-4 is below bfloat16's resolution of 4e-3 at 1, but not lost: the master has it.
    torch.testing.assert_close(optimizer.masters["vector"].detach(), before - 1e-4, rtol=0, atol=1e-6)
    torch.testing.assert_close(toy.vector.detach(), optimizer.masters["vector"].detach().bfloat16(), rtol=0, atol=0)


def test_a_float32_parameter_is_its_own_master() -> None:
    toy = Toy(torch.float32)
    assert Optimizer(toy, OptimConfig(), total_steps=1).masters["matrix"] is toy.matrix


def test_learning_rate_0_changes_nothing() -> None:
    toy = Toy(torch.float32)
    optimizer = Optimizer(toy, OptimConfig(lr=0.0, weight_decay=0.1), total_steps=3)
    before = toy.matrix.detach().clone()
    for _ in range(3):
        toy.matrix.square().sum().backward()
        optimizer.step()
    assert torch.equal(toy.matrix.detach(), before)
