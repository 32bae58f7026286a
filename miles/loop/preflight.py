"""What can be said of a run before it starts: one verdict for each thing that has cost somebody hours.

`miles check` says all of it, with the trial of `trial.py`; a run says the cheap part at its start.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from miles.config.sections import RunConfig
from miles.engine.memory import available_bytes
from miles.errors import StorageError
from miles.loop.placement import Placement
from miles.loop.schedule import Schedule
from miles.model.lora import num_adapter_parameters
from miles.model.spec import ModelSpec
from miles.observe.environment import driver_version
from miles.observe.log import get_logger
from miles.text.tokenizer import Tokenizer
from miles.types import Sample

logger = get_logger(__name__)

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
NUM_SHOWN = 3
# Per parameter: float32 master and two moments are saved; training also has weights and gradients.
CHECKPOINT_BYTES, CPU_TRAIN_BYTES, GPU_TRAIN_BYTES = 12, 16, 18
_SPARE_BYTES = 64 << 20
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
    text = f"{share:.1%} of {len(prompts)} labels can be graded with"
    if not bad:
        return Verdict("labels", OK, text, data=data)
    shown = tuple(f"label {sample.label!r:.80}: {problem}" for sample, problem in bad[:NUM_SHOWN])
    return Verdict("labels", FAIL, text + "; correct or remove the others", shown, data)


def disk(config: RunConfig, spec: ModelSpec, save: Path, schedule: Schedule) -> Verdict:
    """Room for the checkpoints that will be there at one time, the one being written included."""
    trained = num_adapter_parameters(spec, config.lora) if config.lora.is_on else spec.num_parameters
    one = trained * CHECKPOINT_BYTES + _SPARE_BYTES
    interval = config.run_dir.save_interval
    total = 1 if interval is None else -(-schedule.num_rollout // interval)
    if config.run_dir.save_keep_last is not None:
        total = min(total, config.run_dir.save_keep_last + (config.run_dir.save_keep_best or 0))
    folder = next(parent for parent in (save, *save.absolute().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    needed = (total + 1) * one
    data = {"checkpoint_bytes": one, "num_checkpoints": total, "free_bytes": free}
    text = f"{total} checkpoint{'s' * (total != 1)} of {_gb(one)}, {_gb(free)} free in {folder}"
    if free < one:
        return Verdict("disk", FAIL, f"{text}: not one fits; free space or give another --save", data=data)
    if free < needed:
        return Verdict("disk", WARN, f"{text}: it will be full; --save-keep-last N keeps fewer", data=data)
    return Verdict("disk", OK, text, data=data)


def memory(config: RunConfig, spec: ModelSpec, placement: Placement) -> Verdict:
    """Weights, gradients and optimizer state of every model of the run against what is free."""
    algorithm = config.algorithm
    on_gpu, width = placement.device.type == "cuda", placement.dtype.itemsize
    train_bytes = GPU_TRAIN_BYTES if on_gpu else CPU_TRAIN_BYTES
    shares_reference = config.lora.is_on and config.model.ref_load is None  # the policy without its adapters
    has_reference = (algorithm.use_kl_loss or algorithm.kl_coef != 0) and not shares_reference
    per_parameter = (has_reference + algorithm.use_opd) * width + (width if config.lora.is_on else train_bytes)
    if algorithm.advantage_estimator == "ppo":
        per_parameter += train_bytes
    adapters = num_adapter_parameters(spec, config.lora) * train_bytes if config.lora.is_on else 0
    needed, free = spec.num_parameters * per_parameter + adapters, available_bytes(placement.device)
    data = {"needed_bytes": needed, "free_bytes": free}
    text = (
        f"{_gb(needed)} for weights, gradients and optimizer, {_gb(free)} free on the {'GPU' if on_gpu else 'machine'}"
    )
    if needed > free:
        return Verdict("memory", FAIL, f"{text}: take a smaller model or another machine", data=data)
    if needed > 0.8 * free:
        return Verdict("memory", WARN, f"{text}: little is left for activations and the KV cache", data=data)
    return Verdict("memory", OK, text, data=data)


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
    """Log what costs no time to find out. Raises `StorageError` when not one checkpoint could be saved."""
    verdicts = [
        stop_ids(config, spec, tokenizer),
        hardware(placement),
        memory(config, spec, placement),
        disk(config, spec, save, schedule),
    ]
    for verdict in verdicts:
        level = logging.INFO if verdict.status == OK else logging.WARNING
        logger.log(level, f"check of {verdict.name}: {verdict.text}")
    if verdicts[-1].status == FAIL:
        raise StorageError(f"--save {save}: {verdicts[-1].text}")


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
