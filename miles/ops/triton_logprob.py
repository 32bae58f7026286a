"""Log-prob and entropy of target tokens from a chunk of float32 logits on CUDA, and the gradient of the logits.

The forward pass reads the logits once, the backward pass reads them once and writes the gradient once, so the head is
bound by its matrix products. p is the softmax of z = logits / temperature, H its entropy in nats.

A row is cut into blocks of `BLOCK_IDS` token ids; each block has a softmax of its own and the blocks are joined in one
fixed tree (`join_blocks`). `ops/triton_sampling.py` cuts and joins the same way, so that the log-sum of a row of logits
has the same bits in the engine and in the trainer.

Shape letters: T tokens, C tokens of a chunk, V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles.ops.matmul import add_product_float32, gradient_to_add_to, project_float32

BLOCK_IDS = 4096  # part of the meaning of a result, like the warps: they shape the tree of the sums
NUM_WARPS = 8


@triton.jit
def softmax_of_block(row_ptr, first, inverse_temperature, V, BLOCK: tl.constexpr):
    """Of the ids `first` and up: z - maximum [BLOCK], the maximum, e^(z - maximum) [BLOCK] and its sum. Where all are
    cut the maximum is -inf and the others are z and 0: the block has no part in the maximum of the row.

    The multiply-add is explicit: left to the compiler, one kernel would fuse it and another would not."""
    ids = first + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf"))
    maximum = tl.max(logits, 0) * inverse_temperature
    centre = tl.where(maximum == -float("inf"), 0.0, maximum)
    centred = tl.fma(logits, tl.broadcast_to(inverse_temperature, logits.shape), -centre)
    weights = tl.exp(centred)
    return centred, maximum, weights, tl.sum(weights, 0)


@triton.jit
def join_blocks(maxima, sums):
    """Overall maximum, the factor e^(block maximum - maximum) of each block, and the sum over all blocks."""
    maximum = tl.max(maxima, 0)
    factors = tl.exp(maxima - maximum)
    return maximum, factors, tl.sum(sums * factors, 0)


@triton.jit
def _log_probs_kernel(
    logits_ptr, targets_ptr, log_probs_ptr, entropy_ptr, log_sums_ptr, temperature, logits_stride,
    V: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (C). The entropy comes from sums of e^(z - max) (z - max), so no large numbers cancel."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    inverse_temperature = tl.div_rn(1.0, temperature)
    blocks = tl.arange(0, NUM_BLOCKS)
    maxima = tl.full([NUM_BLOCKS], -float("inf"), tl.float32)
    sums = tl.zeros([NUM_BLOCKS], tl.float32)
    weighted_sums = tl.zeros([NUM_BLOCKS], tl.float32)
    for first in range(0, V, BLOCK):
        centred, maximum, weights, total = softmax_of_block(row_ptr, first, inverse_temperature, V, BLOCK)
        weighted = tl.sum(tl.where(weights > 0.0, weights * centred, 0.0), 0)
        here = blocks == first // BLOCK
        maxima = tl.where(here, maximum, maxima)
        sums = tl.where(here, total, sums)
        weighted_sums = tl.where(here, weighted, weighted_sums)
    maximum, factors, total = join_blocks(maxima, sums)
    weighted = tl.sum(tl.where(sums > 0.0, factors * (weighted_sums + (maxima - maximum) * sums), 0.0), 0)
    log_total = tl.log(total)
    target = tl.load(row_ptr + tl.load(targets_ptr + row))
    tl.store(log_probs_ptr + row, tl.fma(target, inverse_temperature, -maximum) - log_total)
    tl.store(entropy_ptr + row, log_total - weighted / total)
    tl.store(log_sums_ptr + row, maximum + log_total)


@triton.jit
def _grad_logits_kernel(
    logits_ptr, targets_ptr, log_sums_ptr, entropy_ptr, grad_log_probs_ptr, grad_entropy_ptr, out_ptr,
    temperature, logits_stride, out_stride, V: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (C, blocks of V). d log p[target] / dz = onehot - p; dH / dz = -p (log p + H)."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inverse_temperature = tl.div_rn(1.0, temperature)
    z = tl.load(logits_ptr + row * logits_stride + ids, mask=ids < V, other=0.0) * inverse_temperature
    log_p = z - tl.load(log_sums_ptr + row)
    grad_log_prob = tl.load(grad_log_probs_ptr + row)
    factor = grad_log_prob
    if HAS_ENTROPY:
        factor += tl.load(grad_entropy_ptr + row) * (log_p + tl.load(entropy_ptr + row))
    hit = tl.where(ids == tl.load(targets_ptr + row), grad_log_prob, 0.0)
    grad = (hit - tl.exp(log_p) * factor) * inverse_temperature
    tl.store(out_ptr + row * out_stride + ids, grad.to(out_ptr.dtype.element_ty), mask=ids < V)


def chunk_log_probs(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of each target, entropy, and log-sum-exp of the tempered logits (for the backward pass), [C] float32.

    `logits_CV` float32, rows contiguous; `targets_C` int64.
    """
    num_tokens, num_ids = logits_CV.shape
    assert logits_CV.dtype == torch.float32 and logits_CV.stride(1) == 1, "logits must be float32 with contiguous rows"
    # Three allocations: rows of one would be aligned or not, and the kernel compiled for each case.
    log_probs_C, entropy_C, log_sums_C = (
        torch.empty(num_tokens, dtype=torch.float32, device=logits_CV.device) for _ in range(3)
    )
    _log_probs_kernel[num_tokens,](
        logits_CV, targets_C, log_probs_C, entropy_C, log_sums_C, temperature, logits_CV.stride(0), V=num_ids,
        BLOCK=BLOCK_IDS, NUM_BLOCKS=triton.next_power_of_2(triton.cdiv(num_ids, BLOCK_IDS)), num_warps=NUM_WARPS,
    )  # fmt: skip
    return log_probs_C, entropy_C, log_sums_C


