from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from miles.ops.rope import apply_rope, llama3_frequencies, rope_at, rope_frequencies, rope_table


def at(positions, head_dim=8, theta=100.0):
    table = rope_table(rope_frequencies(head_dim, theta), 64)
    return rope_at(table, torch.tensor(positions))


def rotate_by_complex_numbers(x, positions, theta):
    """Pairs (i, i + H/2) as complex numbers, each turned by position * theta^(-2i/H), in float64."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = torch.tensor(positions)[:, None, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def test_rotation_equals_complex_multiplication():
    torch.manual_seed(0)
    x, positions = torch.randn(4, 3, 8), [0, 1, 5, 63]
    actual = apply_rope(x, *at(positions))
    torch.testing.assert_close(actual.double(), rotate_by_complex_numbers(x, positions, 100.0), atol=1e-5, rtol=1e-5)
    assert torch.equal(actual[0], x[0])


def test_gradient_is_that_of_the_rotation():
    torch.manual_seed(0)
    x, grad, positions = torch.randn(4, 3, 8), torch.randn(4, 3, 8), [3, 9, 0, 20]
    x.requires_grad_()
    apply_rope(x, *at(positions)).backward(grad)
    exact = x.detach().double().requires_grad_()
    rotate_by_complex_numbers(exact, positions, 100.0).backward(grad.double())
    torch.testing.assert_close(x.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 33))
def test_scores_depend_on_the_distance_only(first, second, shift):
    generator = torch.Generator().manual_seed(first * 31 + second)
    q, k = torch.randn(1, 1, 8, generator=generator), torch.randn(1, 1, 8, generator=generator)
    here = (apply_rope(q, *at([first])) * apply_rope(k, *at([second]))).sum()
    there = (apply_rope(q, *at([first + shift])) * apply_rope(k, *at([second + shift]))).sum()
    assert math.isclose(here, there, abs_tol=2e-5)


def test_llama3_frequencies_equal_transformers():
    config = LlamaConfig(
        hidden_size=2048,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope_frequencies(64, 500000.0)
    actual = llama3_frequencies(plain, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert torch.equal(actual[0], plain[0])
    assert torch.equal(actual[-1], plain[-1] / 32)


def test_bfloat16_is_rotated_in_float32():
    torch.manual_seed(0)
    x, positions = torch.randn(3, 2, 8).bfloat16(), [7, 30, 63]
    actual = apply_rope(x, *at(positions))
    assert actual.dtype == torch.bfloat16
    exact = rotate_by_complex_numbers(x, positions, 100.0)
    assert ((actual.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01 + 1e-5).all()
