"""Which matrix products and attention tiles give the same bits for any number of rows, and what they cost.

    python benchmarks/invariance_probe.py [--write FOLDER]

On one CUDA device at the shapes of Qwen3-0.6B. A setting is compared with the product of all rows by the plain tile of
64; "bits" counts the numbers of rows (of those tried) whose results equal it everywhere. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.kernels_gpu import graph_milliseconds, milliseconds
from benchmarks.machine import record
from benchmarks.recipe import ANSWERS_PER_PROMPT, LENGTHS
from miles.ops import triton_paged_attention
from miles.ops.triton_attention import attention_forward
from miles.ops.triton_matmul import Tile, row_product
from miles.ops.triton_paged_attention import paged_flash_attention

SHAPES = {"qkv": (4096, 1024), "output": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
HEAD = (151936, 1024)
ROWS = (1, 5, 16, 17, 64, 100, 256, 1000, 4096, 8192)
PLAIN = Tile(64, 64, 64, 4, 4)
TILES = (
    PLAIN,
    Tile(64, 128, 64, 4, 4),
    Tile(64, 128, 128, 4, 3),
    Tile(128, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 3),
    Tile(128, 256, 64, 8, 3),
    Tile(128, 256, 64, 8, 4),
    Tile(16, 64, 128, 4, 4, swapped=True),
    Tile(16, 128, 64, 4, 4, swapped=True),
    Tile(32, 64, 128, 4, 4, swapped=True),
    Tile(64, 64, 128, 4, 3, swapped=True),
    Tile(128, 64, 64, 4, 4, swapped=True),
    Tile(16, 64, 64, 4, 4),
    Tile(16, 64, 128, 2, 4),
    Tile(32, 64, 64, 4, 4),
)


def tensors(num_rows: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
    return x, torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def products() -> dict[str, Any]:
    found: dict[str, Any] = {}
    wanted = {}
    for name, shape in SHAPES.items():
        x, weight = tensors(max(ROWS), shape)
        wanted[name] = (x, weight, row_product(x, weight, tile=PLAIN))
    for tile in TILES:

        def equal(num_rows: int, name: str, tile: Tile = tile) -> bool:
            x, weight, all_rows = wanted[name]
            return torch.equal(row_product(x[-num_rows:], weight, tile=tile), all_rows[-num_rows:])

        try:
            found[str(tuple(tile))] = sum(equal(num, name) for num in ROWS for name in SHAPES)
        except Exception as error:  # noqa: BLE001 - a tile may not fit the device
            found[str(tuple(tile))] = f"{type(error).__name__}: {str(error)[:100]}"
        print(f"bits of {len(ROWS) * len(SHAPES)}: {tuple(tile)}: {found[str(tuple(tile))]}", flush=True)
    for name, (x, weight, all_rows) in wanted.items():
        same = [num for num in ROWS if torch.equal(x[-num:] @ weight.t(), all_rows[-num:])]
        among = [num for num in ROWS if torch.equal(x[-num:] @ weight.t(), (x @ weight.t())[-num:])]
        found[f"cuBLAS {name}"] = {"equals_ours": same, "equals_its_8192": among}
        print(f"cuBLAS {name}: equals ours for rows {same}; equals its own 8192 for {among}", flush=True)
    return found


def speeds() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, shape in (SHAPES | {"head": HEAD}).items():
        dtype = torch.float32 if name == "head" else torch.bfloat16
        for num_rows in (8, 32, 64, 256, 2048 if name == "head" else 8192):
            x, weight = tensors(num_rows, shape)
            timed = {}
            for tile in TILES[:12]:
                if tile.rows > max(64, num_rows) or (num_rows > 256 and tile.rows < 64):
                    continue
                try:
                    run = lambda t=tile, x=x, w=weight, d=dtype: row_product(x, w, dtype=d, tile=t)  # noqa: E731
                    timed[str(tuple(tile))] = graph_milliseconds(run, 4) * 1e3
                except Exception as error:  # noqa: BLE001 - as above
                    print(f"{tuple(tile)}: {type(error).__name__}", flush=True)
            peer = graph_milliseconds(lambda x=x, w=weight, d=dtype: torch.mm(x, w.t(), out_dtype=d), 4) * 1e3
            best = min(timed, key=timed.__getitem__)
            found[f"{name} {num_rows}"] = {"us": timed, "cublas_us": peer}
            others = " ".join(f"{tile}={us:.1f}" for tile, us in sorted(timed.items(), key=lambda e: e[1])[:4])
            print(f"{name} {num_rows}: best {best} {timed[best]:.1f} us, cuBLAS {peer:.1f} us | {others}", flush=True)
    return found


def attention() -> dict[str, Any]:
    """The paged kernel on whole packed sequences: equal to its own decode? How long, beside the training kernel?"""
    prompts = [length for length in LENGTHS["prompt_lengths"] for _ in range(ANSWERS_PER_PROMPT)]
    lengths = [p + a for p, a in zip(prompts, LENGTHS["answer_lengths"], strict=True)][:39]
    num_tokens, longest, scale = sum(lengths), max(lengths), 128**-0.5
    qkv = torch.randn(num_tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split((16, 8, 8), 1)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    tables = starts[:-1, None] + torch.arange(longest, dtype=torch.int32, device="cuda")
    contexts = starts.diff()
    ms = milliseconds(lambda: attention_forward(q, k, v, starts, longest, scale))
    print(f"training kernel: {ms * 1e3:.0f} us for {num_tokens} tokens", flush=True)
    found: dict[str, Any] = {"training_kernel_us": ms * 1e3, "tokens": num_tokens}
    last = (starts[1:] - 1).long()
    caches = (k.transpose(0, 1), v.transpose(0, 1))
    one_each = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda")
    decoded = paged_flash_attention(
        q[last].contiguous(), *caches, tables, contexts, one_each, max_query_len=1, page_size=1, scale=scale
    )
    for query_rows, keys, warps, stages in ((16, 128, 4, 3), (16, 128, 1, 2), (32, 128, 4, 2), (32, 128, 2, 2),
                                            (64, 128, 2, 2), (64, 128, 4, 2), (64, 128, 8, 2)):  # fmt: skip
        name = f"{query_rows} rows, {keys} keys, {warps} warps, {stages} stages"
        triton_paged_attention.TILES[16 if query_rows == 16 else 64] = (keys, warps, stages)
        run = lambda rows=query_rows: paged_flash_attention(  # noqa: E731
            q, *caches, tables, contexts, starts, max_query_len=longest, page_size=1, scale=scale, query_rows=rows
        )
        try:
            equal = int((run()[last] == decoded).all(-1).sum())
            ms = milliseconds(run, 5)
        except Exception as error:  # noqa: BLE001 - as above
            print(f"paged kernel {name}: {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        found[name] = {"us": ms * 1e3, "equal_heads": equal, "of": decoded.shape[0] * decoded.shape[1]}
        print(f"paged kernel {name}: {ms * 1e3:.0f} us, {equal} of {decoded.shape[0] * 16} heads as decode", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, triton {triton.__version__}", flush=True)
    result: dict[str, Any] = {"name": "invariance_probe", "products": products(), "attention": attention()}
    result["speeds"] = speeds()
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
