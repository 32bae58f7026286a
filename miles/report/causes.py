"""Causes that the numbers of a run show: why a reward is flat or falls, and where time is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, stdev

from miles.observe.samples import read_samples
from miles.report import signals
from miles.report.findings import BAD, NOTE, WATCH, Finding
from miles.report.runs import RunData
from miles.report.summary import clean_numbers, duration, equal_groups, median_phases, number

MIN_STEPS = 6  # trends of fewer steps are noise
FLAT_STEPS = 24  # the manual's runs gained 0.04 to 0.1 in this many
LIMIT_NO_SIGNAL = 0.5
LIMIT_TRUNCATED = 0.25
LIMIT_CLIP = 0.3
LIMIT_MEMORY = 0.93
STALE_GROUPS = "/".join(("rollout", "fully_async", "stale_groups_filtered"))  # only public Miles logs it
FILTER = "miles.rollout.filter_hub.common_filters.apply_reward_nonzero_std_filter"


def reward_trend(run: RunData) -> str:
    """`rising`, `flat`, `falling` (now clearly under its best), `solved`, or `short` when that cannot be told."""
    values = signals.values(run, "reward")
    if len(values) < MIN_STEPS:
        return "short"
    means = signals.moving_mean(values)[signals.MEAN_STEPS - 1 :]
    noise = stdev(after - before for before, after in zip(values, values[1:], strict=False)) / 2**0.5
    allowed = max(3 * noise / signals.MEAN_STEPS**0.5, 0.02)
    if max(means) - means[-1] > max(2 * allowed, 0.1 * (max(means) - min(values))):
        return "falling"
    if means[-1] >= 0.95 and max(values) <= 1.0:
        return "solved"
    first, last = signals.ends(values)
    return "rising" if last - first > allowed else "flat"


def no_signal(run: RunData) -> Finding | None:
    shares = [item.share for item in equal_groups(run) if item.share is not None]
    if not shares:
        return None
    recent = fmean(shares[-signals.MEAN_STEPS :])
    if recent <= LIMIT_NO_SIGNAL or reward_trend(run) == "solved":
        return None
    by_reward: dict[str, float] = {}
    for item in equal_groups(run)[-signals.MEAN_STEPS :]:
        for reward, count in item.by_reward.items():
            by_reward[reward] = by_reward.get(reward, 0) + count
    width = min(len(shares), signals.MEAN_STEPS)
    evidence = [f"{recent:.0%} of the groups in the last {width} steps have equal rewards"]
    evidence += [f"{count:.0f} of them all {reward}" for reward, count in sorted(by_reward.items()) if count]
    wrong = sum(count for reward, count in by_reward.items() if reward.startswith(("0", "-")))
    easier = "easier prompts, or a model that solves some" if wrong * 2 > sum(by_reward.values()) else "harder prompts"
    return Finding(
        "no_signal", "Most groups teach nothing", BAD - 5 if recent > 0.8 else WATCH + 10, tuple(evidence),
        f"Drop such groups and draw others ({FILTER}), or take {easier}; more answers per prompt help too.",
        ("--dynamic-sampling-filter-path", "--over-sampling-batch-size", "--n-samples-per-prompt"), "3.2",
    )  # fmt: skip


def truncation(run: RunData) -> Finding | None:
    shares = signals.values(run, "truncated")
    if not shares:
        return None
    recent = fmean(shares[-signals.MEAN_STEPS :])
    if recent <= LIMIT_TRUNCATED:
        return None
    return Finding(
        "truncation", "Many answers are cut at the length limit", WATCH + 20 if recent > 0.5 else WATCH - 10,
        (f"{recent:.0%} of the answers in the last steps; a cut answer usually earns nothing",),
        "Raise the limit, or let long answers go on in a later step.",
        ("--rollout-max-response-len", "--partial-rollout"), "4.2",
    )  # fmt: skip


def extraction(run: RunData) -> Finding | None:
    rewards = signals.values(run, "reward")
    if len(rewards) < 3 or max(rewards) > 0.02:
        return _grader(run)
    evidence = [f"the reward was never above {number(max(rewards))} in {len(rewards)} steps"]
    steps = run.sample_steps()
    if steps and run.folder is not None:
        evidence += _without_answer(run.folder / "samples" / f"rollout_{steps[-1]}.parquet")
    if fmean(signals.values(run, "truncated") or [0.0]) > 0.8:
        evidence.append("nearly all answers are cut before they end")
    return Finding(
        "extraction", "No answer is ever right: the grader may not find the answers", BAD + 10, tuple(evidence),
        "Read three samples in the report. The prompt must ask for what the reward reads; labels must parse.",
        ("--rm-type", "--apply-chat-template", "--label-key", "--rollout-max-response-len"), "3.5",
    )  # fmt: skip


def _without_answer(path: Path) -> list[str]:
    rows = read_samples(path)
    marked = sum(1 for row in rows if re.search(r"\\boxed|####|[Aa]nswer\s*[:=]|</think>", row["response"] or ""))
    empty = sum(1 for row in rows if not (row["response"] or "").strip())
    texts = [f"{marked} of {len(rows)} answers of that step mark a final answer (box, ####, Answer:)"]
    return texts + ([f"{empty} answers are empty"] if empty else [])


def _grader(run: RunData) -> Finding | None:
    counts = {
        name: sum(run.values(name))
        for name in ("rollout/grader_errors", "rollout/grader_timeouts", "rollout/num_unscored", "rollout/num_failed")
    }
    found = {name: count for name, count in counts.items() if count > 0}
    samples = sum(run.values("train/num_samples")) or len(run.steps) * 256
    if not found or sum(found.values()) < 0.01 * samples:
        return None
    return Finding(
        "grader", "Answers were not graded", WATCH + 15,
        tuple(f"{name}: {count:.0f} in {len(run.steps)} steps" for name, count in found.items()),
        "They count as wrong or are left out. Look at them in the samples; give the grader more time or workers.",
        ("--rm-timeout", "--rm-num-workers", "--custom-rm-timeout"), "3.5",
    )  # fmt: skip


def entropy_collapse(run: RunData) -> Finding | None:
    values = signals.values(run, "entropy")
    if len(values) < MIN_STEPS or fmean(values[:3]) <= 0.02:
        return None
    first, last = fmean(values[:3]), fmean(values[-signals.MEAN_STEPS :])
    if last > 0.15 * first or reward_trend(run) in ("solved", "rising", "short"):
        return None
    duplicates = run.values("rollout/duplicate_ratio")
    evidence = [f"entropy fell from {number(first)} to {number(last)} nat while the reward is {reward_trend(run)}"]
    if duplicates and fmean(duplicates[-3:]) > 0.5:
        evidence.append(f"{fmean(duplicates[-3:]):.0%} of the answers are copies inside their group")
    return Finding(
        "entropy_collapse", "The policy hardly explores any more", BAD, tuple(evidence),
        "Clip less on the upper side, add an entropy bonus, lower the learning rate; go back to an older checkpoint.",
        ("--eps-clip-high", "--entropy-coef", "--lr", "--rollout-temperature"), "5.1",
    )  # fmt: skip


def clipping(run: RunData) -> Finding | None:
    shares = run.values("train/pg_clipfrac")
    if not shares or fmean(shares[-signals.MEAN_STEPS :]) <= LIMIT_CLIP:
        return None
    high, low = run.values("train/ratio_max"), run.values("train/ratio_min")
    side = ""
    if high and low:
        up, down = median(high) - 1, 1 - median(low)
        side = "mostly upwards" if up > 1.5 * down else "mostly downwards" if down > 1.5 * up else "on both sides"
    up_only = side == "mostly upwards"
    flags = ("--eps-clip-high", "--lr") if up_only else ("--lr", "--num-steps-per-rollout", "--eps-clip")
    return Finding(
        "clipping", "The updates meet the clip limit", WATCH + 10,
        (f"{fmean(shares[-signals.MEAN_STEPS:]):.0%} of the tokens in the last steps{', ' + side if side else ''}",),
        "Make smaller or fewer updates per rollout.", flags, "5.1",
    )  # fmt: skip


def stale_samples(run: RunData) -> Finding | None:
    ages = run.values("rollout/max_sample_age")
    mixed = run.values("rollout/weight_version/mixed_version_ratio")
    dropped = run.values(STALE_GROUPS)
    evidence = []
    if ages and fmean(ages[-signals.MEAN_STEPS :]) > 4:
        evidence.append(f"the oldest tokens are {number(fmean(ages[-signals.MEAN_STEPS :]))} versions old")
    if mixed and fmean(mixed[-signals.MEAN_STEPS :]) > 0.5:
        evidence.append(f"{fmean(mixed[-signals.MEAN_STEPS :]):.0%} of the answers were written with several weights")
    if dropped and sum(dropped[-signals.MEAN_STEPS :]) > 0:
        evidence.append(f"{sum(dropped[-signals.MEAN_STEPS :]):.0f} stale groups were dropped in the last steps")
    if not evidence:
        return None
    return Finding(
        "stale", "Samples are old when they are trained on", WATCH + 5, tuple(evidence),
        "Bound the age, keep fewer samples in flight, or lower the learning rate by the same factor.",
        ("--max-weight-staleness", "--update-weights-interval", "--async-max-concurrent-samples", "--lr"), "4.1",
    )  # fmt: skip


def gap_growth(run: RunData) -> Finding | None:
    gaps = run.values(signals.GAP)
    if len(gaps) < MIN_STEPS or min(gaps) < 0:
        return None
    first, last = fmean(gaps[:3]), fmean(gaps[-3:])
    if last < 1e-4 or last < 1.5 * first:
        return None
    return Finding(
        "gap_growth", "Trainer and engine drift apart", BAD if last > 0.05 else WATCH + 10,
        (f"the gap grew from {number(first)} to {number(last)} nat",),
        "Find what was added (sampler, low precision, old samples, experts) and remove it; weigh tokens until then.",
        ("--off-policy-correction", "--use-tis", "--use-rollout-routing-replay"), "8.2",
    )  # fmt: skip


def reward_hacking(run: RunData) -> Finding | None:
    rewards = signals.values(run, "reward")
    if len(rewards) < MIN_STEPS or reward_trend(run) not in ("rising", "solved"):
        return None
    evidence = []
    for name in sorted({name for metrics in run.evals.values() for name in metrics}):
        if name.startswith("eval/") and name.count("/") == 1 and "-" not in name:
            scores = [metrics[name] for _, metrics in sorted(run.evals.items()) if name in metrics]
            if len(scores) >= 2 and scores[-1] < max(scores) - 0.05 and scores[-1] <= scores[0] + 0.01:
                evidence.append(f"{name} went from {number(max(scores))} to {number(scores[-1])}")
    repeats = run.values("rollout/repetition_frac")
    if repeats and fmean(repeats[-3:]) > 0.1:
        evidence.append(f"{fmean(repeats[-3:]):.0%} of the answers repeat themselves")
    lengths = signals.values(run, "length")
    if lengths and fmean(lengths[-3:]) < 0.1 * fmean(lengths[:3]):
        evidence.append(f"answers shrank from {number(fmean(lengths[:3]))} to {number(fmean(lengths[-3:]))} tokens")
    if not evidence:
        return None
    first, last = signals.ends(rewards)
    return Finding(
        "reward_hacking", "The reward rises but not what it stands for", BAD + 5,
        (f"training reward {number(first)} to {number(last)}", *evidence),
        "Read samples of the last steps, mend the reward, and go back to an older checkpoint.",
        ("--rm-type", "--custom-rm-path", "--use-kl-loss"), "5.1",
    )  # fmt: skip


def flat_reward(run: RunData) -> Finding | None:
    trend = reward_trend(run)
    if trend not in ("flat", "falling") or len(run.steps) < (FLAT_STEPS if trend == "flat" else 2 * MIN_STEPS):
        return None
    rewards = signals.values(run, "reward")
    first, last = signals.ends(rewards)
    best = max(signals.moving_mean(rewards)[signals.MEAN_STEPS - 1 :])
    evidence = [f"means of the first and last steps are {number(first)} and {number(last)}, the best is {number(best)}"]
    rates = run.values("train/lr-pg_0")
    norms = run.values("train/grad_norm")
    if rates and max(rates) == 0:
        evidence.append("the learning rate is 0")
    if norms and max(norms) == 0:
        evidence.append("the gradient is exactly 0")
    title = "The reward does not rise" if trend == "flat" else "The reward falls"
    return Finding(
        "flat_reward" if trend == "flat" else "falling_reward", title, WATCH + 8 if trend == "flat" else BAD - 2,
        tuple(evidence),
        "Other findings may say why. Alone: another learning rate, more steps, prompts of other difficulty.",
        ("--lr", "--rollout-batch-size", "--prompt-data"), "5.1",
    )  # fmt: skip


def heat(run: RunData) -> Finding | None:
    touched = len(run.steps) - len(clean_numbers(run, whole=True) & {step.number for step in run.steps})
    if run.pauses:
        seconds = sum((pause.end - pause.start).total_seconds() for pause in run.pauses)
        return Finding(
            "heat", "The run was paused for heat", WATCH if touched else NOTE,
            (f"{len(run.pauses)} pauses, {duration(seconds)} in all; {touched} of {len(run.steps)} steps touched",),
            "Compare times on clean steps and on the same step numbers only.", (), "5.3",
        )  # fmt: skip
    slow = _slow_at_equal_work(run)
    if not slow:
        return None
    return Finding(
        "heat", "Some steps took far longer for the same work", WATCH,
        (f"steps {', '.join(map(str, slow[:8]))}: over 1.6 times the usual time per token",),
        "Look at temperature, clock and the pause log of a heat guard; other programs on the machine do the same.",
        (), "5.3",
    )  # fmt: skip


def _slow_at_equal_work(run: RunData) -> list[int]:
    """Steps whose training time per token is far above the median; the first steps warm up."""
    rates = []
    for step in run.steps[2:]:
        seconds = step.metrics.get("perf/actor_train_time")
        tokens = step.metrics.get("train/num_tokens") or step.metrics.get("rollout/total_lengths")
        if seconds and tokens and seconds > 1.0:
            rates.append((step.number, seconds / tokens))
    if len(rates) < MIN_STEPS:
        return []
    usual = median(rate for _, rate in rates)
    return [number for number, rate in rates if rate > 1.6 * usual]


def idle_engine(run: RunData) -> Finding | None:
    phases = {phase.name: phase.seconds for phase in median_phases(run)}
    rollout = phases.get("rollout", 0.0) + phases.get("generate", 0.0)
    if not run.steps or rollout < 0.4 * sum(phases.values()) or rollout < 1.0:
        return None
    means, longest = signals.values(run, "length"), run.values("rollout/response_len/max")
    if not means or not longest:
        return None
    ratio = fmean(means) / max(fmean(longest), 1e-9)
    if ratio > 0.35:
        return None
    return Finding(
        "idle_engine", "The engine waits for a few long answers", WATCH,
        (
            f"the rollout is {rollout / sum(phases.values()):.0%} of a step",
            f"the mean answer has {ratio:.0%} of the length of the longest: most of the batch is done long before",
        ),
        "Lower the limit, or let long answers go on in a later step.",
        ("--partial-rollout", "--over-sampling-batch-size", "--rollout-max-response-len"), "4.2",
    )  # fmt: skip


def many_requests(run: RunData) -> Finding | None:
    """Speed of the engine with few and with many open requests, from its own lines; else from the size of rollouts."""
    samples = run.log.engine if run.log is not None else []
    few = [one.tokens_per_s for one in samples if 64 <= one.running <= 256]
    many = [one.tokens_per_s for one in samples if one.running > 256]
    if len(few) >= 5 and len(many) >= 5 and median(many) < 0.8 * median(few):
        evidence = f"{median(few):.0f} tokens/s with up to 256 open requests, {median(many):.0f} with more"
    else:
        rows = [
            (step.metrics["train/num_samples"], step.metrics["perf/rollout_time"], length)
            for step in run.steps
            if "perf/rollout_time" in step.metrics and step.metrics.get("train/num_samples", 0) > 256
            and (length := next((step.metrics[n] for n in signals.BY_KEY["length"].names if n in step.metrics), 0))
        ]  # fmt: skip
        if len(rows) < MIN_STEPS:
            return None
        rows.sort()
        small, large = rows[: len(rows) // 3], rows[-(len(rows) // 3) :]
        more = median(row[0] * row[2] for row in large) / median(row[0] * row[2] for row in small)
        slower = median(row[1] for row in large) / median(row[1] for row in small)
        if more < 1.2 or slower < 1.5 * more:
            return None
        evidence = f"{more:.1f} times the tokens took {slower:.1f} times as long"
    return Finding(
        "many_requests", "The rollout slows down with many open requests", WATCH, (evidence,),
        "Keep fewer requests open per engine.",
        ("--engine-max-running-requests", "--sglang-server-concurrency", "--rollout-batch-size"), "7.1",
    )  # fmt: skip


def near_the_limit(run: RunData) -> Finding | None:
    peaks = run.values("perf/peak_memory_gb")
    total = run.environment.get("hardware", {}).get("memory_bytes")
    if not peaks or not total or run.environment.get("hardware", {}).get("gpus"):
        return None  # the memory of a GPU is not in environment.json
    share = max(peaks) * 1e9 / total
    if share <= LIMIT_MEMORY:
        return None
    return Finding(
        "memory", "Memory is nearly full", WATCH + 5, (f"the peak is {max(peaks):.1f} GB, {share:.0%} of the machine",),
        "Less work at one time, or a smaller KV cache.",
        ("--max-tokens-per-gpu", "--engine-max-total-tokens", "--log-probs-chunk-size"), "2.1",
    )  # fmt: skip


CAUSES: tuple[Callable[[RunData], Finding | None], ...] = (
    no_signal,
    truncation,
    extraction,
    entropy_collapse,
    clipping,
    stale_samples,
    gap_growth,
    reward_hacking,
    flat_reward,
    heat,
    idle_engine,
    many_requests,
    near_the_limit,
)
