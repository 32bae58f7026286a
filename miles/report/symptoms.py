"""Symptoms that a log alone shows: each function looks for one entry of the manual's troubleshooting chapter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from statistics import fmean, median

from miles.observe.error_rule import NUM_OFFSETS, Limits, Timeline, replay
from miles.observe.symptoms import COLLECTIVE_TIMEOUT, SYMPTOMS
from miles.report import signals
from miles.report.findings import BAD, FATAL, NOTE, WATCH, Finding
from miles.report.logs import UNAVAILABLE, Log, LogLine
from miles.report.runs import RunData
from miles.report.summary import ZERO_STD, duration, number, state

ENGINE_START = timedelta(minutes=5)
GAP_ALARM = 0.05  # healthy gaps between bfloat16 programs are near 0.015

_EXCEPTION = re.compile(r"^(?:Error: |(?:[\w.]+\.)?\w*(?:Error|Exception)(?:: |$))")


def dead_engine(run: RunData) -> Finding | None:
    log = run.log
    if log is None or not log.unavailable or log.first_time is None or log.last_time is None:
        return None
    rule = replay(refusals(log), Limits())
    count = f"{len(log.unavailable):,} lines of {UNAVAILABLE} in {duration(log.unavailable[-1] - log.unavailable[0])}"
    if rule.num_stopped == NUM_OFFSETS:
        before = _last_error(log, before=log.unavailable[0].timestamp())
        evidence = [count, f"the watchdog rule would have stopped the run, at each of {NUM_OFFSETS} offsets"]
        evidence += [f"above the first of them: {before.message}"] if before else []
        return Finding(
            "dead_engine",
            "The rollout engine is dead and the run goes on asking it",
            FATAL,
            tuple(evidence),
            "Stop the run and read the engine's lines above the first refused request. Guard every run: miles watch.",
            ("--engine-mem-fraction-static", "--attn-implementation"),
            "7.1",
        )
    if rule.most_in_a_row and not run.steps and not run.evals:
        return Finding(
            "eval_refused",
            "Requests were refused before the first step and none was finished",
            BAD,
            (count,),
            "The engine was not ready or not alive. Try a run of two steps, with evaluation off first.",
            ("--skip-eval-before-train", "--eval-interval"),
            "6.2",
        )
    return Finding(
        "refused_bursts",
        "The router refused requests in bursts, and they were retried",
        NOTE,
        (count, f"at most {rule.most_in_a_row} checks in a row were above the limit; a dead engine has {rule.checks}"),
        "Nothing is lost. Fewer open requests make the bursts rarer.",
        ("--rollout-batch-size", "--n-samples-per-prompt"),
        "3.1",
    )


def refusals(log: Log) -> Timeline:
    """The refused requests of a log, in seconds from the first of them, for the watchdog rule."""
    first = log.unavailable[0]
    seconds = [int((time - first).total_seconds()) for time in log.unavailable]
    end = max(seconds[-1], int(((log.last_time or first) - first).total_seconds()))
    return Timeline(first, seconds, end, end)


def logged(run: RunData) -> list[Finding]:
    """Each cause that a single line shows, once, by the table that `miles watch` uses too."""
    found: dict[str, Finding] = {}
    for symptom in SYMPTOMS if run.log is not None else ():
        line = None if symptom.key in ("", *found) or symptom.at_start and run.steps else _find(run, symptom.pattern)
        if line is not None:
            found[symptom.key] = Finding(
                symptom.key,
                symptom.what[0].upper() + symptom.what[1:],
                FATAL,
                (_quote(line), f"{len(run.steps)} steps were finished", *_settings(run, symptom.flags)),
                symptom.fix[0].upper() + symptom.fix[1:] + ".",
                symptom.flags,
                symptom.section,
            )
    return list(found.values())


def _settings(run: RunData, flags: tuple[str, ...]) -> Iterator[str]:
    """Those of the flags that the run was given."""
    for flag in flags:
        for spelling in dict.fromkeys((flag, flag.replace("--engine-", "--sglang-"))):
            value = run.setting(spelling[2:].replace("-", "_"))
            if value is not None:
                yield f"{spelling} is {value}"


def small_cache(run: RunData) -> Finding | None:
    tokens = run.log.kv_tokens if run.log is not None else None
    needed = _tokens_needed(run)
    if tokens is None or needed is None or tokens * 8 >= needed:
        return None
    flags = ("--engine-mem-fraction-static",)
    return Finding(
        "small_cache",
        "The KV cache is too small for the answers of a step",
        BAD,
        (f"it holds {tokens:,} tokens; the answers of a step need {needed:,.0f}", *_settings(run, flags)),
        "Raise the engine's share of memory by 0.05 or 0.1.",
        flags,
        "7.1",
    )


def _tokens_needed(run: RunData) -> float | None:
    """Tokens of all answers of a step and their prompts, from the first step."""
    totals = run.values("rollout/total_lengths")
    prompts, answers = run.number_setting("rollout_batch_size"), run.number_setting("n_samples_per_prompt")
    if not totals:
        return None
    return fmean(totals[:3]) * ((prompts or 32) * (answers or 8))


def engine_start(run: RunData) -> Finding | None:
    log = run.log
    if (
        log is None
        or run.steps
        or log.unavailable
        or log.kv_tokens is not None
        or not log.first_time
        or not log.last_time
    ):
        return None
    waited = log.last_time - log.first_time
    if waited < ENGINE_START or not log.is_public and log.find("ray start|sglang") is None:
        return None
    error = _last_error(log)
    return Finding(
        "engine_start",
        "The rollout engine did not start",
        BAD,
        (f"no line about the KV cache in {duration(waited)}", *((_quote(error),) if error is not None else ())),
        "Read the lines above for an Error or an AssertionError.",
        (),
        "1.1",
    )


def step_zero_gap(run: RunData) -> Finding | None:
    gaps = run.series(signals.GAP)
    if not gaps or gaps[0][0] != 0 or not gaps[0][1] > GAP_ALARM:
        return None
    return Finding(
        "step_zero_gap",
        "Trainer and engine disagree from the first step on",
        BAD + 20,
        (f"{signals.GAP} is {number(gaps[0][1])} at step 0; 0.01 to 0.02 is usual in bfloat16",),
        "Stop before it trains on wrong numbers: both sides must load the same weights in the same format and sample "
        "with the temperature, top-p and top-k that the trainer scores with.",
        ("--hf-checkpoint", "--load", "--rollout-temperature", "--rollout-top-p", "--rollout-top-k"),
        "5.2",
    )


def fractional_rewards(run: RunData) -> Finding | None:
    """A group of equal fractions gets advantages from float32 rounding in public Miles."""
    if run.log is None or not run.log.is_public:
        return None
    rewards: dict[str, float] = {}
    for step in run.steps:
        for name, count in step.metrics.items():
            match = ZERO_STD.fullmatch(name)
            if match is not None and count > 0 and _is_inexact(match[1]):
                rewards[match[1]] = rewards.get(match[1], 0) + count
    if not rewards:
        return None
    listed = ", ".join(f"{count:.0f} groups with every reward {reward}" for reward, count in sorted(rewards.items()))
    return Finding(
        "fractional_rewards",
        "Groups of equal fractional rewards may get small advantages",
        WATCH,
        (listed, "float32 cannot hold these exactly: 16 rewards of 0.3 gave advantages of 0.029"),
        "Round rewards to multiples of 0.25, or drop groups without spread.",
        ("--dynamic-sampling-filter-path",),
        "3.5",
    )


def _is_inexact(reward: str) -> bool:
    try:
        return (float(reward) * 4) % 1 != 0
    except ValueError:
        return False


def broken_numbers(run: RunData) -> Finding | None:
    for name in ("train/loss", "train/grad_norm", "train/pg_loss"):
        for step, value in run.series(name):
            if not math.isfinite(value):
                return _broken(run, f"{name} is {value} at step {step}")
    norms = run.series("train/grad_norm")
    for place in range(1, len(norms)):
        usual = median(value for _, value in norms[max(0, place - 10) : place])
        if usual > 0 and norms[place][1] > 30 * usual:
            step, norm = norms[place]
            return _broken(run, f"train/grad_norm jumps from {number(usual)} to {number(norm)} at step {step}")
    line = _find(run, COLLECTIVE_TIMEOUT) or _find(run, "is not finite")
    return _broken(run, _quote(line)) if line is not None and run.steps else None


def _broken(run: RunData, evidence: str) -> Finding:
    offloads = any(value > 0 for value in run.values("perf/sleep_time"))
    return Finding(
        "broken_numbers",
        "The numbers of the training broke",
        BAD + 25,
        (evidence, *(("the trainer's state is offloaded between steps",) if offloads else ())),
        "Run once without offload of the trainer and compare; with FSDP2 on several GPUs, shards of uneven size have "
        "been corrupted by it. Otherwise lower the learning rate and look at the rewards of that step.",
        ("--no-offload-train", "--lr", "--clip-grad") if offloads else ("--lr", "--clip-grad"),
        "7.1",
    )


def ray_cluster(run: RunData) -> Finding | None:
    external = _find(run, r"MILES_SCRIPT_EXTERNAL_RAY=['\"]?1")
    cleanup = _find(run, r"\b(?:pkill|killall)\b.*\b(?:sglang|ray|miles|redis)\b")
    if cleanup is None or external is None:
        return None
    return Finding(
        "ray_cluster",
        "The launcher ends every process with a broad name, in a Ray cluster that is yours",
        BAD,
        (_quote(external), _quote(cleanup)),
        "Remove the cleanup from the launcher, or give the run a Ray cluster of its own.",
        (),
        "6.3",
    )


def lost_checkpoint(run: RunData) -> Finding | None:
    """`--load` was given and the run neither loaded anything nor wrote to that folder itself before."""
    log, load = run.log, run.setting("load")
    if log is None or run.folder is not None or not load or not run.steps:
        return None
    if log.find(r"Loaded model from|Loaded optimizer from|starting fresh") is not None or run.steps[0].number > 0:
        return None
    return Finding(
        "fresh_start",
        "The run started fresh although --load was given",
        WATCH,
        (f"--load is {load}; no line `Loaded model from`; the first step is {run.steps[0].number}",),
        "On a first run this is right. Otherwise --load must name the parent folder, with its tracker file.",
        ("--load",),
        "6.3",
    )


def unfinished(run: RunData) -> Finding | None:
    """A run folder whose process is gone before the end, or nothing that was finished at all."""
    total = run.setting("num_rollout")
    if state(run) == "ended early":
        count = f"{len(run.steps)} of {total} steps are done" if total else f"{len(run.steps)} steps are done"
        return Finding(
            "ended_early",
            "The run ended before its last step",
            WATCH + 12,
            (count, "no process of it is left"),
            "The same command goes on from its last checkpoint; read the end of log.txt first.",
            ("--use-fault-tolerance", "--save-interval"),
            "6.3",
        )
    if run.steps or state(run) == "running":
        return None
    lines = run.log.num_lines if run.log is not None else 0
    return Finding(
        "no_step",
        "No step was finished",
        WATCH,
        (f"{lines:,} lines of the log, none of a finished step",),
        "Is it the log of a training run, and has its first step had the time to end?",
        (),
        "1.1",
    )


def other_error(run: RunData) -> Finding | None:
    """The last error of a run that did not finish: what no other entry explained."""
    if run.log is None or run.finished:
        return None
    line = _last_error(run.log)
    if line is None:
        return None
    score = WATCH if run.steps else BAD - 5
    return Finding("error", "The log holds an error", score, (_quote(line),), "Read the lines around it.")


def _find(run: RunData, pattern: str) -> LogLine | None:
    return run.log.find(pattern) if run.log is not None else None


def _quote(line: LogLine) -> str:
    text = line.message.strip()
    return f"line {line.number}: {text if len(text) <= 300 else text[:299] + '…'}"


def _last_error(log: Log, *, before: float | None = None) -> LogLine | None:
    for line in reversed(log.lines):
        early = before is None or line.time is None or line.time.timestamp() <= before
        if early and _EXCEPTION.match(line.message.strip()) and UNAVAILABLE not in line.message:
            return line
    return None


CAUSES_IN_LOGS: tuple[Callable[[RunData], Finding | None], ...] = (
    dead_engine,
    small_cache,
    engine_start,
    step_zero_gap,
    fractional_rewards,
    broken_numbers,
    ray_cluster,
    lost_checkpoint,
)
