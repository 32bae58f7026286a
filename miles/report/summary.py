"""What a report says about one run: signals, phases of a step, clean steps and their medians, groups, facts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from miles.config.flags import FLAGS
from miles.report import signals
from miles.report.runs import RunData, Step

# (phase, title, hue, part of the training time): a step in the order of its phases.
PHASES = (
    ("generate", "write answers", "violet", False),
    ("rollout", "rollout", "violet", False),
    ("reward", "grade", "green", False),
    ("wake_up", "onload", "amber", True),
    ("data_preprocess", "pack the batch", "blue", True),
    ("log_probs", "log-probs", "blue", True),
    ("ref_log_probs", "reference log-probs", "blue", True),
    ("teacher_log_probs", "teacher log-probs", "blue", True),
    ("values", "values", "blue", True),
    ("critic_train", "critic step", "blue", True),
    ("actor_train", "gradient step", "blue", True),
    ("sleep", "offload", "amber", False),
    ("update_weights", "weight update", "amber", False),
    ("finalize_and_resume_engines", "engine memory", "amber", False),
    ("eval", "evaluation", "green", False),
    ("save_model", "checkpoint", "teal", False),
)
SHADES = {"wake_up": 1, "log_probs": 1, "eval": 1, "values": 1} | dict.fromkeys(
    ("sleep", "data_preprocess", "ref_log_probs", "teacher_log_probs", "critic_train", "finalize_and_resume_engines"), 2
)
REST = ("rest", "rest of training", "grey")

ZERO_STD = re.compile(r"rollout/zero_std/count_(.+)")


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    title: str
    hue: str
    seconds: float

    @property
    def shade(self) -> int:
        """Tells phases of one colour apart, the same way on every page."""
        return SHADES.get(self.name, 0)


def phases(step: Step) -> list[Phase]:
    """Where the time of a step went. Phases inside another one are not counted twice."""
    get = step.metrics.get
    found = []
    parts = 0.0
    writes = get("perf/generate_time")
    for name, title, hue, in_training in PHASES:
        seconds = get(f"perf/{name}_time")
        if seconds is None:
            continue
        if in_training:
            parts += seconds
        if name == "rollout":
            seconds = max(0.0, seconds - (writes or 0.0) - get("perf/reward_time", 0.0))
        if name == "rollout" and writes is not None:
            found.append(Phase(name, "rest of rollout", "grey", seconds))
        else:
            found.append(Phase(name, title, hue, seconds))
    rest = get("perf/train_time", parts) - parts
    if rest > 0:
        found.append(Phase(*REST, rest))
    return found


def median_phases(run: RunData, steps: Sequence[Step] | None = None) -> list[Phase]:
    """Median seconds of every phase, in the order of a step; phases that never cost anything are left out."""
    by_name: dict[str, list[Phase]] = {}
    for step in run.steps if steps is None else steps:
        for phase in phases(step):
            by_name.setdefault(phase.name, []).append(phase)
    order = [name for name, *_ in PHASES] + [REST[0]]
    medians = []
    for name in sorted(by_name, key=order.index):
        several = by_name[name]
        # A phase of some steps only, such as an evaluation, is shown by its share of all steps.
        rare = len(several) < len(run.steps) // 2
        seconds = [phase.seconds for phase in several]
        typical = sum(seconds) / len(run.steps) if rare else median(seconds)
        if max(seconds) > 0:
            medians.append(Phase(name, several[0].title + (" (mean)" if rare else ""), several[0].hue, typical))
    return medians


def is_clean(run: RunData, step: Step, *, whole: bool) -> bool:
    """The manual's rule: the timed window of the step overlaps no pause. A step without times is not clean."""
    span = step.whole if whole else step.rollout
    return span is not None and not any(span.overlaps(pause) for pause in run.pauses)


@dataclass(frozen=True, slots=True)
class Timing:
    """Median of a time over all steps and over the clean ones."""

    name: str
    title: str
    all_s: float
    clean_s: float | None
    num_clean: int
    num_steps: int


TIMES = (
    ("perf/rollout_time", "rollout", False),
    ("perf/log_probs_time", "log-probs", True),
    ("perf/actor_train_time", "gradient step", True),
    ("perf/train_time", "training", True),
    ("perf/update_weights_time", "weight update", True),
    ("perf/step_time", "whole step", True),
)


def timings(run: RunData) -> list[Timing]:
    """Rollout times count when no pause touched the rollout, all others when none touched the step."""
    found = []
    for name, title, whole in TIMES:
        steps = [step for step in run.steps if name in step.metrics]
        if not steps:
            continue
        clean = [step.metrics[name] for step in steps if is_clean(run, step, whole=whole)]
        everything = median(step.metrics[name] for step in steps)
        found.append(Timing(name, title, everything, median(clean) if clean else None, len(clean), len(steps)))
    return found


