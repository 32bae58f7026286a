"""What can be said of a run before it starts: one verdict for each thing that has cost somebody hours.

`miles check` says all of it, with the trial of `trial.py`; a run says the cheap part at its start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from miles.config.sections import RunConfig
from miles.engine.memory import available_bytes
from miles.errors import StorageError
from miles.loop.placement import Placement
from miles.loop.schedule import Schedule
from miles.model.spec import ModelSpec
from miles.observe.environment import driver_version
from miles.observe.log import get_logger
from miles.plan.advice import flags_text, remedies
from miles.plan.disk import disk_of
from miles.plan.machine import Machine, cpu_machine, free_disk, gpu_machine
from miles.plan.memory import CPU_PROCESS_BYTES, DEFAULT_PROMPT_LEN, GPU_PROCESS_BYTES, Job, estimate
from miles.plan.seconds import step_seconds
from miles.text.tokenizer import Tokenizer
from miles.types import Sample

logger = get_logger(__name__)

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
NUM_SHOWN = 3
MEMORY_AND_DISK = "memory and disk"
_MIN_CAPABILITY = (8, 0)  # bfloat16 and the Triton kernels


@dataclass(frozen=True)
class Verdict:
    """`text` is one line; `lines` show what it is about; `data` has the numbers for `--json`."""

    name: str
    status: str
    text: str
    lines: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)


def stop_ids(config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer) -> Verdict:
    """Whether answers can end: the ids exist, and the template's own end of a turn is one of them."""
    ids = set(spec.eos_token_ids) | set(tokenizer.eos_token_ids) | set(config.rollout.rollout_stop_token_ids)
    shown = ", ".join(
        f"{token_id} {tokenizer.decode([token_id], skip_special_tokens=False)!r}" for token_id in sorted(ids)
    )
    data = {"stop_token_ids": sorted(ids)}
    if outside := [token_id for token_id in ids if not 0 <= token_id < spec.vocab_size]:
        return Verdict("stop ids", FAIL, f"{outside} are not in the vocabulary of {spec.vocab_size} tokens", data=data)
    if not ids:
        return Verdict("stop ids", WARN, "there is none: every answer runs to --rollout-max-response-len", data=data)
    end = _end_of_turn(tokenizer) if config.data.apply_chat_template else None
    if end is not None and end not in ids:
        text = tokenizer.decode([end], skip_special_tokens=False)
        return Verdict(
            "stop ids",
            WARN,
            f"the chat template ends a turn with {text!r}, which does not end an answer: add "
            f"--rollout-stop-token-ids {end} (now {shown})",
            data=data,
        )
    return Verdict("stop ids", OK, shown, data=data)