def chunk_grad_logits(
    logits_CV: Tensor,
    targets_C: Tensor,
    log_sums_C: Tensor,
    entropy_C: Tensor,
    grad_log_probs_C: Tensor,
    grad_entropy_C: Tensor | None,
    temperature: float,
    out_CV: Tensor,
) -> Tensor:
    """Gradient of the untempered logits into `out_CV`, in its dtype; `out_CV` may be `logits_CV` itself.

    `log_sums_C` and `entropy_C` come from `chunk_log_probs` of the same logits. Returns `out_CV`.
    """
    num_tokens, num_ids = logits_CV.shape
    assert logits_CV.stride(1) == out_CV.stride(1) == 1, "rows must be contiguous"
    grad_log_probs_C = grad_log_probs_C.contiguous()
    grad_entropy = grad_log_probs_C if grad_entropy_C is None else grad_entropy_C.contiguous()
    _grad_logits_kernel[num_tokens, triton.cdiv(num_ids, 4096)](
        logits_CV, targets_C, log_sums_C, entropy_C, grad_log_probs_C, grad_entropy, out_CV, temperature,
        logits_CV.stride(0), out_CV.stride(0), V=num_ids, HAS_ENTROPY=grad_entropy_C is not None, BLOCK=4096,
        num_warps=8,
    )  # fmt: skip
    return out_CV


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, temperature: float, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        chunks = list(zip(hidden_TD.split(chunk_rows), targets_T.split(chunk_rows), strict=True))
        keeps_logits = len(chunks) == 1 and any(ctx.needs_input_grad)
        scored, kept_TV = [], None
        for hidden_CD, targets_C in chunks:
            logits_CV = project_float32(hidden_CD, head_VD)
            scored.append(chunk_log_probs(logits_CV, targets_C, temperature))
            kept_TV = logits_CV if keeps_logits else None
            del logits_CV  # before the next ones are there
        log_probs_T, entropy_T, log_sums_T = (torch.cat(parts) for parts in zip(*scored, strict=True))
        ctx.save_for_backward(hidden_TD, head_VD, targets_T, entropy_T, log_sums_T, kept_TV)
        ctx.head, ctx.temperature, ctx.chunk_rows = head_VD, temperature, chunk_rows
        ctx.set_materialize_grads(False)
        return log_probs_T, entropy_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, head_VD, targets_T, entropy_T, log_sums_T, kept_TV = ctx.saved_tensors
        if grad_log_probs_T is None:
            grad_log_probs_T = torch.zeros_like(entropy_T)
        grad_hidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        sum_VD, grad_head_VD = gradient_to_add_to(ctx.head) if ctx.needs_input_grad[1] else (None, None)
        for start in range(0, hidden_TD.shape[0], ctx.chunk_rows):
            chunk = slice(start, start + ctx.chunk_rows)
            logits_CV = project_float32(hidden_TD[chunk], head_VD) if kept_TV is None else kept_TV
            grad_logits_CV = chunk_grad_logits(
                logits_CV,
                targets_T[chunk],
                log_sums_T[chunk],
                entropy_T[chunk],
                grad_log_probs_T[chunk],
                None if grad_entropy_T is None else grad_entropy_T[chunk],
                ctx.temperature,
                torch.empty_like(logits_CV, dtype=head_VD.dtype),
            )
            del logits_CV
            if grad_hidden_TD is not None:
                torch.mm(grad_logits_CV, head_VD, out=grad_hidden_TD[chunk])
            if sum_VD is not None:
                add_product_float32(sum_VD, grad_logits_CV.t(), hidden_TD[chunk])
            del grad_logits_CV
        return grad_hidden_TD, grad_head_VD, None, None, None


def head_log_probs(
    hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, *, temperature: float, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy, [T] float32, without ever having more logits than those of a chunk.

    Differentiable in `hidden_TD` and `head_VD`; the head's gradient is float32. The gradient of the logits has the
    dtype of the head, so that both products of the backward pass run on the matrix units.
    """
    return _HeadLogProbs.apply(hidden_TD, head_VD, targets_T, temperature, chunk_rows)
