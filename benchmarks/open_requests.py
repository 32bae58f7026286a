"""What a request costs outside the model, when few and when many are open at one time.

Every open request is a coroutine that asks for one answer after the other, so that the number of open ones never
changes; at most 256 are written at one time, the others wait in the engine. The model has one tiny layer, and the CPU
time of its steps (the forward pass and the draws) is taken off the CPU time of the whole process: what stays is the
client, the thread's hand-over and the scheduler, and on the second path also an HTTP client and our endpoint, with the
connections that each run opens. CPU time, because other programs on the machine must not count, and because the model
and the rest overlap; the wall clock of the whole run is reported beside it.
A pair is one run with few and one with many, in turns; the ratio is the median of the pairs' ratios.

    python -m benchmarks.open_requests [--pairs 5] [--requests 6144] [--write FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import torch

from benchmarks.machine import record
from miles.config.sections import EngineConfig
from miles.engine.local import LocalEngine
from miles.model.decoder import Decoder
from miles.model.spec import ModelSpec
from miles.rollout.client import EngineClient
from miles.router.endpoint import Endpoint
from miles.types import SamplingParams

FEW, MANY, GOAL = 256, 1536, 1.2
PROMPT_TOKENS, ANSWER_TOKENS, ROWS = 32, 16, 256
SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM", vocab_size=256, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1,
    num_kv_heads=1, head_dim=32, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_position_embeddings=64,
    tied_head=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=True, eos_token_ids=(),
)  # fmt: skip
SAMPLING = SamplingParams(max_new_tokens=ANSWER_TOKENS, ignore_eos=True)
Ask = Callable[[int], Awaitable[int]]  # from the number of a request to the tokens of its answer


class ModelClock:
    """CPU seconds that the engine's thread spends in steps of the model."""

    def __init__(self, engine: LocalEngine) -> None:
        self.cpu = 0.0
        runner = engine._core.runner
        self._launch, runner.launch = runner.launch, self.launch  # type: ignore[method-assign]

    def launch(self, plan: Any) -> Any:
        begin = time.thread_time()
        drawing = self._launch(plan)
        self.cpu += time.thread_time() - begin
        return drawing


def make_engine() -> LocalEngine:
    model = Decoder(SPEC, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    config = EngineConfig(engine_max_total_tokens=2 * ROWS * 64, engine_max_running_requests=ROWS)
    return LocalEngine(model, None, config, device="cpu")


def prompt_of(number: int) -> list[int]:
    """No two prompts begin alike, so the prefix index finds nothing."""
    return [number % 251, number // 251 % 251, number // 251**2, *range(3, PROMPT_TOKENS)]


async def all_answers(ask: Ask, num_open: int, num_requests: int) -> None:
    numbers = iter(range(num_requests))

    async def go_on() -> None:
        for number in numbers:
            assert await ask(number) == ANSWER_TOKENS

    await asyncio.gather(*(go_on() for _ in range(num_open)))


async def in_process(client: EngineClient, num_open: int, num_requests: int) -> None:
    async def ask(number: int) -> int:
        return len((await client.generate(prompt_of(number), SAMPLING, noise_key=number)).output_ids)

    await all_answers(ask, num_open, num_requests)


async def over_http(url: str, num_open: int, num_requests: int) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def ask(number: int) -> int:
            async with session.post(f"{url}/ids", json={"ids": prompt_of(number), "key": number}) as response:
                return len((await response.json())["output_ids"])

        await all_answers(ask, num_open, num_requests)


def measure(run: Callable[[int], Any], clock: ModelClock, num_open: int, num_requests: int) -> dict[str, float]:
    """Milliseconds per request outside the model, in it, and by the clock on the wall."""
    gc.collect()
    model, cpu, wall = clock.cpu, time.process_time(), time.perf_counter()
    asyncio.run(run(num_open))
    model, cpu, wall = clock.cpu - model, time.process_time() - cpu, time.perf_counter() - wall
    values = {"outside": cpu - model, "model": model, "wall": wall}
    return {name: 1e3 * value / num_requests for name, value in values.items()}


def compare(run: Callable[[int], Any], clock: ModelClock, pairs: int, num_requests: int) -> dict[str, Any]:
    found: dict[int, list[dict[str, float]]] = {FEW: [], MANY: []}
    for pair in range(pairs + 1):
        for num_open in (FEW, MANY) if pair % 2 else (MANY, FEW):
            found[num_open].append(measure(run, clock, num_open, num_requests))
    few, many = found[FEW][1:], found[MANY][1:]  # the first pair warms up
    ratios = [b["outside"] / a["outside"] for a, b in zip(few, many, strict=True)]
    walls = [b["wall"] / a["wall"] for a, b in zip(few, many, strict=True)]
    return {
        **{
            f"{name}_ms_{num_open}": round(median(one[name] for one in each), 4)
            for num_open, each in ((FEW, few), (MANY, many))
            for name in each[0]
        },
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "wall_ratio": round(median(walls), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=6144)
    parser.add_argument("--write", type=Path, help="folder that gets the JSON line as a file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection takes two, one on each side
    load_before = os.getloadavg()[0]
    engine = make_engine()
    clock, client, served = ModelClock(engine), EngineClient(engine), EngineClient(engine)
    paths = {"in_process": compare(lambda n: in_process(client, n, args.requests), clock, args.pairs, args.requests)}

    async def answer(_path: str, body: dict[str, Any]) -> dict[str, Any]:
        result = await served.generate(body["ids"], SAMPLING, noise_key=body["key"])
        return {"output_ids": result.output_ids, "log_probs": result.log_probs}

    endpoint = Endpoint()
    with endpoint.session(answer) as url:
        paths["http"] = compare(lambda n: over_http(url, n, args.requests), clock, args.pairs, args.requests)
    endpoint.close()
    engine.close()
    for path, numbers in paths.items():
        print(path, *(f"{name} {value}" for name, value in numbers.items()), sep="\n  ")
    result = {
        "name": "open_requests",
        "seconds": paths["in_process"][f"outside_ms_{MANY}"] / 1e3,
        "limit_seconds": paths["in_process"][f"outside_ms_{FEW}"] / 1e3,
        "goal_ratio": GOAL,
        "open": [FEW, MANY],
        "requests": args.requests,
        "pairs": args.pairs,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "load_average_before": round(load_before, 2),
        "paths": paths,
    }
    record(result, write=args.write, on_cpu=True)


if __name__ == "__main__":
    main()
