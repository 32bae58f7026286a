"""Decode attention with prompts read once for each group of answers and once for each answer, on a GPU.

    python benchmarks/shared_prompts.py [--only 32,2,4,256] [--write FOLDER]

A setting is: keys of a block, warps, pipeline stages, tokens of a chunk. Each is timed in five states of a rollout of
Qwen3-0.6B shapes, one layer, replayed from a CUDA graph; shared reads must change no bit of it. Beside it, prompt
chunks of 16-row tiles, which have the bits of decode, and of 64-row tiles. The limit of a state is its keys and values,
shared ones once, over the copy rate. Prints a table, microseconds, and one JSON line; its time is that of the first
setting.
"""

from __future__ import annotations

import argparse
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.kernels_gpu import (
    BF16,
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    PAGE,
    SCALE,
    graph_milliseconds,
)
from benchmarks.machine import record
from benchmarks.recipe import ANSWERS_PER_PROMPT, LENGTHS
from miles.engine import sharing
from miles.observe.gpu import measure_rates
from miles.ops import triton_paged_attention as attention

Setting = tuple[int, int, int, int]
SETTINGS: list[Setting] = [
    (*attention.TILES[16], attention.CHUNK),
    *((32, 2, 3, chunk) for chunk in (128, 512)),
    *((32, warps, stages, 256) for warps, stages in ((2, 4), (4, 3), (4, 4), (1, 3))),
    *((64, warps, 3, 256) for warps in (2, 4)),
    *((16, 2, stages, 256) for stages in (3, 4)),
]


