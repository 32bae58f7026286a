"""Triton kernels, compiled, at real shapes against plain formulas, forward and gradient.

Tolerances are relative errors of the whole tensor. bf16 and fp16: inputs are exact, so the error is the rounding of the
softmax weights before the second product and of the result, 2^-9 and 2^-12 each: 1e-2 and 2e-3 leave a factor of two.
float32: sums in another order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from miles.model.context import packed_context
from miles.ops import activation, sampling
from miles.ops.activation import silu_mul
from miles.ops.logprob import CUT_LOGIT
from miles.ops.norm import rms_norm
from miles.ops.rope import apply_rope, rope_at, rope_frequencies, rope_table
from miles.ops.sampling import row_seeds, sample
from tests.gpu.ops.references import (
    PagedCase,
    bounds_of,
    grouped_attention,
    hide_shared_blocks,
    log_probs_and_entropy,
    nan_in_place_of_empty,
    packed_attention,
    paged_case,
    relative_error,
    share_beginnings,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("triton", reason="Triton is not installed")

from miles.ops import triton_norm_rope, triton_paged_attention  # noqa: E402
from miles.ops.triton_attention import attention_forward, decode_forward, packed_flash_attention  # noqa: E402
from miles.ops.triton_logprob import chunk_grad_logits, chunk_log_probs  # noqa: E402
from miles.ops.triton_paged_attention import paged_flash_attention  # noqa: E402
from miles.ops.triton_sampling import sample_uncut  # noqa: E402

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
LENGTHS = [1, 900, 0, 129, 64, 1024, 33, 128]
HEADS = [0, 0, 2, 3, 3, 3, 6, 6]  # sequences 0, 3 and 6 are continued, in every order of lengths
VOCAB = 151936


@pytest.mark.parametrize("forward", [attention_forward, decode_forward])
@pytest.mark.parametrize("continued", [None, HEADS], ids=["alone", "groups"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(16, 8, 128), (9, 3, 64), (4, 4, 32)])
def test_packed_attention(
    heads: tuple[int, int, int], dtype: torch.dtype, continued: list[int] | None, forward: Any
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, size = heads
    qkv = torch.randn(sum(LENGTHS), num_heads + 2 * num_kv_heads, size, device="cuda", dtype=dtype)
    inputs = [x.requires_grad_() for x in qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)]
    grad = torch.randn(sum(LENGTHS), num_heads, size, device="cuda", dtype=dtype)
    context = packed_context(LENGTHS, device="cuda", heads=continued)

    def run() -> list[Tensor]:
        sizes = context.cu_seqlens, max(LENGTHS), size**-0.5, context.groups_B2
        out = packed_flash_attention(*inputs, *sizes, forward=forward)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    results, again = run(), run()
    if continued is None:
        out = packed_attention(*inputs, LENGTHS, size**-0.5)
    else:
        out = grouped_attention(*inputs, LENGTHS, continued, size**-0.5)
    for actual, repeated, wanted in zip(
        results, again, [out, *torch.autograd.grad(out, inputs, grad.double())], strict=True
    ):
        assert relative_error(actual, wanted) < TOLERANCE[dtype]
        assert torch.equal(actual, repeated)


def attend_paged(
    case: PagedCase, *, max_query_len: int = 1, query_rows: int = 64, shared_3S: Tensor | None = None
) -> Tensor:
    return paged_flash_attention(
        case.q_TNH,
        case.k_cache,
        case.v_cache,
        case.tables,
        torch.tensor(case.contexts, dtype=torch.int32, device="cuda"),
        bounds_of(case.queries, "cuda"),
        max_query_len=max_query_len,
        page_size=case.page_size,
        scale=0.1,
        query_rows=query_rows,
        shared_3S=shared_3S,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "page_size"), [((16, 8, 128), 16), ((9, 3, 64), 32), ((4, 1, 32), 128)])
def test_paged_attention(heads: tuple[int, int, int], page_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    contexts = [1, 1000, 256, 257, 3000, 64]
    decode = paged_case(contexts, [1] * 6, heads, page_size=page_size, dtype=dtype, device="cuda")
    assert relative_error(attend_paged(decode, max_query_len=1), decode.expected(0.1)) < TOLERANCE[dtype]
    mixed = paged_case(contexts, [1, 700, 256, 1, 90, 0], heads, page_size=page_size, dtype=dtype, device="cuda")
    for query_rows in (16, 64):
        actual = attend_paged(mixed, max_query_len=700, query_rows=query_rows)
        assert relative_error(actual, mixed.expected(0.1)) < TOLERANCE[dtype]


def test_decode_bits_depend_on_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    contexts = [1000, 77, 2100, 512]
    case = paged_case(contexts, [1] * 4, (16, 8, 128), page_size=16, dtype=torch.bfloat16, device="cuda")
    split = attend_paged(case, max_query_len=1)
    for index, context in enumerate(contexts):
        row = slice(index, index + 1)
        alone = PagedCase(case.q_TNH[row], case.k_cache, case.v_cache, case.tables[row], [context], [1], 16)
        assert torch.equal(attend_paged(alone, max_query_len=1), split[row])
    assert torch.equal(attend_paged(case, max_query_len=2, query_rows=16), split)  # as part of a prompt chunk
    monkeypatch.setattr(triton_paged_attention, "TARGET_PROGRAMS", 1)
    assert torch.equal(attend_paged(case, max_query_len=1), split)


@pytest.mark.parametrize("programs", [1, 1024, 10**6])  # one that does all, as usual, with every chunk on its own
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (9, 3, 64), (8, 1, 128)])
def test_shared_reads_change_no_bit(
    heads: tuple[int, int, int], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 8, 16, 9 and 2 answers, whose rows lie apart, beside answers on their own."""
    monkeypatch.setattr(triton_paged_attention, "TARGET_PROGRAMS", programs)
    torch.manual_seed(4)
    order = torch.randperm(40).tolist()
    groups = [(order[:8], 96), (order[8:24], 992), (order[24:33], 512), (order[33:35], 64)]
    contexts = [700 + 13 * row for row in range(40)]
    for rows, num_tokens in groups:
        for place, row in enumerate(rows):
            contexts[row] = num_tokens + 1 + 37 * place  # the first has one token of its own
    case = paged_case(contexts, [1] * 40, heads, page_size=16, dtype=torch.bfloat16, device="cuda")
    plan_3S = share_beginnings(case, groups, triton_paged_attention.tile_rows(heads[0] // heads[1]))
    alone = attend_paged(case)
    assert relative_error(alone, case.expected(0.1)) < TOLERANCE[torch.bfloat16]
    assert torch.equal(attend_paged(case, max_query_len=2, query_rows=16), alone)  # as part of a prompt chunk
    hide_shared_blocks(case, plan_3S)
    # What is not computed must show, and not be found right where an earlier call has left it.
    monkeypatch.setattr(torch, "empty", nan_in_place_of_empty)
    assert torch.equal(attend_paged(case, shared_3S=plan_3S), alone)
    plan_3S[0, -1] = 0  # no tiles: what is shared is not computed, and must show
    assert not torch.equal(attend_paged(case, shared_3S=plan_3S), alone)


def test_decode_in_a_cuda_graph() -> None:
    case = paged_case([500, 90], [1, 1], (16, 8, 128), page_size=16, dtype=torch.bfloat16, device="cuda")
    contexts, bounds = torch.tensor([500, 90], dtype=torch.int32, device="cuda"), bounds_of([1, 1], "cuda")

    def attend() -> Tensor:
        options = {"max_query_len": 1, "page_size": 16, "scale": 0.1}
        return paged_flash_attention(case.q_TNH, case.k_cache, case.v_cache, case.tables, contexts, bounds, **options)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    contexts.copy_(torch.tensor([333, 0]))
    graph.replay()
    assert torch.equal(captured, attend())
    assert not captured[1].any()


def test_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "has_kernels", lambda x: False)  # the reference is the plain formula
    torch.manual_seed(3)
    num_tokens, num_heads, num_kv_heads, size, width = 300, 16, 8, 128, 1024
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x, residual = torch.randn(2, num_tokens, width, **options)
    weight = torch.randn(width, **options)
    normed, total = triton_norm_rope.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    # Rounded in the same places: only where the two sums of squares straddle a rounding border do results differ.
    assert relative_error(normed, rms_norm(x + residual, weight, 1e-6)) < 1e-3

    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * size, **options)
    q_weight, k_weight = torch.randn(2, size, **options)
    table = rope_table(rope_frequencies(size, 1e6), 2000).cuda()
    cos, sin = rope_at(table, torch.randint(2000, (num_tokens,), device="cuda"))
    slots = torch.randperm(1000, device="cuda")[:num_tokens]
    k_cache, v_cache = torch.zeros(2, num_kv_heads, 1000, size, **options)
    q = triton_norm_rope.qk_norm_rope_store(qkv, q_weight, k_weight, 1e-6, cos, sin, slots, k_cache, v_cache)
    parts = qkv.view(num_tokens, -1, size).split((num_heads, num_kv_heads, num_kv_heads), 1)
    assert relative_error(q, apply_rope(rms_norm(parts[0], q_weight, 1e-6), cos, sin)) < 1e-3
    stored_k = k_cache[:, slots].transpose(0, 1)
    assert relative_error(stored_k, apply_rope(rms_norm(parts[1], k_weight, 1e-6), cos, sin)) < 1e-3
    assert torch.equal(v_cache[:, slots].transpose(0, 1), parts[2])

    gate_up = torch.randn(num_tokens, 2 * 3072, **options, requires_grad=True)
    grad = torch.randn(num_tokens, 3072, **options)
    results = [(out, *torch.autograd.grad(out, gate_up, grad)) for out in map(silu_mul, [gate_up])]
    out = triton_norm_rope.silu_mul(gate_up)
    assert relative_error(out, results[0][0]) < 1e-3
    # The reference rounds between the factors of the gradient, twice more than the kernel: 2^-9 each.
    assert relative_error(torch.autograd.grad(out, gate_up, grad)[0], results[0][1]) < 5e-3


