"""Turns a run into the data of a page, and the page into HTML that needs nothing from outside."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup

from miles.report import signals
from miles.report.diagnose import diagnose
from miles.report.findings import Finding
from miles.report.ranges import Ranges
from miles.report.runs import RunData
from miles.report.sample_view import Group, choose, load_groups
from miles.report.summary import (
    Phase,
    SignalSummary,
    changed_settings,
    duration,
    equal_groups,
    facts,
    median_phases,
    number,
    phases,
    signal_summaries,
    state,
    timings,
)
from miles.report.svg import Line, line_chart, phase_bars, sparkline, stacked_bars

STATIC = Path(__file__).parent / "static"
STATE_HUES = {"finished": "green", "running": "blue", "ended early": "rose", "log only": "grey"}
HUES = ("green", "violet", "blue", "amber", "teal", "rose", "grey")
MAX_PROMPT_CHARS = 110


@dataclass(frozen=True)
class SignalView:
    """A signal with its numbers as text and its picture."""

    signal: signals.Signal
    first: str
    last: str
    low: str
    high: str
    chart: Markup
    spark: Markup


@functools.cache
def environment() -> jinja2.Environment:
    """Templates of `static/`; everything that is put into a page is escaped."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(STATIC),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["number"] = number
    made.filters["oneline"] = one_line
    return made


