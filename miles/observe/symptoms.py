"""Causes of dead and wrong runs that a log shows, of this Miles and of the public one: what it is, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """`deadly`: no run goes on after it, even if its processes do. `is_consequence`: something else came first."""

    pattern: re.Pattern[str]
    what: str
    fix: str
    deadly: bool = False
    is_consequence: bool = False


SYMPTOMS = (
    Symptom(
        re.compile(r"503 Service Unavailable"),
        "the rollout engine takes no requests",
        "read the engine's lines above the first of these errors",
        is_consequence=True,
    ),
    Symptom(
        re.compile(r"ModuleNotFoundError: No module named '(?!.*(flash|apex|deep_ep))"),
        "a module that the run needs cannot be imported",
        "put its folder on PYTHONPATH, for a reward the one that --custom-rm-path names, and start again",
        deadly=True,
    ),
    Symptom(
        re.compile(r"FlashAttention v3 Backend requires SM"),
        "FlashAttention 3 was asked for on a GPU that it was not built for",
        "leave true on-policy mode out on this GPU and use the default attention",
        deadly=True,
    ),
    Symptom(
        re.compile(r"ray\.exceptions\.OutOfMemoryError|Memory on the node .* was [\d.]+GB / [\d.]+GB"),
        "Ray ended a worker because the memory of the machine was nearly full",
        "use a smaller model or fewer tokens per step; leave the threshold of Ray as it is",
        deadly=True,
    ),
    Symptom(
        re.compile(r"(torch\.)?(cuda\.)?OutOfMemoryError: CUDA|CUDA out of memory"),
        "the GPU is out of memory",
        "lower --engine-mem-fraction-static by 0.05 to 0.1, or --max-tokens-per-gpu if the trainer ran out",
        deadly=True,
    ),
    Symptom(
        re.compile(r"ValueError: .*attn_implementation"),
        "the trainer does not know this attention implementation",
        "take one that the message lists, or leave --attn-implementation out",
        deadly=True,
    ),
    Symptom(
        re.compile(r"Message truncated|NCCL.*(size mismatch|truncat)", re.IGNORECASE),
        "two sides of a weight transfer disagree about its size",
        "turn deterministic serving off on engines of several GPUs, or give both sides the same NCCL channels",
        deadly=True,
    ),
    Symptom(
        re.compile(
            r"(Segmentation fault|segfault).*nccl|nccl.*(Segmentation fault|segfault)|libnccl-tuner", re.IGNORECASE
        ),
        "NCCL crashed, as 2.29 and 2.30 do with a tuner plugin",
        "update NCCL to 2.31 or later",
        deadly=True,
    ),
    Symptom(
        re.compile(r"NCCL.*(timed out|timeout)|Watchdog caught collective operation timeout", re.IGNORECASE),
        "a collective operation of several GPUs timed out",
        "look for the rank that died first; try once with --no-offload-train",
        deadly=True,
    ),
    Symptom(
        re.compile(r"#tokens: \d{1,4}(?!\d)"),
        "the KV cache holds few tokens, so the rollout is slow",
        "raise --engine-mem-fraction-static by 0.05 to 0.1",
    ),
    Symptom(
        re.compile(r"TypeError: unsupported operand type\(s\) for \+: 'NoneType' and 'str'"),
        "the tracker has no group name",
        "give --wandb-group",
        deadly=True,
    ),
)


def recognise(line: str) -> Symptom | None:
    """The first symptom that a line of a log shows."""
    return next((symptom for symptom in SYMPTOMS if symptom.pattern.search(line)), None)
