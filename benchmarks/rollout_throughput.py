"""Seconds in which an engine writes the answers of the recipe: ours, its peers, and the hardware's limit, in one run.

    python benchmarks/rollout_throughput.py [--shape qwen3-0.6b] [--workload recipe mini-sglang]
        [--answers-per-prompt 8 16] [--peer transformers-cb sglang vllm] [--peer-path sglang=FOLDER[:FOLDER...]]
        [--write FOLDER]

Every engine runs in a process of its own, one after the other, on the same random bf16 weights and the same new prompts
in each repetition, at temperature 1 with log-probs, and must write exactly the lengths that are asked for. The first
repetition warms up; `seconds` is the median of the others. Start-up is importing, building the engine from the folder
of weights, and the first 16 tokens of every request.

The limit is the bytes that decoding must read over the measured copy rate: all weights once per token of the longest
answer, keys and values once per token, and a group's prompt once per group, or once per answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.apart import measure_apart, paths_by_name
from benchmarks.machine import record
from benchmarks.model_folder import model_for_peers
from benchmarks.recipe import Workload, mini_sglang, recipe, spec_of
from miles.observe.gpu import measure_rates

PEERS = ("transformers-cb", "sglang", "vllm")


def main() -> None:
    arguments = parse()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    workloads = chosen_workloads(arguments)
    spec = spec_of(arguments.shape)
    rates = measure_rates(torch.device(arguments.device), dtype)
    limits = {
        workload.name: {
            name: num_bytes / rates.copy_bytes_per_s for name, num_bytes in workload.decode_bytes(spec, dtype).items()
        }
        for workload in workloads
    }
    print(json.dumps({"copy_gb_per_s": rates.copy_bytes_per_s / 1e9, "limits": limits}), flush=True)
    paths = paths_by_name(arguments.peer_path)
    measured = {}
    with model_for_peers(arguments, dtype) as (folder, model):
        job = {
            "model": str(model),
            "dtype": str(dtype).removeprefix("torch."),
            "device": arguments.device,
            "workloads": [job_of(workload, arguments.repetitions + 1) for workload in workloads],
        }
        for name in [*arguments.engine, *arguments.peer]:
            findings, error = measure_apart(
                "rollouts.py",
                job | {"part": name},
                folder=folder,
                paths=None if name == "miles" else paths.get(name, "."),
                limit_seconds=arguments.limit_seconds,
            )
            measured[name] = summary(findings, error, workloads, limits)
            print(json.dumps({name: measured[name]}), flush=True)
    ours = measured.get("miles", {})
    peers = {name: measured[name] for name in measured if name != "miles"}
    for workload in workloads:
        add_ratios(ours, peers, workload.name)
    first = workloads[0].name
    found = ours.get("workloads", {}).get(first, {})
    result = {
        "name": f"rollout_throughput_{arguments.shape}" + ("" if first == "recipe" else f"_{first}"),
        "seconds": found.get("seconds"),
        "limit_seconds": limits[first]["prompts_per_group"],
        "share_of_limit": found.get("share_of_limit"),
        "tokens_per_s": found.get("tokens_per_s"),
        "start_up_seconds": ours.get("start_up", {}).get("total"),
        "ours": ours,
        "peers": {
            name: {"seconds": peer["workloads"].get(first, {}).get("seconds"), **peer} for name, peer in peers.items()
        },
        "limits": limits,
        "copy_gb_per_s": rates.copy_bytes_per_s / 1e9,
        "peak_gb": ours.get("peak_gb"),
        "tried_out_with": {"share": arguments.share, "prompts": arguments.prompts},
    }
    record(result, write=arguments.write)
    if "error" in ours:
        sys.exit(f"ours did not finish: {ours['error']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.6b", type=lambda name: name.removeprefix("qwen3-"))
    parser.add_argument("--workload", nargs="+", default=["recipe"], choices=("recipe", "mini-sglang"))
    parser.add_argument("--answers-per-prompt", nargs="+", type=int, default=[8], help="of the recipe")
    parser.add_argument("--engine", nargs="*", default=["miles"], choices=("miles",), help="none: peers only")
    parser.add_argument("--peer", nargs="+", default=[], choices=PEERS)
    parser.add_argument("--peer-path", action="append", default=[], metavar="NAME=FOLDER[:FOLDER]", help="its packages")
    parser.add_argument("--repetitions", type=int, default=2, help="after the first, which warms up")
    parser.add_argument("--limit-seconds", type=float, default=240.0, help="for each engine")
    parser.add_argument("--share", type=float, default=1.0, help="shorten every answer, to try the script out")
    parser.add_argument("--prompts", type=int, help="fewer prompts, to try the script out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--logs", type=Path, help="keep what the engines print")
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


def chosen_workloads(arguments: argparse.Namespace) -> list[Workload]:
    workloads = []
    if "recipe" in arguments.workload:
        kept = {"num_prompts": arguments.prompts or 32, "share": arguments.share}
        workloads += [recipe(answers_per_prompt=n, **kept) for n in arguments.answers_per_prompt]
    if "mini-sglang" in arguments.workload:
        workloads.append(mini_sglang(num_prompts=arguments.prompts or 256, share=arguments.share))
    return workloads


def job_of(workload: Workload, repetitions: int) -> dict[str, Any]:
    """What an engine is told: lengths, and the prompts of each repetition and of the warming up."""
    warm_up, *counted = [
        [list(request.prompt_ids) for request in workload.requests(number)] for number in (99, *range(repetitions))
    ]
    lengths = [length for lengths in workload.answer_lengths for length in lengths]
    return {"name": workload.name, "lengths": lengths, "warm_up": warm_up, "repetitions": counted}


def summary(
    findings: list[dict[str, Any]], error: str | None, workloads: list[Workload], limits: dict[str, Any]
) -> dict[str, Any]:
    """What an engine found, with its speed on each workload; a workload that was cut short counts what it had."""
    found: dict[str, Any] = {"workloads": {}}
    for finding in findings:
        if "workload" in finding:
            found["workloads"][finding.pop("workload")] = finding
        else:
            found |= finding
    for workload in workloads:
        if (one := found["workloads"].get(workload.name)) is None:
            continue
        one["seconds"] = median(one["all_seconds"][1:] or one["all_seconds"])
        one["tokens_per_s"] = workload.num_answer_tokens / one["seconds"]
        one["share_of_limit"] = limits[workload.name]["prompts_per_group"] / one["seconds"]
    if "parts" in found:
        device = sum(
            value for name, value in found["parts"].items() if isinstance(value, float) and name != "host_work"
        )
        found["parts"]["device_idle"] = found["workloads"][workloads[0].name]["seconds"] - device
    return found if error is None else found | {"error": error}


def add_ratios(ours: dict[str, Any], peers: dict[str, dict[str, Any]], workload: str) -> None:
    """How many times as long as ours each peer took."""
    mine = ours.get("workloads", {}).get(workload)
    for peer in peers.values():
        one = peer["workloads"].get(workload)
        if mine is not None and one is not None:
            one["times_ours"] = one["seconds"] / mine["seconds"]


if __name__ == "__main__":
    main()