def one_line(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= MAX_PROMPT_CHARS else joined[: MAX_PROMPT_CHARS - 1] + "…"


@functools.cache
def static_text(name: str) -> Markup:
    """A style sheet or script of ours, put into a page as it is."""
    return Markup((STATIC / name).read_text(encoding="utf-8"))


def render_report(run: RunData, *, ranges: Ranges | None = None) -> str:
    """The whole page of one run, style and script included."""
    view = run_view(run, diagnose(run, ranges=ranges), ranges=ranges) | {"samples": _samples(run)}
    template = environment().get_template("report.html.jinja")
    return template.render(view=view, style=static_text("style.css"), script=static_text("page.js"))


def run_view(run: RunData, findings: Sequence[Finding], *, ranges: Ranges | None = None) -> dict[str, Any]:
    """Everything that `sections.html.jinja` shows of a run."""
    summaries = signal_summaries(run)
    signal_views = [_signal_view(item, ranges) for item in summaries]
    typical = median_phases(run)
    step_times = run.values("perf/step_time")
    return {
        "name": run.name,
        "state": state(run),
        "state_hue": STATE_HUES[state(run)],
        "headline": headline(run),
        "source": run.path.name,
        "num_steps": len(run.steps),
        "step_time": duration(median(step_times)) if step_times else "",
        "five": [item for item in signal_views if item.signal.first_five],
        "signals": signal_views,
        "has_ranges": ranges is not None,
        "findings": findings,
        **_reward(run),
        "phase_chart": Markup(phase_bars(typical, title="median seconds of each phase of a step")),
        "phase_legend": [(phase.hue, phase.shade, phase.title) for phase in typical],
        "step_chart": Markup(_steps(run, typical)),
        **_groups(run),
        **_lengths(run),
        "memory_chart": Markup(_memory(run)),
        "timings": timings(run),
        "pause_text": _pauses(run),
        "facts": facts(run),
        "settings": [(f"--{name.replace('_', '-')}", _shown(value)) for name, value in changed_settings(run).items()],
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(str(part) for part in value) if isinstance(value, list) else str(value)


def headline(run: RunData) -> str:
    """`40 steps, reward 0.39 to 0.98, held_out 0.03 to 1.00`."""
    parts = [f"{len(run.steps)} steps"]
    rewards = signals.values(run, "reward")
    if rewards:
        first, last = signals.ends(rewards)
        parts.append(f"reward {number(first)} to {number(last)}")
    for name, points in eval_curves(run).items():
        if len(points) > 1:
            parts.append(f"{name} {number(points[0][1])} to {number(points[-1][1])}")
    return ", ".join(parts)


def eval_curves(run: RunData) -> dict[str, list[tuple[int, float]]]:
    """Set name -> (rollouts trained before, mean reward)."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for step, metrics in sorted(run.evals.items()):
        for name, value in metrics.items():
            short = name.removeprefix("eval/")
            if name.startswith("eval/") and "/" not in short and not _is_detail(short):
                curves.setdefault(short, []).append((step, value))
    return curves


def _is_detail(name: str) -> bool:
    return name in ("step", "duration_seconds", "lag_steps") or any(
        mark in name for mark in ("-none_reward_ratio", "-truncated_ratio", "-pass@", "-avg@", "_seconds", "skipped_")
    )


def _signal_view(item: SignalSummary, ranges: Ranges | None) -> SignalView:
    signal = item.signal
    band = ranges.every.get(signal.key) if ranges is not None else None
    lines = [Line(signal.title, item.points, signal.hue)]
    chart = line_chart(lines, title=signal.title, width=260, height=140, band=band, band_title="healthy range")
    low, high = item.first_ten
    return SignalView(
        signal,
        number(item.first),
        number(item.last),
        number(low),
        number(high),
        Markup(chart),
        Markup(sparkline([value for _, value in item.points], signal.hue)),
    )


def _reward(run: RunData) -> dict[str, Any]:
    lines = [Line("training reward", signals.points(run, "reward"), "green")]
    for index, (name, points) in enumerate(eval_curves(run).items()):
        lines.append(Line(name, points, ("teal", "amber", "violet")[index % 3], dots=True))
    shown = [line for line in lines if line.points]
    return {
        "reward_chart": Markup(line_chart(shown, title="reward over steps", width=520, height=260)),
        "reward_legend": [(line.hue, 0, line.label) for line in shown],
    }


def _steps(run: RunData, typical: list[Phase]) -> str:
    """Columns in the shades of the legend: the order of `typical` decides them."""
    columns = []
    for step in run.steps:
        by_name = {phase.name: phase for phase in phases(step)}
        columns.append((step.number, [by_name.get(phase.name, replace(phase, seconds=0.0)) for phase in typical]))
    return stacked_bars(columns, title="time of every step by phase", width=1080, height=230)


def _groups(run: RunData) -> dict[str, Any]:
    groups = equal_groups(run)
    rewards = sorted({reward for item in groups for reward in item.by_reward})
    hues = {reward: _reward_hue(reward, place) for place, reward in enumerate(rewards)}
    columns = [
        (
            item.step,
            [Phase(reward, f"all {reward}", hues[reward], item.by_reward.get(reward, 0.0)) for reward in rewards],
        )
        for item in groups
    ]
    shares = [(item.step, item.share) for item in groups if item.share is not None]
    chart = stacked_bars(columns, title="groups whose rewards are all equal", width=520, height=190, unit="groups")
    if not rewards and shares:
        lines = [Line("share of groups", shares, "grey")]
        chart = line_chart(lines, title="share without signal", width=520, height=190)
    legend = [(hues[reward], 0, f"every reward {reward}") for reward in rewards]
    return {"group_chart": Markup(chart), "group_legend": legend}


def _reward_hue(reward: str, place: int) -> str:
    return {"0": "rose", "0.0": "rose", "1": "green", "1.0": "green", "-1.0": "rose"}.get(
        reward, HUES[(place + 2) % len(HUES)]
    )


def _lengths(run: RunData) -> dict[str, Any]:
    names = (("rollout/response_len/max", "longest", "amber"), ("rollout/response_lengths", "mean", "green"),
             ("rollout/response_len/min", "shortest", "grey"))  # fmt: skip
    lines = [Line(label, run.series(name), hue, smooth=False) for name, label, hue in names if run.series(name)]
    return {
        "length_chart": Markup(line_chart(lines, title="answer lengths", width=520, height=190)),
        "length_legend": [(line.hue, 0, line.label) for line in lines],
    }


def _memory(run: RunData) -> str:
    points = run.series("perf/peak_memory_gb")
    if not points:
        return ""
    lines = [Line("peak of the worker, GB", points, "blue", smooth=False)]
    return line_chart(lines, title="memory in GB", width=520, height=190, y_low=0.0)


def _pauses(run: RunData) -> str:
    if not run.pauses:
        return "No pause is on record."
    seconds = sum((pause.end - pause.start).total_seconds() for pause in run.pauses)
    return f"{len(run.pauses)} pauses, {duration(seconds)} in all."


def _samples(run: RunData) -> list[tuple[str, list[Group]]]:
    """A few groups of the first, a middle and the last step that has samples."""
    steps = run.sample_steps()
    wanted = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    return [(f"Answers of step {step}", choose(load_groups(run, f"rollout_{step}"), 3)) for step in wanted]
