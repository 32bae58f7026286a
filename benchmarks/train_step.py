"""Seconds of a log-prob pass and of a whole optimizer step on the batch of the recipe: ours, its peers, and the limit.

    python benchmarks/train_step.py [--shape qwen3-0.6b] [--sequence 16384] [--max-tokens-per-gpu 8192 4096 16384]
        [--peer trl transformers-packed] [--peer-path trl=FOLDER[:FOLDER...]] [--write FOLDER]

256 sequences, 215,303 tokens with their prompts; with --sequence as many tokens in sequences of that length. A step is
forward, backward, clip and AdamW over all of them. Every trainer runs in a process of its own, one after the other, on
the same random bf16 weights. The first repetition warms up; seconds are the median of the others. `seconds` is the step
of the first --max-tokens-per-gpu; `host_seconds` is what of it lies outside of the update: the host prepares, reports.
FLOPs are those of the products and of attention, forward and twice as many backward, logits of answer tokens only; what
is computed again to save memory does not count.

Peers: `trl` pads, with micro-batches of 16 rows, and of 32 with recomputation; `transformers-packed` is transformers
with attention over packed sequences (PyTorch's flash attention) and Liger's kernels and head. Both keep 8 bytes a
parameter (bf16 weights, gradients, Adam states), ours 18 (float32 masters, sums of gradients, Adam states).

The limit is 6 N tokens over the measured matrix rate, short runs.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.apart import measure_apart, paths_by_name
from benchmarks.machine import record
from benchmarks.model_folder import model_for_peers
from benchmarks.recipe import recipe, spec_of
from miles.model.flops import forward_flops
from miles.model.spec import ModelSpec
from miles.observe.gpu import seconds_of

PEERS = ("trl", "transformers-packed")
DATA_SHEET_FLOPS_PER_S = 989e12  # H200, bf16, dense
Sequence = dict[str, list[int]]


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    spec = spec_of(arguments.shape)
    sequences = batch(arguments)
    facts = facts_of(spec, sequences, device, dtype)
    print(json.dumps(facts), flush=True)
    paths = paths_by_name(arguments.peer_path)
    measured: dict[str, dict[str, Any]] = {}
    with model_for_peers(arguments, dtype) as (folder, model):
        for name in [*arguments.engine, *arguments.peer]:
            peer_tokens = [max(arguments.peer_max_tokens, arguments.sequence or 0)]
            job = {
                "part": name,
                "model": str(model),
                "dtype": str(dtype).removeprefix("torch."),
                "device": arguments.device,
                "sequences": sequences,
                "repetitions": arguments.repetitions,
                "max_tokens": arguments.max_tokens_per_gpu if name == "miles" else peer_tokens,
                "flags": shlex.split(arguments.flags),
                "variants": arguments.trl_variants,
            }
            findings, error = measure_apart(
                "training.py",
                job,
                folder=folder,
                paths=None if name == "miles" else paths.get(name, "."),
                limit_seconds=arguments.limit_seconds,
            )
            measured[name] = summary(findings, error, facts)
            print(json.dumps({name: measured[name]}), flush=True)
    ours = measured.pop("miles", {"variants": {}})
    first = ours["variants"].get(str(arguments.max_tokens_per_gpu[0]), {})
    result = {
        "name": f"train_step_{arguments.shape}" + (f"_{arguments.sequence}" if arguments.sequence else ""),
        "seconds": first.get("step_seconds"),
        "log_prob_seconds": first.get("log_prob_seconds"),
        "host_seconds": first.get("host_seconds"),
        "limit_seconds": facts["limit_seconds"],
        "share_of_limit": first.get("share_of_limit"),
        "mfu_short": first.get("mfu_short"),
        "peak_gb": first.get("peak_gb"),
        "max_tokens_per_gpu": arguments.max_tokens_per_gpu[0],
        "flags": arguments.flags,
        "ours": ours,
        "peers": {name: {"seconds": fastest(peer), **peer} for name, peer in measured.items()},
        **{f"times_ours_{name}": ratio(fastest(peer), first.get("step_seconds")) for name, peer in measured.items()},
        "facts": facts,
        "tried_out_with": {"share": arguments.share, "prompts": arguments.prompts},
    }
    record(result, write=arguments.write)
    if "error" in ours or "error" in first:
        sys.exit("ours did not finish: " + (ours.get("error") or first["error"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.6b", type=lambda name: name.removeprefix("qwen3-"))
    parser.add_argument("--sequence", type=int, help="tokens of every sequence, instead of the recipe's lengths")
    parser.add_argument("--max-tokens-per-gpu", nargs="+", type=int, default=[8192, 4096, 16384])
    parser.add_argument("--flags", default="", help="other flags of the trainer, as one word")
    parser.add_argument("--engine", nargs="*", default=["miles"], choices=("miles",), help="none: peers only")
    parser.add_argument("--peer", nargs="+", default=[], choices=PEERS)
    parser.add_argument("--peer-path", action="append", default=[], metavar="NAME=FOLDER[:FOLDER]", help="its packages")
    parser.add_argument("--peer-max-tokens", type=int, default=16384, help="of transformers-packed")
    parser.add_argument("--trl-variants", nargs="+", default=["16", "32r"], help="rows; r: with recomputation")
    parser.add_argument("--repetitions", type=int, default=2, help="after the first, which warms up")
    parser.add_argument("--limit-seconds", type=float, default=150.0, help="for each trainer")
    parser.add_argument("--share", type=float, default=1.0, help="shorten every answer, to try the script out")
    parser.add_argument("--prompts", type=int, help="fewer prompts, to try the script out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--logs", type=Path, help="keep what the trainers print")
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


def batch(arguments: argparse.Namespace) -> list[Sequence]:
    """Prompts and answers of random ids; answers of a group follow each other."""
    workload = recipe(num_prompts=arguments.prompts or 32, share=arguments.share)
    rng = random.Random(0)
    if arguments.sequence is not None:
        num_groups = max(round(sum(workload.sequence_lengths()) / arguments.sequence / 8), 1)
        prompt = [rng.randrange(1000, 150000) for _ in range(100)]
        answers = [arguments.sequence - len(prompt)] * 8 * num_groups
        return [{"prompt": prompt, "answer": [rng.randrange(1000, 150000) for _ in range(n)]} for n in answers]
    groups = zip(workload.prompts(0), workload.answer_lengths, strict=True)
    return [
        {"prompt": prompt, "answer": [rng.randrange(1000, 150000) for _ in range(length)]}
        for prompt, lengths in groups
        for length in lengths
    ]


def facts_of(spec: ModelSpec, sequences: list[Sequence], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Work of a step, and what the device can do: a burst of ten products, and two seconds of them."""
    lengths = [len(one["prompt"]) + len(one["answer"]) for one in sequences]
    num_answer_tokens = sum(len(one["answer"]) for one in sequences)
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    flops = 2 * size**3
    short = flops / seconds_of(lambda: left @ right, device)
    sustained = flops / seconds_of(lambda: left @ right, device, repeats=max(round(2 * short / flops), 10))
    num_tokens = sum(lengths)
    forward = forward_flops(spec, lengths, num_head_tokens=num_answer_tokens)
    return {
        "num_sequences": len(lengths),
        "num_tokens": num_tokens,
        "num_answer_tokens": num_answer_tokens,
        "num_parameters": spec.num_parameters,
        "training_flops": 3.0 * forward,
        "forward_flops": float(forward),
        "matrix_tflops_short": short / 1e12,
        "matrix_tflops_sustained": sustained / 1e12,
        "limit_seconds": 6 * spec.num_parameters * num_tokens / short,
        "log_prob_limit_seconds": 2 * spec.num_parameters * num_tokens / short,
    }