def test_sampler_draws_what_the_reference_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "has_kernels", lambda x: False)
    torch.manual_seed(4)
    logits = torch.randn(64, VOCAB, device="cuda") * 3
    seeds = row_seeds(torch.arange(64, device="cuda") * 7919, torch.arange(64, device="cuda"))
    temperature = torch.linspace(0.5, 1.5, 64, device="cuda")
    greedy = torch.arange(64, device="cuda") % 8 == 0
    temperature[greedy] = 1.0
    draw = sample_uncut(logits, seeds_R2=seeds, temperature_R=temperature, greedy_R=greedy)
    expected = sample(logits.clone(), seeds_R2=seeds, temperature_R=temperature, greedy_R=greedy)
    assert torch.equal(draw.tokens_R, expected.tokens_R)
    torch.testing.assert_close(draw.log_probs_R, expected.log_probs_R, rtol=1e-5, atol=1e-5)
    assert draw.finite_R.all()
    logits[3, 5] = torch.nan
    assert sample_uncut(logits, seeds_R2=seeds).finite_R.logical_not().nonzero().tolist() == [[3]]


def test_log_probs_and_their_gradient() -> None:
    torch.manual_seed(5)
    logits = (torch.randn(40, VOCAB, device="cuda") * 3).requires_grad_()
    targets = torch.randint(VOCAB, (40,), device="cuda")
    grads = torch.randn(2, 40, device="cuda")
    log_probs, entropy, log_sums = chunk_log_probs(logits.detach(), targets, 0.8)
    expected = log_probs_and_entropy(logits, targets, 0.8)
    assert relative_error(log_probs, expected[0]) < 1e-6
    assert relative_error(entropy, expected[1]) < 1e-5
    (wanted,) = torch.autograd.grad((torch.stack(expected) * grads).sum(), logits)
    buffer = logits.detach().clone()
    for out, tolerance in ((torch.empty_like(buffer, dtype=torch.bfloat16), 5e-3), (buffer, 1e-5)):
        actual = chunk_grad_logits(buffer, targets, log_sums, entropy, grads[0], grads[1], 0.8, out)
        assert relative_error(actual, wanted) < tolerance


def test_sampler_and_trainer_agree_on_the_bits_of_a_log_prob() -> None:
    logits = torch.randn(300, VOCAB, device="cuda") * 3
    seeds = row_seeds(torch.arange(300, device="cuda"), torch.arange(300, device="cuda"))
    for temperature in (1.0, 0.7):
        temperature_R = torch.full((300,), temperature, device="cuda")
        draw = sample_uncut(logits, seeds_R2=seeds, temperature_R=temperature_R)
        assert torch.equal(chunk_log_probs(logits, draw.tokens_R, temperature)[0], draw.log_probs_R)


def test_a_block_of_cut_tokens_changes_no_bit_whatever_marks_them() -> None:
    """-inf in the engine, a large number in the trainer; what is left of SmolLM2's logits is sometimes all negative."""
    logits = 3 * torch.randn(2000, VOCAB, device="cuda") - 30
    is_cut = torch.ones(VOCAB, dtype=torch.bool, device="cuda")
    is_cut[100:140] = False
    targets = torch.randint(100, 140, (2000,), device="cuda")
    marked = [chunk_log_probs(logits.masked_fill(is_cut, mark), targets, 1.0)[0] for mark in (-torch.inf, CUT_LOGIT)]
    assert torch.equal(*marked)
