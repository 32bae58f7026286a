"""Times the Triton kernels at the shapes of the recipe (Qwen3-0.6B, 256 answers of 32 prompts) on one CUDA device.

    python benchmarks/kernels_gpu.py [--write FOLDER]

Each row gives the time, the rate it means and its share of the limit measured in the same run: a matrix product of 8192
for attention and the head, a device-to-device copy for the rest. Peers are the library calls that could take a kernel's
place. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import record
from benchmarks.recipe import ANSWERS_PER_PROMPT, LENGTHS
from miles.observe.gpu import measure_rates
from miles.ops import triton_norm_rope as small_steps
from miles.ops.logprob import token_log_probs
from miles.ops.sampling import row_seeds, sample
from miles.ops.triton_attention import attention_backward, attention_forward
from miles.ops.triton_logprob import chunk_grad_logits, chunk_log_probs
from miles.ops.triton_paged_attention import paged_flash_attention
from miles.ops.triton_sampling import sample_uncut

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, HIDDEN, FEED_FORWARD, VOCAB, PAGE = 16, 8, 128, 1024, 3072, 151936, 16
SCALE = HEAD_SIZE**-0.5
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median time between two events around `run`."""
    for _ in range(2):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for first, last in events:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in events)


def graph_milliseconds(run: Callable[[], object], calls: int = 8) -> float:
    """Time of one of `calls` calls replayed from a CUDA graph, as in a decode step: no launch waits for the host."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return milliseconds(graph.replay) / calls


class Table:
    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}
        rates = measure_rates(torch.device("cuda"), torch.bfloat16)
        self.flops, self.bytes = rates.matrix_flops_per_s, rates.copy_bytes_per_s
        print(f"matrix product {self.flops / 1e12:.0f} TFLOP/s, copy {self.bytes / 1e9:.0f} GB/s\n")
        print(f"{'':44s}{'us':>11s}{'rate':>16s}{'of limit':>10s}")

    def add(self, name: str, ms: float, *, flops: float = 0.0, num_bytes: float = 0.0) -> None:
        limit_ms = max(flops / self.flops, num_bytes / self.bytes) * 1e3
        rate = f"{flops / ms / 1e9:.0f} TFLOP/s" if flops else f"{num_bytes / ms / 1e6:.0f} GB/s"
        self.rows[name] = {"seconds": ms / 1e3, "limit_seconds": limit_ms / 1e3, "share_of_limit": limit_ms / ms}
        print(f"{name:44s}{ms * 1e3:11.1f}{rate:>16s}{limit_ms / ms:10.2f}", flush=True)


def packed_attention(table: Table, lengths: list[int], label: str) -> None:
    num_tokens = sum(lengths)
    flops = sum(length * (length + 1) / 2 for length in lengths) * 4 * NUM_HEADS * HEAD_SIZE
    qkv = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_SIZE, **BF16)
    q, k, v = qkv.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), 1)
    grad = torch.randn(num_tokens, NUM_HEADS, HEAD_SIZE, **BF16)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    longest = max(lengths)
    out, lse = attention_forward(q, k, v, bounds, longest, SCALE)
    forward_ms = milliseconds(lambda: attention_forward(q, k, v, bounds, longest, SCALE))
    table.add(f"attention forward, {label}", forward_ms, flops=flops)
    backward_ms = milliseconds(lambda: attention_backward(grad, q, k, v, out, lse, bounds, longest, SCALE))
    table.add(f"attention backward, {label}", backward_ms, flops=2.5 * flops)

    borders = (bounds, bounds, longest, longest, 0.0, True)
    q, k, v = (x.contiguous() for x in (q, k, v))
    flash = torch.ops.aten._flash_attention_forward(q, k, v, *borders, False, scale=SCALE)
    ms = milliseconds(lambda: torch.ops.aten._flash_attention_forward(q, k, v, *borders, False, scale=SCALE))
    table.add(f"  peer: torch flash attention forward, {label}", ms, flops=flops)
    saved = (flash[0], flash[1], *borders, flash[2], flash[3])
    ms = milliseconds(lambda: torch.ops.aten._flash_attention_backward(grad, q, k, v, *saved, scale=SCALE))
    table.add(f"  peer: torch flash attention backward, {label}", ms, flops=2.5 * flops)


def paged_attention(table: Table, contexts: list[int], label: str, new_tokens: int = 1) -> None:
    pages = [-(-context // PAGE) for context in contexts]
    tables = torch.zeros(len(contexts), max(*pages, 2048 // PAGE), dtype=torch.int32)
    order = torch.randperm(sum(pages), dtype=torch.int32)
    for row, part in zip(tables, order.split(pages), strict=True):
        row[: len(part)] = part
    caches = [torch.randn(NUM_KV_HEADS, sum(pages) * PAGE, HEAD_SIZE, **BF16) for _ in range(2)]
    q = torch.randn(len(contexts) * new_tokens, NUM_HEADS, HEAD_SIZE, **BF16)
    starts = torch.arange(len(contexts) + 1, dtype=torch.int32, device="cuda") * new_tokens
    context_lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    inputs = (q, *caches, tables.cuda(), context_lens, starts)
    options = {"max_query_len": new_tokens, "page_size": PAGE, "scale": SCALE}
    ms = graph_milliseconds(lambda: paged_flash_attention(*inputs, **options))
    if new_tokens == 1:
        table.add(f"paged decode, {label}", ms, num_bytes=sum(contexts) * NUM_KV_HEADS * HEAD_SIZE * 4)
    else:
        pairs = sum(new_tokens * (context - new_tokens) + new_tokens * (new_tokens + 1) / 2 for context in contexts)
        table.add(f"paged prompt chunk, {label}", ms, flops=pairs * 4 * NUM_HEADS * HEAD_SIZE)


def steps_between_products(table: Table, num_tokens: int) -> None:
    x, residual = torch.randn(2, num_tokens, HIDDEN, **BF16)
    weight, head_weight = torch.randn(HIDDEN, **BF16), torch.randn(HEAD_SIZE, **BF16)
    ms = graph_milliseconds(lambda: small_steps.add_rms_norm(x, residual, weight, 1e-6))
    table.add(f"add + rms_norm, {num_tokens} tokens", ms, num_bytes=num_tokens * HIDDEN * 2 * 4)
    qkv = torch.randn(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE, **BF16)
    cos, sin = torch.randn(2, num_tokens, 1, HEAD_SIZE, device="cuda")
    caches = torch.zeros(2, NUM_KV_HEADS, num_tokens, HEAD_SIZE, **BF16)
    slots = torch.randperm(num_tokens, device="cuda")
    norm_rope = (qkv, head_weight, head_weight, 1e-6, cos, sin, slots, *caches)
    ms = graph_milliseconds(lambda: small_steps.qk_norm_rope_store(*norm_rope))
    table.add(f"q/k norm + rope + cache write, {num_tokens} tokens", ms, num_bytes=qkv.numel() * 4)
    gate_up = torch.randn(num_tokens, 2 * FEED_FORWARD, **BF16)
    ms = graph_milliseconds(lambda: small_steps.silu_mul(gate_up))
    table.add(f"silu * up, {num_tokens} tokens", ms, num_bytes=num_tokens * FEED_FORWARD * 6)


def head(table: Table, num_rows: int, num_tokens: int) -> None:
    logits = torch.randn(num_rows, VOCAB, device="cuda") * 3
    rows = torch.arange(num_rows, device="cuda")
    seeds = row_seeds(rows, rows)
    ms = graph_milliseconds(lambda: sample_uncut(logits, seeds_R2=seeds))
    table.add(f"sampler, {num_rows} rows", ms, num_bytes=logits.numel() * 4)
    ms = milliseconds(lambda: sample(logits, seeds_R2=seeds), 3)
    table.add("  peer: sampler in torch", ms, num_bytes=logits.numel() * 4)

    hidden, weight = torch.randn(num_tokens, HIDDEN, **BF16), torch.randn(VOCAB, HIDDEN, **BF16) * 0.02
    targets = torch.randint(VOCAB, (num_tokens,), device="cuda")
    product_flops = 2 * num_tokens * VOCAB * HIDDEN
    ms = milliseconds(lambda: torch.mm(hidden, weight.t(), out_dtype=torch.float32))
    table.add(f"  peer: head product alone, float32 out, {num_tokens} tokens", ms, flops=product_flops)
    logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    log_probs, entropy, log_sums = chunk_log_probs(logits, targets, 1.0)
    ms = milliseconds(lambda: chunk_log_probs(logits, targets, 1.0))
    table.add(f"log-prob and entropy, {num_tokens} tokens", ms, num_bytes=logits.numel() * 4)
    grads = torch.empty(num_tokens, VOCAB, **BF16)
    saved = (logits, targets, log_sums, entropy, log_probs, log_probs, 1.0, grads)
    ms = milliseconds(lambda: chunk_grad_logits(*saved))
    table.add(f"gradient of logits to bf16, {num_tokens} tokens", ms, num_bytes=logits.numel() * 6)
    with torch.no_grad():
        ms = milliseconds(lambda: token_log_probs(hidden, weight, targets, chunk_size=num_tokens), 3)
    table.add("  peer: product and log-prob in torch", ms, flops=product_flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="folder for the result, for example benchmarks/results")
    write = parser.parse_args().write
    prompts = [length for length in LENGTHS["prompt_lengths"] for _ in range(ANSWERS_PER_PROMPT)]
    answers = LENGTHS["answer_lengths"]
    lengths = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    torch.manual_seed(0)
    table = Table()
    packed_attention(table, lengths, f"{len(lengths)} sequences")
    packed_attention(table, lengths[:39], "39 sequences")
    packed_attention(table, [16384] * 2, "2 x 16k")
    halfway = [prompt + answer // 2 for prompt, answer in zip(prompts, answers, strict=True)]
    paged_attention(table, halfway, "256 answers halfway")
    paged_attention(table, [1000] * 256, "256 x 1000")
    paged_attention(table, [1000] * 64, "64 x 1000")
    paged_attention(table, [1000], "1 x 1000")
    paged_attention(table, [4096] * 4, "4 x 1024 of 4096", new_tokens=1024)
    steps_between_products(table, 256)
    steps_between_products(table, 32768)
    head(table, 256, 4096)

    peers = {name: row for name, row in table.rows.items() if name.startswith("  ")}
    ours = [row for name, row in table.rows.items() if name not in peers]
    seconds, limit_seconds = (sum(row[key] for row in ours) for key in ("seconds", "limit_seconds"))
    result = {
        "name": "kernels",
        "seconds": seconds,  # of all rows, one call each
        "limit_seconds": limit_seconds,
        "share_of_limit": limit_seconds / seconds,
        "peers": {
            name.removeprefix("  peer: "): {"seconds": row["seconds"], "version": torch.__version__}
            for name, row in peers.items()
        },
        "kernels": {name.strip(): row for name, row in table.rows.items()},
        "matrix_tflops": table.flops / 1e12,
        "copy_gb_per_s": table.bytes / 1e9,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    record(result, write=write)


if __name__ == "__main__":
    main()
