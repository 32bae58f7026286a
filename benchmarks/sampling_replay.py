"""Cost of sampling replay in the output head: time and memory of scoring over kept sets, against plain scoring.

    python benchmarks/sampling_replay.py [--device cuda] [--tokens 16384] [--hidden 1024] [--vocab 151936]

Forward and backward of log-prob and entropy for random hidden states, with top-k 64, top-k 1,000 and without a cut,
and the bytes that the kept sets take on the host and on the device. The limit is plain scoring of the same tokens.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.machine import record
from miles.observe.gpu import synchronize
from miles.ops.logprob import KeptIds, token_log_probs

ARRAY_BYTES = 112  # of an empty numpy array: each token of an answer has one


def kept_sets(num_tokens: int, vocab: int, top_k: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [np.sort(draw.choice(vocab, top_k, replace=False)).astype(np.int32) for _ in range(num_tokens)]


def measure(sets: list[np.ndarray] | None, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> dict:
    device = hidden.device
    seconds, losses = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        synchronize(device)
        start = time.perf_counter()
        kept = None
        if sets is not None:
            ids_N = torch.from_numpy(np.concatenate(sets)).to(hidden.device)
            kept = KeptIds(ids_N, np.cumsum([0, *map(len, sets)]))
        log_probs, entropy = token_log_probs(hidden, head, targets, kept=kept)
        assert entropy is not None
        losses.append(log_probs.mean() + 0.01 * entropy.mean())
        losses[-1].backward()
        hidden.grad = head.grad = None
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    assert all(bool(loss.isfinite()) for loss in losses)
    return {
        "seconds": median(seconds[1:]),
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "host_mb": 0.0 if sets is None else sum(ids.nbytes + ARRAY_BYTES for ids in sets) / 2**20,
        "device_mb": 0.0 if sets is None else 4 * sum(map(len, sets)) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    generator = torch.Generator(arguments.device).manual_seed(0)
    shapes = ((arguments.tokens, arguments.hidden), (arguments.vocab, arguments.hidden))
    hidden, head = (
        (0.05 * torch.randn(shape, generator=generator, device=arguments.device)).to(dtype).requires_grad_()
        for shape in shapes
    )
    results = {}
    for name, top_k in (("plain", 0), ("top-k 64", 64), ("top-k 1000", 1000)):
        sets = kept_sets(arguments.tokens, arguments.vocab, top_k) if top_k else None
        targets = torch.zeros(arguments.tokens, dtype=torch.int64)
        if sets is not None:
            targets = torch.tensor([int(ids[0]) for ids in sets])
        results[name] = measure(sets, hidden, head, targets.to(arguments.device))
        print(f"{name}: {results[name]}", flush=True)
    plain, slowest = results["plain"], results["top-k 1000"]
    result = {
        "name": "sampling_replay",
        "seconds": slowest["seconds"],
        "limit_seconds": plain["seconds"],
        "share_of_limit": plain["seconds"] / slowest["seconds"],
        "tokens": arguments.tokens,
        "hidden": arguments.hidden,
        "vocab": arguments.vocab,
        "settings": results,
        "peak_gb": slowest["peak_gb"],
        "peers": {},
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
