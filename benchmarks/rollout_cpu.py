"""Rollout speed on a CPU: our engine and `generate` of transformers, the same float32 model, paired in one run.

The work is fixed by `cases/rollout_lengths.json`: prompts of 16 to 48 tokens, 8 answers each, and the length of every
answer. Both sides sample at temperature 1 and never see an end token; we also return log-probs, the peer does not.
The peer gets batches of 64 rows in the order of the file, padded on the left; a row counts as finished at its length
and the batch ends with its last row. We get all requests at once, with a prefix index flushed before each run.
A pair is one run of each; the table shows medians over the pairs, and the ratio is the median of the pairs' ratios.
The limit is arithmetic alone: the products of all tokens that must be computed (each prompt once) at the rate that a
large matrix product reached in this run.

    python -m benchmarks.rollout_cpu [--shape tiny|smollm2] [--pairs 5] [--threads 1] [--write FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import StoppingCriteria

from benchmarks.machine import record
from miles.config.sections import EngineConfig
from miles.engine.local import LocalEngine
from miles.model.load import load_model
from miles.model.spec import ModelSpec
from miles.types import GenerationRequest, SamplingParams

CASES = Path(__file__).parent / "cases" / "rollout_lengths.json"
PEER_BATCH = 64
# Share of the requests that a shape runs: the large one would take minutes per run.
NUM_REQUESTS = {"tiny": None, "smollm2": 32}


def config_of(shape: str) -> PretrainedConfig:
    if shape == "tiny":  # 1.7 million parameters
        return Qwen3Config(
            vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        )  # fmt: skip
    return LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip


def workload(case: str, num_requests: int | None, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Prompt and answer length of every request; the ids of a prompt follow from its place in the file."""
    cases = json.loads(CASES.read_text())
    lengths = cases["answer_lengths"][case][:num_requests]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, vocab_size, length).tolist() for length in cases["prompt_lengths"]]
    return [prompts[i // cases["answers_per_prompt"]] for i in range(len(lengths))], lengths


async def run_ours(engine: LocalEngine, prompts: list[list[int]], lengths: list[int], seed: int) -> int:
    engine.submit(
        GenerationRequest(i, prompt, SamplingParams(max_new_tokens=length, ignore_eos=True), noise_key=seed * 10**6 + i)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    )
    num_open, num_tokens = len(prompts), 0
    while num_open:
        for result in await engine.results():
            assert result.error is None, result.error
            assert len(result.output_ids) == len(result.log_probs) == lengths[result.request_id]
            num_open, num_tokens = num_open - 1, num_tokens + len(result.output_ids)
    return num_tokens


class RowLengths(StoppingCriteria):
    """Ends each row at its own length."""

    def __init__(self, num_prompt: int, lengths: list[int]) -> None:
        self._ends = torch.tensor(lengths) + num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


@torch.no_grad()
def run_peer(model: Any, prompts: list[list[int]], lengths: list[int], seed: int) -> int:
    torch.manual_seed(seed)
    for begin in range(0, len(prompts), PEER_BATCH):
        batch, ends = prompts[begin : begin + PEER_BATCH], lengths[begin : begin + PEER_BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
            eos_token_id=None, max_new_tokens=max(ends), stopping_criteria=[RowLengths(width, ends)],
        )  # fmt: skip
        assert out.shape[1] == width + max(ends)
    return sum(lengths)


def seconds_of(run: Callable[[], int]) -> float:
    gc.collect()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def gflops_per_second() -> float:
    """Rate of a float32 product that is large enough to be limited by arithmetic; best of several."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = min(seconds_of(lambda: int((a @ b).shape[0])) for _ in range(20))
    return 2 * 1024**3 / best / 1e9


def gflops_needed(spec: ModelSpec, prompts: list[list[int]], lengths: list[int]) -> float:
    """Products with weights and in attention; a prompt once, the last token of an answer not at all."""
    unique = {tuple(prompt) for prompt in prompts}
    num_tokens = sum(map(len, unique)) + sum(length - 1 for length in lengths)
    contexts = sum(len(prompt) * (len(prompt) + 1) // 2 for prompt in unique)
    contexts += sum(len(p) * (n - 1) + n * (n - 1) // 2 for p, n in zip(prompts, lengths, strict=True))
    attention = 2 * contexts * spec.num_heads * spec.head_dim * spec.num_layers
    layers = num_tokens * spec.num_layers * spec.num_layer_matrix_parameters
    return 2 * (attention + layers + sum(lengths) * spec.hidden_size * spec.vocab_size) / 1e9


def measure(shape: str, num_pairs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = config_of(shape)
    peer = (Qwen3ForCausalLM if shape == "tiny" else LlamaForCausalLM)(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        model = load_model(Path(folder), dtype=torch.float32, device="cpu")
    engine = LocalEngine(model, None, EngineConfig(engine_max_total_tokens=65536), device="cpu")
    rate, cases = gflops_per_second(), {}
    for case in ("exponential", "uniform", "equal"):
        prompts, lengths = workload(case, NUM_REQUESTS[shape], config.vocab_size)
        ours, theirs = [], []
        for pair in range(num_pairs + 1):
            engine.set_version(engine.version + 1)
            ours.append(seconds_of(lambda: asyncio.run(run_ours(engine, prompts, lengths, pair))))  # noqa: B023
            theirs.append(seconds_of(lambda: run_peer(peer, prompts, lengths, pair)))  # noqa: B023
        ours, theirs = ours[1:], theirs[1:]  # the first pair warms up
        limit = gflops_needed(model.spec, prompts, lengths) / rate
        cases[case] = {
            "requests": len(lengths),
            "answer_tokens": sum(lengths),
            "mean_over_max_length": round(sum(lengths) / len(lengths) / max(lengths), 3),
            "seconds": round(median(ours), 4),
            "peer_seconds": round(median(theirs), 4),
            "ratio": round(median(b / a for a, b in zip(ours, theirs, strict=True)), 2),
            "ratios": [round(b / a, 2) for a, b in zip(ours, theirs, strict=True)],
            "tokens_per_second": round(sum(lengths) / median(ours)),
            "peer_tokens_per_second": round(sum(lengths) / median(theirs)),
            "limit_seconds": round(limit, 4),
            "share_of_limit": round(limit / median(ours), 3),
        }
    engine.close()
    return {"parameters": model.spec.num_parameters, "gflops_per_second": round(rate, 1), "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(NUM_REQUESTS), default="tiny")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", type=Path, help="folder that gets the JSON line as a file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load_before = os.getloadavg()[0]
    measured = measure(args.shape, args.pairs)
    cases = measured["cases"]
    columns = ("answer_tokens", "seconds", "peer_seconds", "ratio", "tokens_per_second", "share_of_limit")
    print(" ".join(f"{name:>17}" for name in ("case", *columns)))
    for name, case in cases.items():
        print(" ".join(f"{value:>17}" for value in (name, *(case[column] for column in columns))))
    seconds, limit = (sum(case[key] for case in cases.values()) for key in ("seconds", "limit_seconds"))
    peer_seconds = sum(case["peer_seconds"] for case in cases.values())
    result = {
        "name": f"rollout_cpu_{args.shape}",
        "seconds": round(seconds, 4),
        "limit_seconds": round(limit, 4),
        "share_of_limit": round(limit / seconds, 3),
        "peers": {"transformers.generate": {"seconds": round(peer_seconds, 4), "version": transformers.__version__}},
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "threads": args.threads,
        "pairs": args.pairs,
        "peer_batch": PEER_BATCH,
        "load_average_before": round(load_before, 2),
        **measured,
    }
    record(result, write=args.write, on_cpu=True)


if __name__ == "__main__":
    main()
