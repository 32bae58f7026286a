"""Matrix products on CUDA whose bits do not depend on how many rows there are.

A result is one chain: the tensor cores add the products of 16 inputs at a time to a float32 accumulator, in order of
the inputs. How many rows and outputs a program takes, and which of the two comes first in the instruction, decides only
who walks a chain (`benchmarks/invariance_probe.py` tries settings, `model/invariance.py` every model at its start).

Shape letters: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Tile(NamedTuple):
    """Rows, outputs and inputs of a tile, warps, pipeline stages; `swapped` puts the weights first."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    swapped: bool = False


# The first that gives the device enough programs is taken, for 16-bit numbers. Measured on an H200.
TILES = (
    Tile(128, 256, 64, 8, 4),
    Tile(128, 128, 64, 8, 3),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(32, 64, 128, 4, 4, swapped=True),
    Tile(16, 64, 128, 4, 4, swapped=True),
)
ENOUGH_PROGRAMS = 96
WIDE_OUTPUTS = 32768  # below, the first tile is slower than the second; it needs 200 kB of shared memory
FLOAT32_TILE = Tile(32, 32, 32, 4, 2)  # there is no matrix instruction for them
GROUP_ROWS = 8  # tiles of rows that share the weights in the second-level cache


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_desc, w_desc, bias_ptr, out_ptr, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, SWAPPED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles). out [M, N] = x [M, K] @ w [N, K] transposed (+ bias [N]), rounded once."""
    num_m = tl.cdiv(num_rows, BLOCK_M)
    in_group = GROUP * tl.cdiv(num_outputs, BLOCK_N)
    first_tile = tl.program_id(0) // in_group * GROUP
    group = tl.minimum(num_m - first_tile, GROUP)
    first_m = (first_tile + tl.program_id(0) % in_group % group) * BLOCK_M
    first_n = tl.program_id(0) % in_group // group * BLOCK_N
    if SWAPPED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_k in range(0, num_inputs, BLOCK_K):
        x = x_desc.load([first_m, first_k])
        w = w_desc.load([first_n, first_k])
        if SWAPPED:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if SWAPPED:
        acc = tl.trans(acc)
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < num_outputs, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * num_outputs + offs_n[None, :]
    inside = (offs_m < num_rows)[:, None] & (offs_n < num_outputs)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def tile_for(num_rows: int, num_outputs: int, *, has_large_tiles: bool = True) -> Tile:
    """The tile of a product of 16-bit numbers."""
    for tile in TILES if has_large_tiles and num_outputs >= WIDE_OUTPUTS else TILES[1:]:
        fits = tile.rows < 2 * num_rows
        if fits and triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.outputs) >= ENOUGH_PROGRAMS:
            return tile
    return TILES[-1]


def row_product(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, M x N in the dtype of `x` or the one given; no gradient.

    Rows of K elements must be multiples of 16 bytes. `tile` is for measuring.
    """
    x_MK, weight_NK = x_MK.contiguous(), weight_NK.contiguous()
    (num_rows, num_inputs), num_outputs = x_MK.shape, weight_NK.shape[0]
    out_MN = torch.empty(num_rows, num_outputs, dtype=dtype or x_MK.dtype, device=x_MK.device)
    if num_rows == 0:
        return out_MN
    if tile is None:
        tile = (
            FLOAT32_TILE
            if x_MK.element_size() == 4
            else tile_for(num_rows, num_outputs, has_large_tiles=shared_memory(x_MK.device) > 200_000)
        )
    grid = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.outputs)
    _product_kernel[grid,](
        TensorDescriptor(x_MK, [num_rows, num_inputs], [num_inputs, 1], [tile.rows, tile.inputs]),
        TensorDescriptor(weight_NK, [num_outputs, num_inputs], [num_inputs, 1], [tile.outputs, tile.inputs]),
        out_MN if bias_N is None else bias_N, out_MN, num_rows, num_outputs, num_inputs,
        HAS_BIAS=bias_N is not None, SWAPPED=tile.swapped, GROUP=GROUP_ROWS, BLOCK_M=tile.rows, BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out_MN
