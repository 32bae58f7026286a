"""pass@1 and pass@k of a model on files of questions, sampled by the engine.

    python benchmarks/pass_rates.py MODEL NAME=FILE [NAME=FILE ...] [--answers 32] [--problems 200] [--write FOLDER]

Grading: the last number of the answer equals the last number of the label. pass@k is the unbiased estimate of
arXiv 2107.03374.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.machine import record
from miles.config.sections import EngineConfig
from miles.engine.local import LocalEngine
from miles.model.load import load_model
from miles.text.tokenizer import Tokenizer, load_tokenizer
from miles.types import FinishReason, GenerationRequest, GenerationResult, SamplingParams
from recipes.last_number import last_number


def pass_at(k: int, num_answers: int, num_right: int) -> float:
    if num_answers - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


async def answer(engine: LocalEngine, requests: list[GenerationRequest]) -> dict[int, GenerationResult]:
    engine.submit(requests)
    results: dict[int, GenerationResult] = {}
    while len(results) < len(requests):
        results |= {result.request_id: result for result in await engine.results()}
    return results


def measure(
    engine: LocalEngine, tokenizer: Tokenizer, rows: list[dict[str, str]], *, answers: int, sampling: SamplingParams
) -> dict[str, Any]:
    requests = []
    for place, row in enumerate(rows):
        prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": row["question"]}]))
        for member in range(answers):
            number = place * answers + member
            requests.append(GenerationRequest(number, prompt, sampling, noise_key=number))
    start = time.perf_counter()
    results = asyncio.run(answer(engine, requests))
    seconds = time.perf_counter() - start
    right = [
        sum(
            last_number(results[place * answers + member].text) == last_number(row["answer"])
            for member in range(answers)
        )
        for place, row in enumerate(rows)
    ]
    rows_of = [[results[place * answers + member] for member in range(answers)] for place in range(len(rows))]
    group = min(8, answers)
    # Lists have an entry for each problem; `miles report --check` follows the figures from them.
    return {
        "answers": answers,
        "right": right,
        "pass@1": fmean(pass_at(1, answers, count) for count in right),
        f"pass@{answers}": fmean(pass_at(answers, answers, count) for count in right),
        f"mixed_groups_of_{group}": fmean(
            1 - pass_none(group, answers, count) - pass_none(group, answers, answers - count) for count in right
        ),
        "length": (length := [fmean(len(one.output_ids) for one in row) for row in rows_of]),
        "mean_length": fmean(length),
        "finished": (finished := [fmean(one.finish_reason is FinishReason.STOP for one in row) for row in rows_of]),
        "mean_finished": fmean(finished),
        "tokens_per_second": sum(len(result.output_ids) for result in results.values()) / seconds,
    }


def pass_none(k: int, num_answers: int, num_right: int) -> float:
    """Probability that k of the answers are all wrong."""
    return 1.0 - pass_at(k, num_answers, num_right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=300)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    tokenizer = load_tokenizer(arguments.model)
    model = load_model(arguments.model, dtype=dtype, device=arguments.device)
    engine = LocalEngine(model, tokenizer, EngineConfig(), device=arguments.device)
    sampling = SamplingParams(max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature)
    families: dict[str, Any] = {}
    start = time.perf_counter()
    for entry in arguments.files:
        name, _, file = entry.partition("=")
        rows = [json.loads(line) for line in Path(file).read_text().splitlines()][: arguments.problems]
        families[name] = measure(engine, tokenizer, rows, answers=arguments.answers, sampling=sampling)
        print(name, families[name], flush=True)
    engine.close()
    result = {
        "name": "pass_rates",
        "seconds": time.perf_counter() - start,
        "model": arguments.model.name,
        "problems": arguments.problems,
        "temperature": arguments.temperature,
        "families": families,
        "peers": {},
    }
    record(result, write=arguments.write)


if __name__ == "__main__":
    main()