def clean_numbers(run: RunData, *, whole: bool) -> set[int]:
    return {step.number for step in run.steps if is_clean(run, step, whole=whole)}


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of a step whose rewards are all equal, by that reward, and the share of all groups if it is known."""

    step: int
    by_reward: dict[str, float]
    share: float | None


def equal_groups(run: RunData) -> list[Groups]:
    """Groups that teach nothing, per step. Their share needs the number of groups: logged, or from the settings."""
    total = run.number_setting("rollout_batch_size")
    found = []
    for step in run.steps:
        counts = {
            match[1]: value for name, value in step.metrics.items() if (match := ZERO_STD.fullmatch(name)) is not None
        }
        share = step.metrics.get("rollout/no_signal_group_ratio")
        if share is None and total:
            share = sum(counts.values()) / total
        found.append(Groups(step.number, counts, share))
    return found


@dataclass(frozen=True, slots=True)
class SignalSummary:
    signal: signals.Signal
    points: list[tuple[int, float]]
    first: float  # mean of the first steps
    last: float  # mean of the last steps
    low: float
    high: float
    first_ten: tuple[float, float]  # range over the first ten steps


def signal_summaries(run: RunData) -> list[SignalSummary]:
    """The eight signals that the run has."""
    found = []
    for signal in signals.SIGNALS:
        points = signals.points(run, signal.key)
        if not points:
            continue
        values = [value for _, value in points]
        begin = values[: signals.FIRST_STEPS]
        first, last = signals.ends(values)
        found.append(SignalSummary(signal, points, first, last, min(values), max(values), (min(begin), max(begin))))
    return found


def state(run: RunData) -> str:
    """`finished`, `running`, `ended early`, or `log only` when there is no run folder to tell."""
    if run.folder is None:
        return "log only"
    if run.finished:
        return "finished"
    return "running" if is_running(run.folder) else "ended early"


def is_running(folder: Path) -> bool:
    """Whether the process that holds the lock of the folder lives. The lock itself is not tried: a run that starts in
    that moment would find its folder taken."""
    lock = folder / ".lock"
    try:
        process = psutil.Process(int(lock.read_text(encoding="utf-8")))
        return process.create_time() <= lock.stat().st_mtime + 1
    except (OSError, ValueError, psutil.Error):
        return False


def changed_settings(run: RunData) -> dict[str, Any]:
    """Settings that are not at their default, or, from a log, those of its command line."""
    if run.folder is None:
        return dict(run.settings)
    changed = {}
    for name, value in run.settings.items():
        default = FLAGS[name].default if name in FLAGS else None
        plain = list(default) if isinstance(default, tuple) else default
        if value != plain and value is not None:
            changed[name] = value
    return changed


def facts(run: RunData) -> list[tuple[str, str]]:
    """What is needed to repeat or to doubt the run."""
    environment = run.environment
    hardware = environment.get("hardware", {})
    versions = environment.get("versions", {})
    gpus = hardware.get("gpus") or []
    rows: list[tuple[str, Any]] = [
        ("command", environment.get("command")),
        ("started", environment.get("time")),
        ("commit", environment.get("commit")),
        ("model", environment.get("checkpoint") or run.setting("hf_checkpoint")),
        ("model fingerprint", environment.get("checkpoint_fingerprint")),
        ("seeds", ", ".join(f"{name} {value}" for name, value in environment.get("seeds", {}).items())),
        ("GPUs", ", ".join(gpus)),
        ("CPU", f"{hardware['cpu']}, {hardware.get('num_cpus')} cores" if hardware.get("cpu") else None),
        ("memory", _gigabytes(hardware.get("memory_bytes"))),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)),
    ]
    if run.log is not None:
        weights = run.log.find("Load weight end")
        rows += [
            ("weights", weights.message if weights else None),
            ("KV cache", f"{run.log.kv_tokens:,} tokens" if run.log.kv_tokens else None),
            ("log", f"{run.log.num_lines:,} lines, {_span(run)}"),
        ]
    return [(name, str(value)) for name, value in rows if value]


def _gigabytes(size: float | None) -> str | None:
    return f"{size / 1e9:.1f} GB" if size else None


def _span(run: RunData) -> str:
    log = run.log
    if log is None or log.first_time is None or log.last_time is None:
        return "no times"
    return f"{log.first_time} to {log.last_time}, {duration(log.last_time - log.first_time)}"


def duration(span: timedelta | float) -> str:
    """`2 h 05 min`, `3 min 20 s`, `12.5 s`."""
    seconds = span.total_seconds() if isinstance(span, timedelta) else span
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {seconds % 60:02.0f} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def number(value: float | None) -> str:
    """Four significant digits, without an exponent where a person would not write one."""
    if value is None:
        return "–"
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:.1e}"


def stored_summary(run: RunData) -> dict[str, Any]:
    """The figures of a report as JSON data, so that `miles report --check` can follow them from the raw records."""
    return {
        "schema": 1,
        "num_steps": len(run.steps),
        "clean_rollouts": sorted(clean_numbers(run, whole=False)),
        "clean_steps": sorted(clean_numbers(run, whole=True)),
        "medians": {
            timing.name: {"all": timing.all_s, "clean": timing.clean_s, "num_clean": timing.num_clean}
            for timing in timings(run)
        },
        "signals": {
            item.signal.key: {"first": item.first, "last": item.last, "low": item.low, "high": item.high}
            for item in signal_summaries(run)
        },
    }