@dataclass
class State:
    name: str
    inputs: tuple[Tensor, ...]
    blocks: np.ndarray
    contexts: list[int]
    unique_tokens: int

    def run(self, plan: Tensor | None) -> Tensor:
        return attention.paged_flash_attention(
            *self.inputs, max_query_len=1, page_size=PAGE, scale=SCALE, shared_3S=plan
        )

    def plan(self) -> Tensor | None:
        rows = np.arange(len(self.contexts))
        table: Any = SimpleNamespace(
            page_size=PAGE, order=rows, computed=np.array(self.contexts) - 1, blocks=self.blocks
        )
        planner = sharing.SharedBeginnings(
            table,
            num_places=len(rows) + 1,
            tile_rows=attention.tile_rows(NUM_HEADS // NUM_KV_HEADS),
            key_block=attention.TILES[16][0],
            most_tokens=attention.CHUNK * attention.SHARED_CHUNKS,
        )
        plan = planner.plan(rows)
        return None if plan is None else torch.from_numpy(plan).cuda()


def state(name: str, prompts: list[int], answers: int, written: list[int]) -> State:
    """Groups of `answers` rows. Row i has `written[i]` tokens behind its prompt; the group shares its whole blocks."""
    contexts = [prompts[i // answers] + tokens for i, tokens in enumerate(written)]
    blocks = np.zeros((len(contexts), max(-(-max(contexts) // PAGE), 2048 // PAGE)), dtype=np.int64)
    taken = 1
    for row, context in enumerate(contexts):
        shared = prompts[row // answers] // PAGE if row % answers else 0
        own = -(-context // PAGE) - shared
        blocks[row, :shared] = blocks[row - row % answers, :shared]
        blocks[row, shared : shared + own] = range(taken, taken + own)
        taken += own
    blocks = np.concatenate((np.zeros(1, dtype=np.int64), 1 + np.random.default_rng(0).permutation(taken - 1)))[blocks]
    caches = [torch.randn(NUM_KV_HEADS, taken * PAGE, HEAD_SIZE, **BF16) for _ in range(2)]
    q = torch.randn(len(contexts), NUM_HEADS, HEAD_SIZE, **BF16)
    bounds = torch.arange(len(contexts) + 1, dtype=torch.int32, device="cuda")
    tables = torch.from_numpy(blocks.astype(np.int32)).cuda()
    lengths = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    read_again = sum(prompts[row // answers] for row in range(len(contexts)) if row % answers)
    return State(name, (q, *caches, tables, lengths, bounds), blocks, contexts, sum(contexts) - read_again)


def states() -> list[State]:
    prompts = LENGTHS["prompt_lengths"]
    rows = len(prompts) * ANSWERS_PER_PROMPT
    return [
        state("recipe", prompts, ANSWERS_PER_PROMPT, [500] * rows),
        state("16 x 1000", [1000] * 16, 16, [300] * 256),
        state("alone", [600] * 256, 1, [16] * 256),
        state("32 late", prompts[:4], ANSWERS_PER_PROMPT, [900] * 32),
        state("1 late", [100], 1, [900]),
    ]


def use(setting: Setting) -> None:
    sharing.WORTHWHILE_TOKENS = 1  # the worth of it is what is measured
    *attention.TILES[16], attention.CHUNK = setting  # type: ignore[misc]


class Skipped:
    """In place of a kernel, to time what is left."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *arguments, **options: None


def compile_for(setting: Setting) -> None:
    """Leaves the kernels of a setting in Triton's cache on disk."""
    use(setting)
    for each in states():
        try:
            each.run(None)
            plan = each.plan()
            if plan is not None:
                each.run(plan)
        except OutOfResources as error:
            print(f"{setting}: {error}", flush=True)
    torch.cuda.synchronize()


def measure(setting: Setting, each: State) -> dict[str, float]:
    use(setting)
    alone = each.run(None)
    found = {"once per answer": graph_milliseconds(lambda: each.run(None))}
    plan = each.plan()
    if plan is not None:
        assert torch.equal(each.run(plan), alone), f"shared reads change bits: {setting}, {each.name}"
        found["once per group"] = graph_milliseconds(lambda: each.run(plan))
        kernel, attention._attend_kernel = attention._attend_kernel, Skipped()
        found["of which shared part"] = graph_milliseconds(lambda: each.run(plan))
        attention._attend_kernel = kernel
    return {name: ms / 1e3 for name, ms in found.items()}


def prompt_chunk(query_rows: int) -> float:
    """Seconds of 1,024 new tokens of 4,096 in each of four sequences."""
    tables = torch.randperm(4 * 4096 // PAGE, dtype=torch.int32, device="cuda").view(4, -1)
    caches = [torch.randn(NUM_KV_HEADS, 4 * 4096, HEAD_SIZE, **BF16) for _ in range(2)]
    q = torch.randn(4096, NUM_HEADS, HEAD_SIZE, **BF16)
    lengths = torch.full((4,), 4096, dtype=torch.int32, device="cuda")
    inputs = (q, *caches, tables, lengths, torch.arange(5, dtype=torch.int32, device="cuda") * 1024)
    options: Any = {"max_query_len": 1024, "page_size": PAGE, "scale": SCALE, "query_rows": query_rows}
    return graph_milliseconds(lambda: attention.paged_flash_attention(*inputs, **options)) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a setting, such as 32,2,4,256; may be given several times")
    parser.add_argument("--write", type=Path, help="folder for the result, for example benchmarks/results")
    arguments = parser.parse_args()
    settings: list[Any] = [tuple(map(int, each.split(","))) for each in arguments.only or ()] or SETTINGS
    with multiprocessing.get_context("spawn").Pool(min(8, len(settings))) as pool:
        pool.map(compile_for, settings, chunksize=1)
    rate = measure_rates(torch.device("cuda"), torch.bfloat16).copy_bytes_per_s
    torch.manual_seed(0)
    rows, all_states = [], states()
    limits = {each.name: each.unique_tokens * NUM_KV_HEADS * HEAD_SIZE * 4 / rate for each in all_states}
    print(f"limits, us, at {rate / 1e9:.0f} GB/s: { ({name: round(s * 1e6, 1) for name, s in limits.items()}) }")
    print(
        f"{'keys, warps, stages, chunk':28s}"
        + "".join(f"{each.name:>26s}" for each in all_states)
        + f"{'4 x 1024 of 4096':>26s}"
    )
    for setting in settings:
        try:
            found = {each.name: measure(setting, each) for each in all_states}
        except OutOfResources:
            continue
        found["4 x 1024 of 4096"] = {f"{count} rows": prompt_chunk(count) for count in (16, 64)}
        cells = (" / ".join(f"{s * 1e6:.1f}" for s in times.values()) for times in found.values())
        print(f"{setting!s:28s}" + "".join(f"{cell:>26s}" for cell in cells), flush=True)
        rows.append({"setting": setting, "seconds": found})
    print("in each cell: once per answer / once per group / shared part of that; last: tiles of 16 / of 64 rows")
    recipe = rows[0]["seconds"]["recipe"]
    seconds = min(recipe["once per answer"], recipe["once per group"])
    result = {
        "name": "shared_prompts",
        "seconds": seconds,
        "limit_seconds": limits["recipe"],
        "share_of_limit": limits["recipe"] / seconds,
        "peers": {},
        "limits": limits,
        "settings": rows,
        "copy_gb_per_s": rate / 1e9,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
