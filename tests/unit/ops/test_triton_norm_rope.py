"""The fused small steps, interpreted, against the unfused operations of ops/.

Tolerance 1e-6 relative in float32: one sum over the row in another order.
"""

from __future__ import annotations

import pytest
import torch

from miles.ops.activation import silu_mul
from miles.ops.heads import HeadNorm, rotated_heads
from miles.ops.norm import rms_norm
from miles.ops.rope import apply_rope, rope_at, rope_frequencies, rope_table
from tests.gpu.ops.references import relative_error, require_interpreter

require_interpreter()

from miles.ops import triton_norm_rope  # noqa: E402


def test_add_rms_norm() -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 5, 96)
    weight = torch.randn(96)
    out, total = triton_norm_rope.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert relative_error(out, rms_norm(x + residual, weight, 1e-5)) < 1e-6


@pytest.mark.parametrize("with_norm", [True, False])
def test_qk_norm_rope_store(with_norm: bool) -> None:
    torch.manual_seed(1)
    num_heads, num_kv_heads, size, num_tokens = 3, 1, 32, 4
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * size)
    weights = torch.randn(2, size) if with_norm else (None, None)
    cos, sin = rope_at(rope_table(rope_frequencies(size, 10_000.0), 50), torch.tensor([0, 7, 49, 3]))
    slots = torch.tensor([9, 2, -1, 5])  # the third token is padding
    k_cache, v_cache = torch.full((2, num_kv_heads, 12, size), -7.0)

    q = triton_norm_rope.qk_norm_rope_store(qkv, *weights, 1e-6, cos, sin, slots, k_cache, v_cache)

    parts = list(qkv.view(num_tokens, -1, size).split((num_heads, num_kv_heads, num_kv_heads), 1))
    for index in range(2):
        if with_norm:
            parts[index] = rms_norm(parts[index], weights[index], 1e-6)
        parts[index] = apply_rope(parts[index], cos, sin)
    assert relative_error(q, parts[0]) < 1e-6
    stored = slots[slots >= 0]
    assert relative_error(k_cache[:, stored].transpose(0, 1), parts[1][slots >= 0]) < 1e-6
    assert torch.equal(v_cache[:, stored].transpose(0, 1), parts[2][slots >= 0])
    untouched = torch.tensor([slot for slot in range(12) if slot not in stored])
    assert (k_cache[:, untouched] == -7.0).all() and (v_cache[:, untouched] == -7.0).all()


def test_silu_mul_and_its_gradient() -> None:
    torch.manual_seed(2)
    gate_up = torch.randn(3, 2 * 1100, requires_grad=True)
    grad = torch.randn(3, 1100)
    out, expected = triton_norm_rope.silu_mul(gate_up), silu_mul(gate_up)
    assert relative_error(out, expected) < 1e-6
    (actual_grad,), (wanted_grad,) = (torch.autograd.grad(x, gate_up, grad) for x in (out, expected))
    assert relative_error(actual_grad, wanted_grad) < 1e-6


def test_gradients_of_add_rms_norm() -> None:
    torch.manual_seed(3)
    x, added, weight = torch.randn(7, 96), torch.randn(7, 96), torch.randn(96)
    inputs = [t.requires_grad_() for t in (x, added, weight)]
    grads = torch.randn(2, 7, 96)
    total = x + added
    wanted = torch.autograd.grad((rms_norm(total, weight, 1e-5), total), inputs, list(grads))
    actual = torch.autograd.grad(triton_norm_rope.add_rms_norm(*inputs, 1e-5), inputs, list(grads))
    for one, other in zip(actual, wanted, strict=True):
        assert relative_error(one, other) < 1e-6
    out, _ = triton_norm_rope.add_rms_norm(*inputs, 1e-5)  # the last norm of a model: nothing reads the sum
    wanted = torch.autograd.grad(rms_norm(x + added, weight, 1e-5), inputs, grads[0])
    for one, other in zip(torch.autograd.grad(out, inputs, grads[0]), wanted, strict=True):
        assert relative_error(one, other) < 1e-6


@pytest.mark.parametrize("with_norm", [True, False])
def test_qk_norm_rope_and_its_gradients(with_norm: bool) -> None:
    torch.manual_seed(4)
    num_heads, num_kv_heads, size, num_tokens = 3, 2, 32, 5
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * size, requires_grad=True)
    weights = torch.randn(2, size).requires_grad_().unbind() if with_norm else (None, None)
    cos, sin = rope_at(rope_table(rope_frequencies(size, 10_000.0), 50), torch.tensor([0, 7, 49, 3, 4]))
    plain = rotated_heads(qkv, num_kv_heads, size, HeadNorm(*weights, 1e-6), cos, sin)
    fused = triton_norm_rope.qk_norm_rope(qkv, num_kv_heads, size, *weights, 1e-6, cos, sin)
    grads = [torch.randn(t.shape) for t in plain]
    inputs = [qkv, *(w for w in weights if w is not None)]
    for one, other in zip(fused, plain, strict=True):
        assert relative_error(one, other) < 1e-6
    wanted = torch.autograd.grad(plain, inputs, grads)
    for one, other in zip(torch.autograd.grad(fused, inputs, grads), wanted, strict=True):
        assert relative_error(one, other) < 1e-6
