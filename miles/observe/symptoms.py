"""Causes of dead and wrong runs that a log shows, of this Miles and of the public one: what it is, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """One kind of line. `miles watch` names all of them, `miles diagnose` those with a key, which several may share.

    `flags`: what to change or look at. `deadly`: no run goes on after it, even if its processes do. `is_consequence`:
    something else came first. `at_start`: a finished step shows that it meant nothing. `section`: of the manual.
    """

    key: str
    pattern: str  # a regular expression
    what: str
    fix: str
    flags: tuple[str, ...] = ()
    deadly: bool = False
    is_consequence: bool = False
    at_start: bool = False
    section: str = "7.1"


COLLECTIVE_TIMEOUT = (
    r"(?i)Watchdog caught collective operation timeout|\bNCCL (watchdog|operations?|error)\b.*(timed out|timeout)"
)

SYMPTOMS = (
    Symptom(
        "",
        r"503 Service Unavailable",
        "the rollout engine takes no requests",
        "read the engine's lines above the first of these errors",
        is_consequence=True,
    ),
    Symptom(
        "reward_import",
        r"ModuleNotFoundError: No module named '(?!.*(flash|apex|deep_ep))",
        "a module that the run needs cannot be imported",
        "put its folder on PYTHONPATH, for a reward the one that --custom-rm-path names, and start again",
        ("--custom-rm-path",),
        deadly=True,
        at_start=True,
    ),
    Symptom(
        "flash_attention_3",
        r"FlashAttention v3 Backend requires SM",
        "FlashAttention 3 was asked for on a GPU that it was not built for",
        "leave true on-policy mode out on this GPU and use the default attention; another backend that the message "
        "names starts a run, but not one that is bit-exact",
        ("--true-on-policy-mode", "--sglang-attention-backend"),
        deadly=True,
        section="4.6",
    ),
    Symptom(
        "node_memory",
        r"ray\.exceptions\.OutOfMemoryError|Memory on the node .*was [\d.]+\s*GB / [\d.]+\s*GB",
        "Ray ended a worker because the memory of the machine was nearly full",
        "use a smaller model or fewer tokens per step; leave the threshold of Ray as it is: the number is real, also "
        "where CPU and GPU share their memory, and a smaller share for the engine did not help",
        ("--hf-checkpoint", "--rollout-batch-size", "--n-samples-per-prompt", "--rollout-max-response-len"),
        deadly=True,
        section="2.3",
    ),
    Symptom(
        "engine_memory",
        r"torch\.(cuda\.)?OutOfMemoryError|OutOfMemoryError: CUDA|CUDA (error: )?out of memory",
        "the GPU is out of memory",
        "lower --engine-mem-fraction-static by 0.05 to 0.1 (0.8 at most where trainer and engine share the GPU), or "
        "--max-tokens-per-gpu if the trainer ran out",
        ("--engine-mem-fraction-static", "--max-tokens-per-gpu"),
        deadly=True,
    ),
    Symptom(
        "attention_name",
        r"(ValueError: |only possible arguments are ).*attn_implementation|not a valid attention implementation",
        "the trainer does not know this attention implementation",
        "take one that the message lists, or leave --attn-implementation out",
        ("--attn-implementation",),
        deadly=True,
    ),
    Symptom(
        "weight_update",
        r"(?i)Message truncated|NCCL.*(size mismatch|truncat)",
        "two sides of a weight transfer disagree about its size",
        "turn deterministic serving off on engines of several GPUs, or give both sides the same NCCL channels",
        ("--sglang-enable-deterministic-inference",),
        deadly=True,
    ),
    Symptom(
        "weight_update",
        r"(?i)(Segmentation fault|segfault).*nccl|nccl.*(Segmentation fault|segfault)|libnccl-tuner",
        "NCCL crashed, as 2.29 and 2.30 do with pipeline stages and a tuner plugin",
        "update NCCL to 2.31 or later",
        deadly=True,
    ),
    Symptom(
        "",
        COLLECTIVE_TIMEOUT,
        "a collective operation of several GPUs timed out",
        "look for the rank that died first; try once with --no-offload-train",
        deadly=True,
    ),
    Symptom(
        "",
        r"#tokens: \d{1,4}(?!\d)",
        "the KV cache holds few tokens, so the rollout is slow",
        "raise --engine-mem-fraction-static by 0.05 to 0.1",
    ),
    Symptom(
        "wandb_group",
        r"TypeError: unsupported operand type\(s\) for \+: 'NoneType' and 'str'",
        "the tracker has no group name",
        "give --wandb-group",
        ("--wandb-group",),
        deadly=True,
        at_start=True,
        section="5.1",
    ),
    # May be survived: a program that a reward runs can say the same.
    Symptom(
        "reward_import",
        r"ImportError: (?!.*(flash|apex|deep_ep))|AttributeError: module '[\w.]+' has no attribute",
        "a name that the run needs cannot be imported",
        "look for the module with that name in the lines around it; --custom-rm-path names that of a reward",
        ("--custom-rm-path",),
        at_start=True,
    ),
    Symptom(
        "weight_update",
        r"Segmentation fault|SIGSEGV|ncclSystemError|ncclInternalError",
        "a process crashed, as NCCL 2.29 and 2.30 do when weights are sent",
        "update NCCL to 2.31 or later",
    ),
)


def recognise(line: str) -> Symptom | None:
    """The first symptom that a line of a log shows."""
    return next((symptom for symptom in SYMPTOMS if re.search(symptom.pattern, line)), None)
