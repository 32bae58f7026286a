"""Draw the next token of every row and its log-prob on CUDA, reading the logits once.

The same exponential race with the same noise bits as `ops/sampling.py`, for rows without cuts. A program reads a block
of token ids of one row and leaves the block's softmax and its winner; a second, small kernel joins the blocks of a row.
A block's race is run on e^(z - block maximum) / E, which rescales like the softmax itself.

Shape letters: R rows, V vocabulary, J blocks of token ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from miles.ops.sampling import Draw
from miles.ops.triton_logprob import BLOCK_IDS, NUM_WARPS, join_blocks, softmax_of_block

UNIFORM_STEP = tl.constexpr(2.0**-31 * (1.0 - 2.0**-24))


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _exponential(ids, first_seed, second_seed, FAST: tl.constexpr):
    """Unit exponentials -log1p(-v) of the uint32 token ids; a series where 1 - v would lose the digits of v."""
    bits = _mix((_mix(ids) ^ first_seed) * (second_seed | 1))
    v = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * UNIFORM_STEP
    series = v + v * v * (0.5 + v * (0.3333333333 + v * (0.25 + v * 0.2)))
    log = libdevice.fast_logf(1.0 - v) if FAST else tl.log(1.0 - v)
    return tl.where(v < 0.015625, series, -log)


@triton.jit
def _race_kernel(
    logits_ptr, seeds_ptr, temperatures_ptr, greedy_ptr, floats_ptr, winners_ptr, num_blocks, logits_stride,
    V: tl.constexpr, BLOCK: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_GREEDY: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (R, J). floats [R, J, 3]: maximum, sum, winner's score. winners [R, J]: token ids.

    FAST takes the device's short logarithm and division (2^-22), which the interpreter does not have."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    inverse_temperature = 1.0
    if HAS_TEMPERATURE:
        inverse_temperature = tl.div_rn(1.0, tl.load(temperatures_ptr + row))
    row_ptr = logits_ptr + row * logits_stride
    centred, maximum, weights, total = softmax_of_block(row_ptr, first, inverse_temperature, V, BLOCK)
    first_seed = tl.load(seeds_ptr + 2 * row).to(tl.uint32, bitcast=True)
    second_seed = tl.load(seeds_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
    times = _exponential((first + tl.arange(0, BLOCK)).to(tl.uint32), first_seed, second_seed, FAST)
    scores = libdevice.fast_dividef(weights, times) if FAST else weights / times
    if HAS_GREEDY:
        scores = tl.where(tl.load(greedy_ptr + row) != 0, centred, scores)
    scores = tl.where(scores == scores, scores, -float("inf"))  # NaN would win or lose at random
    best, winner = tl.max(scores, 0, return_indices=True)
    cell = row * num_blocks + tl.program_id(1)
    tl.store(floats_ptr + cell * 3, maximum)
    tl.store(floats_ptr + cell * 3 + 1, total)
    tl.store(floats_ptr + cell * 3 + 2, best)
    tl.store(winners_ptr + cell, first + winner)


@triton.jit
def _finish_kernel(
    logits_ptr, temperatures_ptr, greedy_ptr, floats_ptr, winners_ptr, tokens_ptr, log_probs_ptr, finite_ptr,
    num_blocks, logits_stride,
    V: tl.constexpr, NUM_BLOCKS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_GREEDY: tl.constexpr,
):  # fmt: skip
    """Grid (R)."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, NUM_BLOCKS)
    inside = blocks < num_blocks
    cells = row * num_blocks + blocks
    maxima = tl.load(floats_ptr + cells * 3, mask=inside, other=-float("inf"))
    sums = tl.load(floats_ptr + cells * 3 + 1, mask=inside, other=0.0)
    scores = tl.load(floats_ptr + cells * 3 + 2, mask=inside, other=0.0)
    winners = tl.load(winners_ptr + cells, mask=inside, other=0)
    maximum, factors, total = join_blocks(maxima, sums)
    scaled = scores * factors
    if HAS_GREEDY:
        scaled = tl.where(tl.load(greedy_ptr + row) != 0, scores + maxima, scaled)
    scaled = tl.where(inside & (scaled == scaled), scaled, -float("inf"))
    here = blocks == tl.argmax(scaled, 0)
    token = tl.minimum(tl.sum(tl.where(here, winners, 0), 0), V - 1)
    inverse_temperature = 1.0
    if HAS_TEMPERATURE:
        inverse_temperature = tl.div_rn(1.0, tl.load(temperatures_ptr + row))
    logit = tl.load(logits_ptr + row * logits_stride + token)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(log_probs_ptr + row, tl.fma(logit, inverse_temperature, -maximum) - tl.log(total))
    tl.store(finite_ptr + row, (total - total == 0.0).to(tl.int8))


def sample_uncut(
    logits_RV: Tensor,
    *,
    seeds_R2: Tensor,
    temperature_R: Tensor | None = None,
    greedy_R: Tensor | None = None,
) -> Draw:
    """`ops.sampling.sample` without cuts; leaves the logits (float32, rows contiguous) as they are.

    Same noise bits, so the same token except where two arrive within rounding of each other. A logit of -inf is a token
    that cannot be drawn, not a row that is not finite. Usable in a CUDA graph.
    """
    num_rows, num_ids = logits_RV.shape
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1, "logits must be float32 with contiguous rows"
    device = logits_RV.device
    num_blocks = triton.cdiv(num_ids, BLOCK_IDS)
    floats = torch.empty(num_rows, num_blocks, 3, dtype=torch.float32, device=device)
    winners = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    tokens_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    log_probs_R = torch.empty(num_rows, dtype=torch.float32, device=device)
    finite_R = torch.empty(num_rows, dtype=torch.bool, device=device)
    temperature = floats if temperature_R is None else temperature_R
    greedy = seeds_R2 if greedy_R is None else greedy_R.view(torch.int8)
    options = {"HAS_TEMPERATURE": temperature_R is not None, "HAS_GREEDY": greedy_R is not None, "num_warps": NUM_WARPS}
    _race_kernel[num_rows, num_blocks](
        logits_RV, seeds_R2.contiguous(), temperature, greedy, floats, winners, num_blocks, logits_RV.stride(0),
        V=num_ids, BLOCK=BLOCK_IDS, FAST=logits_RV.is_cuda, **options,
    )  # fmt: skip
    _finish_kernel[num_rows,](
        logits_RV, temperature, greedy, floats, winners, tokens_R, log_probs_R, finite_R.view(torch.int8), num_blocks,
        logits_RV.stride(0), V=num_ids, NUM_BLOCKS=triton.next_power_of_2(num_blocks), **options,
    )  # fmt: skip
    return Draw(tokens_R, log_probs_R, finite_R)
