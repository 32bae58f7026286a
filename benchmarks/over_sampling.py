"""What a dynamic filter costs: rollouts whose filter drops half of the groups, beside plain ones on the same engine.

Per pair: a plain rollout of 32 prompts, then one whose filter keeps a group by a fixed hash of its number, then a plain
one again. The plain ones write the very answers of the first 64 groups of the one between them, so that their mean time
says what these answers cost on this machine at this time; times prompts needed / 32 it is what the ratio compares with,
where the prompts needed are those up to the last group that was taken. Wasted tokens are those of groups that were
stopped or not needed. No pair knows the prefixes of another, as after a change of weights.

    python -m benchmarks.over_sampling [--pairs 7] [--write FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import resource
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from benchmarks.machine import record
from miles.config.flags import with_values
from miles.config.sections import EngineConfig, RunConfig
from miles.data.buffer import GroupBuffer
from miles.data.source import PromptSource
from miles.engine.local import LocalEngine
from miles.model.load import load_model
from miles.rollout.client import EngineClient
from miles.rollout.hooks import RolloutHooks
from miles.rollout.producer import Producer, RolloutContext
from miles.rollout.rewards import RewardRunner
from miles.text.tokenizer import load_tokenizer
from miles.types import Sample

MODEL = Path(__file__).parents[1] / "miles" / "quickstart" / "model"
BATCH, ANSWERS, MAX_TOKENS = 32, 8, 64


def keep_half(args: Any, group: list[Sample]) -> bool:
    return hashlib.sha256(str(group[0].group_index).encode()).digest()[0] % 2 == 0


def make_producer(engine: LocalEngine, tokenizer: Any, *, filtered: bool) -> Producer:
    config = with_values(
        RunConfig(),
        {
            "rollout_batch_size": BATCH, "n_samples_per_prompt": ANSWERS, "rollout_max_response_len": MAX_TOKENS,
            "rm_type": "random",
            "dynamic_sampling_filter_path": "benchmarks.over_sampling.keep_half" if filtered else None,
        },
    )  # fmt: skip
    random = np.random.default_rng(0)
    ids = random.integers(10, tokenizer.vocab_size, size=(1000, 12)).tolist()
    prompts = [Sample(prompt="", tokens=row) for row in ids]
    client = EngineClient(engine, tokenizer)
    context = RolloutContext(config, client, RewardRunner(config), RolloutHooks(config), max_context_len=256)
    source = PromptSource(prompts, n_samples_per_prompt=ANSWERS, seed=0, shuffle=False)
    return Producer(context, GroupBuffer(source))


def measure(num_pairs: int) -> dict[str, Any]:
    tokenizer = load_tokenizer(MODEL)
    model = load_model(MODEL, dtype=torch.float32, device=torch.device("cpu"))
    engine = LocalEngine(model, tokenizer, EngineConfig(), device="cpu")
    plain, filtered = (make_producer(engine, tokenizer, filtered=filtered) for filtered in (False, True))
    pairs = []

    async def timed(producer: Producer, number: int) -> tuple[float, list[list[Sample]]]:
        engine.set_version(engine.version + 1)
        start = time.perf_counter()
        groups = await producer.collect(number)
        return time.perf_counter() - start, groups

    async def run() -> None:
        begin = 0
        for number in range(num_pairs + 1):
            plain.source.load_state_dict({**filtered.source.state_dict(), "drop_rate": 0.0})
            before, _ = await timed(plain, number)
            seconds, groups = await timed(filtered, number)
            after, _ = await timed(plain, number)
            needed = groups[-1][0].group_index + 1 - begin
            begin += needed
            each = (before + after) / 2
            wasted = filtered.counts["rollout/wasted_token_ratio"]
            pairs.append(
                {"plain": each, "seconds": seconds, "limit": each * needed / BATCH, "needed": needed, "wasted": wasted}
            )

    with asyncio.Runner() as runner:
        runner.run(run())
    engine.close()
    pairs = pairs[1:]  # the first one warms up and learns the drop rate
    ratios = [pair["seconds"] / pair["limit"] for pair in pairs]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "seconds": round(median(pair["seconds"] for pair in pairs), 4),
        "limit_seconds": round(median(pair["limit"] for pair in pairs), 4),
        "ratio": round(median(ratios), 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
        "ratio_of_sums": round(sum(pair["seconds"] for pair in pairs) / sum(pair["limit"] for pair in pairs), 3),
        "wasted_token_share": round(sum(pair["wasted"] for pair in pairs) / len(pairs), 3),
        "pairs": [{name: round(value, 4) for name, value in pair.items()} for pair in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--write", type=Path, help="folder that gets the JSON line as a file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured = measure(args.pairs)
    result = {
        "name": "over_sampling",
        **measured,
        "share_of_limit": round(measured["limit_seconds"] / measured["seconds"], 3),
        "peers": {"plain rollout": {"seconds": round(median(p["plain"] for p in measured["pairs"]), 4), "version": ""}},
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    record(result, write=args.write, on_cpu=True)


if __name__ == "__main__":
    main()
