"""`miles plan`: memory, disk and time of a run, and what would fit better, before anything is loaded."""

from __future__ import annotations

import argparse
import importlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from miles.config.parse import parse_flags
from miles.config.resolve import resolve
from miles.config.rules import rule_violations
from miles.config.sections import RunConfig
from miles.errors import ConfigError
from miles.model.activations import Recompute
from miles.observe.environment import gpu_names
from miles.plan.advice import changed, fastest, flags_text, largest_models, remedies
from miles.plan.disk import disk_of
from miles.plan.machine import GIB, GPU_NAMES, Machine, cpu_machine, free_disk, gpu_machine, host_memory
from miles.plan.memory import DEFAULT_PROMPT_LEN, Job, estimate
from miles.plan.seconds import step_seconds
from miles.plan.shapes import find_spec

_LEAST, _ABSURD = 1e-6, 10**9  # GiB or tokens: no machine and no sample has so few or as many


def run(argv: list[str]) -> int:
    """Takes every flag of `miles train`, and those of the machine. Exit code 1 when the run does not fit."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.help:
        print(parser.format_help(), end="")
        return 0
    config = _settings(rest)
    machine = _machine(arguments, config)
    job = Job(
        config,
        find_spec(str(config.model.hf_checkpoint)),
        machine,
        math.ceil(arguments.prompt_len or 0) or config.rollout.rollout_max_prompt_len or DEFAULT_PROMPT_LEN,
        math.ceil(arguments.answer_len or 0) or config.rollout.rollout_max_response_len,
    )
    if arguments.prompt_len and job.prompt_len >= job.context_len:
        raise ConfigError(
            f"--prompt-len {job.prompt_len} leaves no room for an answer in a context of {job.context_len} tokens"
        )
    if config.lora.is_on and job.num_adapted == 0:
        raise config.lora.names_nothing()
    report = _report(job)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _show(job, report)
    return 0 if report["fits"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miles plan",
        description="Estimate memory, disk and time of a run. Every flag of `miles train` counts; nothing is loaded.",
        epilog="--hf-checkpoint is a model folder with config.json, or the name of a known shape such as Qwen3-4B.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", help=f"name of a GPU: {', '.join(GPU_NAMES)}; default: the one of this machine")
    parser.add_argument("--unified-memory", action="store_true", help="CPU and GPU share one memory")
    for name, unit, text in (
        ("--gpu-memory", "GIB", "memory of the GPU"),
        ("--host-memory", "GIB", "memory of the CPU; default: of this machine"),
        ("--disk", "GIB", "room on disk; default: what is free where --save is"),
        ("--prompt-len", "TOKENS", f"of a prompt; default: --rollout-max-prompt-len or {DEFAULT_PROMPT_LEN}"),
        ("--answer-len", "TOKENS", "to expect of an answer; default: --rollout-max-response-len"),
    ):
        parser.add_argument(name, type=_positive, metavar=unit, help=text)
    parser.add_argument("--measure", action="store_true", help="measure the rates of this machine's device first")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--help", "-h", action="store_true", help="print this text")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not _LEAST <= value < _ABSURD:
        raise argparse.ArgumentTypeError(f"must be a number from {_LEAST} to below {_ABSURD:,}, not {text}")
    return value


def _settings(argv: list[str]) -> RunConfig:
    """The settings as `miles train` would have them; what only a run needs, such as its data, may be missing."""
    config = parse_flags(argv).config
    violations = [text for text in rule_violations(config) if " is missing" not in text]
    if not config.model.hf_checkpoint:
        violations.insert(0, "--hf-checkpoint is missing: give a model folder, or the name of a known shape")
    if violations:
        raise ConfigError(*violations)
    return resolve(config)[0]


def _machine(arguments: argparse.Namespace, config: RunConfig) -> Machine:
    host_bytes = int(arguments.host_memory * GIB) if arguments.host_memory else host_memory()
    disk_bytes = int(arguments.disk * GIB) if arguments.disk else free_disk(Path(str(config.run_dir.save)))
    name = arguments.gpu or ("" if arguments.gpu_memory else next(iter(gpu_names()), ""))
    machine = cpu_machine(host_bytes=host_bytes, disk_bytes=disk_bytes)
    describes_gpu = arguments.gpu is not None or arguments.gpu_memory or arguments.unified_memory
    if config.model.device == "cpu" and describes_gpu:
        raise ConfigError("--device cpu computes on no GPU: leave out --gpu, --gpu-memory and --unified-memory")
    if config.model.device != "cpu" and (name or describes_gpu or config.model.device == "cuda"):
        machine = gpu_machine(
            name,
            memory_gib=arguments.gpu_memory,
            unified=arguments.unified_memory or None,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
        )
    if arguments.measure:
        gpu, torch = importlib.import_module("miles.observe.gpu"), importlib.import_module("torch")
        if machine.on_gpu and not torch.cuda.is_available():
            raise ConfigError("--measure: PyTorch sees no GPU here; leave out --measure, or give --device cpu")
        dtype = torch.bfloat16 if machine.on_gpu else torch.float32
        rates = gpu.measure_rates(torch.device("cuda" if machine.on_gpu else "cpu"), dtype)
        machine = replace(machine, **asdict(rates))
    return machine


def _report(job: Job) -> dict[str, Any]:
    """Everything that is shown, as JSON data."""
    memory, disk = estimate(job), disk_of(job, num_rollout=job.config.data.num_rollout or 1)
    limits = job.limits
    batch = job.micro_batch(limits.max_tokens)
    best = fastest(job)
    as_set, with_changes = largest_models(job)
    report: dict[str, Any] = {
        "machine": asdict(job.machine),
        "parameters": job.spec.num_parameters,
        "fits": memory.fits and disk.checkpoint_bytes <= job.machine.disk_bytes,
        "memory": {"device": memory.device, "host": memory.host, "share": memory.use, "fits": memory.fits},
        "process_bytes": memory.process_bytes,
        "cache_tokens": memory.cache_tokens,
        "micro_batch": {
            "max_tokens": limits.max_tokens, "tokens": batch.tokens, "number": batch.number,
            "recompute": asdict(limits.activations.recompute_for(batch.tokens)),
        },
        "seconds": {**asdict(seconds := step_seconds(job, memory)), "step": seconds.step},
        "disk": {**asdict(disk), "needed_bytes": disk.needed_bytes, "problem": disk.problem(job.machine.disk_bytes)},
        "remedies": [] if memory.fits else [flags_text(changes) for changes in remedies(job)],
        "fastest": None,
        "largest_model": {"as_set": as_set, "fastest_setting": with_changes},
    }  # fmt: skip
    if best is not None:
        candidate = changed(job, best)
        step = step_seconds(candidate, estimate(candidate)).step
        report["fastest"] = {"flags": flags_text(best), "seconds": step, "share": estimate(candidate).use}
    return report


def _show(job: Job, report: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    machine = job.machine
    console.print(f"{job.spec.num_parameters / 1e9:.2f} billion parameters on {machine.name}")
    table = Table("GiB", "part", box=None, pad_edge=False)
    pools = [report["memory"]["device"], report["memory"]["host"]]
    if machine.shares_memory:
        pools = [{**pools[0], **pools[1]}]
    for parts, size in zip(pools, (machine.memory_bytes, machine.host_bytes), strict=False):
        for part, num_bytes in parts.items():
            table.add_row(f"{num_bytes / GIB:8.2f}", part)
        table.add_row(f"{sum(parts.values()) / GIB:8.2f}", f"of {size / GIB:.1f}", style="bold", end_section=True)
    console.print(table)
    batch, seconds, disk = report["micro_batch"], report["seconds"], report["disk"]
    console.print(
        f"micro-batches: {batch['number']} of at most {batch['tokens']:,} tokens in an optimizer step, "
        f"{Recompute(**batch['recompute'])}; KV cache of {report['cache_tokens']:,} tokens"
    )
    console.print(
        f"a step: at most about {seconds['step']:,.0f} s (generate {seconds['generate']:,.1f}, log-probs "
        f"{seconds['log_probs']:,.1f}, update {seconds['update']:,.1f})"
    )
    exported = f", {disk['export_bytes'] / GIB:.1f} of exported weights" if disk["export_bytes"] else ""
    kept, untold = disk["num_checkpoints"], "" if job.config.data.num_rollout else " of 1 rollout (no --num-rollout)"
    console.print(
        f"disk{untold}: {disk['needed_bytes'] / GIB:.1f} of {machine.disk_bytes / GIB:.0f} GiB that are free: {kept} "
        f"checkpoint{'s' * (kept != 1)} of {disk['checkpoint_bytes'] / GIB:.1f}, {disk['num_at_once']} at one time"
        f"{exported}, and samples"
    )
    if disk["problem"]:
        console.print(f"disk: {disk['problem']}", style="bold red")
    if report["fits"]:
        console.print("it fits", style="green")
    else:
        console.print("it does not fit", style="bold red")
    if not report["memory"]["fits"]:
        ways = report["remedies"] or ["a smaller model or another machine: no setting is enough"]
        console.print("change one of: " + "; or ".join(ways) if len(ways) > 1 else f"change: {ways[0]}")
    if report["fastest"] is not None:
        best = report["fastest"]
        flags = best["flags"] or "these settings"
        console.print(f"fastest that fits: {flags} (about {best['seconds']:,.0f} s a step)")
    as_set, at_best = (name or "none" for name in report["largest_model"].values())
    console.print(f"largest known model: {as_set} with these flags, {at_best} at best")