def summary(findings: list[dict[str, Any]], error: str | None, facts: dict[str, Any]) -> dict[str, Any]:
    """What a trainer found, by variant, with its seconds and shares of what the device can do."""
    found: dict[str, Any] = {"variants": {}}
    for finding in findings:
        if "variant" in finding:
            variant = found["variants"].setdefault(finding.pop("variant"), {})
            variant |= finding
        else:
            found |= finding
    for one in found["variants"].values():
        if updates := one.get("update_all_seconds"):
            both = zip(one["step_all_seconds"], updates, strict=True)
            one["host_all_seconds"] = [step - update for step, update in both]
        for what in ("log_prob", "step", "update", "host"):
            if all_seconds := one.get(f"{what}_all_seconds"):
                one[f"{what}_seconds"] = median(all_seconds[1:] or all_seconds)
        if "log_prob_seconds" in one:
            tflops = facts["forward_flops"] / one["log_prob_seconds"] / 1e12
            one["log_prob_mfu_short"] = tflops / facts["matrix_tflops_short"]
        if "step_seconds" in one:
            tflops = facts["training_flops"] / one["step_seconds"] / 1e12
            one |= {
                "tflops": tflops,
                "mfu_short": tflops / facts["matrix_tflops_short"],
                "mfu_sustained": tflops / facts["matrix_tflops_sustained"],
                "mfu_989": tflops * 1e12 / DATA_SHEET_FLOPS_PER_S,
                "share_of_limit": facts["limit_seconds"] / one["step_seconds"],
            }
    return found if error is None else found | {"error": error}


def fastest(peer: dict[str, Any]) -> float | None:
    """Seconds of its fastest variant."""
    return min((one["step_seconds"] for one in peer["variants"].values() if "step_seconds" in one), default=None)


def ratio(theirs: float | None, ours: float | None) -> float | None:
    return None if theirs is None or ours is None else theirs / ours


if __name__ == "__main__":
    main()