def _end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The special token that the template writes after an answer; None when it writes none."""
    answer = "xyzzy"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
    tail = tokenizer.render(messages, add_generation_prompt=False).rpartition(answer)[2]
    return next((token_id for token_id in tokenizer.encode(tail) if token_id in tokenizer.special_token_ids), None)


def round_trip(tokenizer: Tokenizer, prompts: Sequence[Sample]) -> Verdict:
    """Whether the text of a prompt becomes ids and the same text again."""
    changed = []
    for sample in prompts[:NUM_SHOWN]:
        shown = tokenizer.decode(sample.tokens, skip_special_tokens=False)
        text = sample.prompt if isinstance(sample.prompt, str) else shown
        ids = tokenizer.encode(text)
        if tokenizer.decode(ids, skip_special_tokens=False) != text or ids != sample.tokens[: len(ids)]:
            changed.append(text)
    num = len(prompts[:NUM_SHOWN])
    if changed:
        return Verdict(
            "round trip", WARN, f"{len(changed)} of {num} prompts are other texts after encoding: {changed[0]!r:.200}"
        )
    return Verdict("round trip", OK, f"{num} prompts are the same text after encoding and decoding")


def labels(prompts: Sequence[Sample], problems: Sequence[str | None]) -> Verdict:
    """Share of the labels that answers can be graded with."""
    bad = [(sample, problem) for sample, problem in zip(prompts, problems, strict=True) if problem is not None]
    share = 1 - len(bad) / max(len(prompts), 1)
    data = {"num_rows": len(prompts), "parse_rate": share}
    text = f"answers can be graded with {share:.1%} of {len(prompts)} labels"
    if not bad:
        return Verdict("labels", OK, text, data=data)
    shown = tuple(f"label {sample.label!r:.80}: {problem}" for sample, problem in bad[:NUM_SHOWN])
    return Verdict("labels", FAIL, text + "; correct or remove the others", shown, data)


def machine_here(placement: Placement, save: Path) -> Machine:
    """What is free on this machine, and what this process itself has taken of it so far."""
    host_bytes, disk_bytes = available_bytes(torch.device("cpu")), free_disk(save)
    if placement.device.type != "cuda":
        return cpu_machine(host_bytes=host_bytes + CPU_PROCESS_BYTES, disk_bytes=disk_bytes)
    properties = torch.cuda.get_device_properties(placement.device)
    free_bytes, shares = available_bytes(placement.device), bool(getattr(properties, "is_integrated", False))
    machine = gpu_machine(properties.name, memory_gib=1.0, unified=shares, host_bytes=host_bytes, disk_bytes=disk_bytes)
    memory_bytes = (min(free_bytes, host_bytes) if shares else free_bytes) + GPU_PROCESS_BYTES
    return replace(machine, memory_bytes=memory_bytes)


def memory_and_disk(
    config: RunConfig, spec: ModelSpec, machine: Machine, schedule: Schedule, *, prompt_len: int = DEFAULT_PROMPT_LEN
) -> Verdict:
    """`miles plan` of this run on this machine: refused when it cannot fit, with the flags that change that."""
    job = Job(config, spec, machine, prompt_len, config.rollout.rollout_max_response_len)
    memory, disk = estimate(job), disk_of(job, num_rollout=schedule.num_rollout)
    kept, one, free = disk.num_checkpoints, disk.checkpoint_bytes, machine.disk_bytes
    exported = f", {_gb(disk.export_bytes)} of exported weights" if disk.export_bytes else ""
    text = (
        f"{_gb(memory.process_bytes)} of {_gb(machine.memory_bytes)} at most; {kept} checkpoint{'s' * (kept != 1)} of "
        f"{_gb(one)}{exported}, {_gb(free)} free"
    )
    data = {
        "needed_bytes": memory.process_bytes, "free_bytes": machine.memory_bytes, "share": memory.use,
        "parts": memory.device,
        "checkpoint_bytes": one, "num_checkpoints": kept, "export_bytes": disk.export_bytes, "free_disk_bytes": free,
        "seconds": step_seconds(job, memory).step,
    }  # fmt: skip
    if memory.cannot_fit:
        ways = "; or ".join(flags_text(changes) for changes in remedies(job))
        advice = f"set {ways}" if ways else "no setting is enough: take a smaller model or another machine"
        return Verdict(MEMORY_AND_DISK, FAIL, f"the run does not fit: {text}. {advice}", data=data)
    problem = disk.problem(free)
    if free >= one and not memory.fits:
        problem = "little is left; `miles plan` names flags that help"
    if problem:
        return Verdict(MEMORY_AND_DISK, FAIL if free < one else WARN, f"{text}: {problem}", data=data)
    return Verdict(MEMORY_AND_DISK, OK, text, data=data)


def hardware(placement: Placement) -> Verdict:
    """What computes, and whether the kernels were made for it."""
    versions = f"torch {torch.__version__}"
    if placement.device.type != "cuda":
        return Verdict("hardware", OK, f"CPU, {placement.num_threads} threads, attention of PyTorch; {versions}")
    major, minor = torch.cuda.get_device_capability(placement.device)
    name, driver = torch.cuda.get_device_name(placement.device), driver_version() or "unknown"
    data = {"gpu": name, "capability": f"{major}.{minor}", "driver": driver, "cuda": torch.version.cuda}
    text = f"{name}, compute capability {major}.{minor}, driver {driver}, CUDA {torch.version.cuda}; {versions}"
    if (major, minor) < _MIN_CAPABILITY:
        return Verdict("hardware", FAIL, f"{text}: the attention kernels and bfloat16 need 8.0 or more", data=data)
    return Verdict("hardware", OK, f"{text}; attention of ops/ in Triton", data=data)


def report_at_start(
    config: RunConfig, spec: ModelSpec, tokenizer: Tokenizer, placement: Placement, *, save: Path, schedule: Schedule
) -> None:
    """Log what costs no time to find out. Raises `StorageError` when the run cannot fit into memory, or not one
    checkpoint could be saved."""
    machine = machine_here(placement, save)
    verdicts = [
        stop_ids(config, spec, tokenizer),
        hardware(placement),
        memory_and_disk(config, spec, machine, schedule),
    ]
    for verdict in verdicts:
        level = logging.INFO if verdict.status == OK else logging.WARNING
        logger.log(level, f"check of {verdict.name}: {verdict.text}")
    if verdicts[-1].status == FAIL:
        raise StorageError(f"{verdicts[-1].text} (checkpoints go to --save {save})")


def shown_with_mask(tokenizer: Tokenizer, samples: Sequence[Sample]) -> tuple[str, ...]:
    """Texts of samples with what is trained on between [[ and ]]."""
    return tuple(_with_mask(tokenizer, sample) for sample in samples[:NUM_SHOWN])


def _with_mask(tokenizer: Tokenizer, sample: Sample) -> str:
    mask = [0] * sample.prompt_length + list(sample.loss_mask or [1] * sample.response_length)
    text, start = "", 0
    for end in range(1, len(mask) + 1):
        if end == len(mask) or mask[end] != mask[start]:
            part = tokenizer.decode(sample.tokens[start:end], skip_special_tokens=False)
            text += f"[[{part}]]" if mask[start] else part
            start = end
    return repr(text)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GB"
