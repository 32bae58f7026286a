"""Compares settings, each run with one or more seeds: same steps only, with a plain verdict for every number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median, pstdev
from typing import Any

import pyarrow.parquet

from miles.config.flags import FLAGS
from miles.errors import ConfigError
from miles.report import signals
from miles.report.html import eval_curves
from miles.report.runs import RunData
from miles.report.spread import Units, Verdict, compare_units
from miles.report.summary import TIMES, clean_numbers

SEEDS = ("seed", "rollout_seed")
# Settings that name a run or a place, and flags that may change on resume: they do not make it another setup.
PLACES = ("hf_checkpoint", "prompt_data", "save_debug_event_data", "wandb_group", "wandb_dir", "tb_experiment_name")
MIN_SPREAD = 1e-6
UnitsOf = Callable[[RunData], Units]


@dataclass(frozen=True)
class Arm:
    """Runs of one setup, in the order of their seeds."""

    name: str
    runs: tuple[RunData, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One number compared. `unit` counts what it was drawn from: prompts or steps."""

    title: str
    verdict: Verdict
    unit: str


@dataclass(frozen=True, slots=True)
class TimeRow:
    """Median seconds on the steps that are clean in every run, per arm; None when there are none."""

    title: str
    baseline_s: float | None
    change_s: float | None
    num_steps: int


@dataclass
class Comparison:
    baseline: Arm
    change: Arm
    steps: list[int]  # the steps that all runs have
    window: list[int]  # the last of them, whose means are compared
    rows: list[Row]
    times: list[TimeRow]
    settings: list[tuple[str, str, str]]
    environment: list[tuple[str, str, str]]
    warnings: list[str] = field(default_factory=list)


def make_arms(runs: Sequence[RunData]) -> list[Arm]:
    """Runs with the same settings but for their seeds are one arm; a log without settings is an arm of its own."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        key = repr(sorted(setup_of(run).items())) if run.settings else str(run.path)
        groups.setdefault(key, []).append(run)
    return [arm(group) for group in groups.values()]


def arm(runs: Sequence[RunData]) -> Arm:
    ordered = tuple(sorted(runs, key=lambda run: [str(run.settings.get(seed, "")).zfill(20) for seed in SEEDS]))
    name = ordered[0].name if len(ordered) == 1 else f"{ordered[0].name} and {len(ordered) - 1} more"
    return Arm(name, ordered)


def setup_of(run: RunData) -> dict[str, Any]:
    """The settings that make the setup: without seeds, names and places."""
    return {
        name: value
        for name, value in run.settings.items()
        if name not in SEEDS and name not in PLACES and not (name in FLAGS and FLAGS[name].resume)
    }


def compare(baseline: Arm, change: Arm) -> Comparison:
    """Raises `ConfigError` when the runs have no step in common."""
    everything = [*baseline.runs, *change.runs]
    common = set.intersection(*({step.number for step in run.steps} for run in everything))
    if not common:
        raise ConfigError("the runs have no step in common, so nothing can be compared")
    steps = sorted(common)
    window = steps[-signals.window(len(steps)) :]
    differing = _differing(setup_of(baseline.runs[0]), setup_of(change.runs[0]))
    result = Comparison(
        baseline, change, steps, window, _rows(baseline, change, steps, window), _times(baseline, change, steps),
        differing, _environment(baseline.runs[0], change.runs[0]),
    )  # fmt: skip
    if len(differing) > 1:
        result.warnings.append(f"{len(differing)} settings differ: change one thing per run to know what helped")
    if len(steps) < len(everything[0].steps):
        result.warnings.append(f"only the {len(steps)} steps that all runs have are compared")
    if not all(row.verdict.paired for row in result.rows[:1]):
        result.warnings.append("the runs answered different prompts, so more seeds are needed than on the same ones")
    return result


def _rows(baseline: Arm, change: Arm, steps: Sequence[int], window: Sequence[int]) -> list[Row]:
    rows: list[Row] = []
    for title, chosen in (("reward", window), ("reward, all steps", steps)):
        by_step = partial(_step_units, key="reward", steps=chosen)
        rows += _rewards(title, baseline, change, partial(_prompt_units, steps=chosen), by_step, "steps")
    rows += _eval_rows(baseline, change)
    for key in ("length", "truncated", "gap", "entropy", "grad"):
        sides = [[_step_units(run, key, window) for run in side.runs] for side in (baseline, change)]
        if all(units for side in sides for units in side):
            values = [value for units in sides[0] for value in units.values()]
            if not any(value for side in sides for units in side for value in units.values()):
                continue  # a number that is 0 in every run
            scale = max(pstdev(values), abs(fmean(values)) * 0.1, MIN_SPREAD)
            verdict = compare_units(sides[0], sides[1], scale=scale)
            rows.append(Row(signals.BY_KEY[key].title.lower(), verdict, "steps"))
    return rows


def _rewards(
    title: str, baseline: Arm, change: Arm, by_prompt: UnitsOf, otherwise: UnitsOf, unit: str
) -> Iterator[Row]:
    """By prompt where every run has samples, else by `unit`; nothing where a run lacks these too."""
    for name, units_of in (("prompts", by_prompt), (unit, otherwise)):
        sides = [[units_of(run) for run in side.runs] for side in (baseline, change)]
        if all(units for side in sides for units in side):
            values = [value for side in sides for units in side for value in units.values()]
            yield Row(title, compare_units(sides[0], sides[1], scale=_answer_spread(values)), name)
            return


def _answer_spread(values: Sequence[float]) -> float:
    """Standard deviation of single answers: of a reward of 0 and 1 with this mean, or what is seen beyond that."""
    mean = fmean(values)
    return max(math.sqrt(mean * (1 - mean)) if 0 <= mean <= 1 else 0.0, pstdev(values), MIN_SPREAD)


def _step_units(run: RunData, key: str, steps: Sequence[int]) -> Units:
    wanted = set(steps)
    return {(step, ""): value for step, value in signals.points(run, key) if step in wanted and math.isfinite(value)}


def _prompt_units(run: RunData, steps: Sequence[int]) -> Units:
    """Mean reward of every prompt of every step. Empty when a step has no samples on disk."""
    if run.folder is None:
        return {}
    return _units_of(run, [(step, f"rollout_{step}") for step in steps])


def _units_of(run: RunData, files: Sequence[tuple[int, str]]) -> Units:
    assert run.folder is not None
    units: dict[tuple[int, str], list[float]] = {}
    for step, name in files:
        path = run.folder / "samples" / f"{name}.parquet"
        if not path.is_file():
            return {}
        table = pyarrow.parquet.read_table(path, columns=["set", "prompt", "reward"]).to_pydict()
        for dataset, prompt, reward in zip(table["set"], table["prompt"], table["reward"], strict=True):
            if reward is not None:
                units.setdefault((step, f"{dataset}\0{prompt}"), []).append(reward)
    return {key: fmean(rewards) for key, rewards in units.items()}


def _eval_rows(baseline: Arm, change: Arm) -> list[Row]:
    """Each evaluation set at the last evaluation that all runs have."""
    runs = [*baseline.runs, *change.runs]
    curves = [{name: dict(points) for name, points in eval_curves(run).items()} for run in runs]
    rows: list[Row] = []
    for name in curves[0]:
        shared = set.intersection(*(set(curve.get(name, {})) for curve in curves))
        if not shared:
            continue
        last = max(shared)
        by_prompt, mean = (partial(units_of, name=name, step=last) for units_of in (_eval_units, _eval_mean))
        rows += _rewards(f"{name} after {last} steps", baseline, change, by_prompt, mean, "runs")
    return rows


def _eval_mean(run: RunData, name: str, step: int) -> Units:
    return {(step, ""): dict(eval_curves(run)[name])[step]}


def _eval_units(run: RunData, name: str, step: int) -> Units:
    if run.folder is None:
        return {}
    units = _units_of(run, [(step, f"eval_{step}")])
    return {key: value for key, value in units.items() if key[1].startswith(f"{name}\0")}


def _times(baseline: Arm, change: Arm, steps: Sequence[int]) -> list[TimeRow]:
    runs = [*baseline.runs, *change.runs]
    rows = []
    for name, title, whole in TIMES:
        clean = set(steps).intersection(*(clean_numbers(run, whole=whole) for run in runs))
        # A step can lack a time, such as the scoring pass of a step that needed none.
        clean = {n for n in clean if all(n in dict(run.series(name)) for run in runs)}
        if any(run.series(name) for run in runs):
            medians = [_median(side.runs, name, clean) if clean else None for side in (baseline, change)]
            rows.append(TimeRow(title, medians[0], medians[1], len(clean)))
    return rows


def _median(runs: Sequence[RunData], name: str, steps: set[int]) -> float:
    return median(value for run in runs for step, value in run.series(name) if step in steps)


def _differing(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, str, str]]:
    names = [*first, *(name for name in second if name not in first)]
    return [
        (f"--{name.replace('_', '-')}", _shown(first.get(name)), _shown(second.get(name)))
        for name in names
        if first.get(name) != second.get(name)
    ]


def _environment(first: RunData, second: RunData) -> list[tuple[str, str, str]]:
    """Commit, checkpoint, versions and hardware that differ."""
    rows = []
    for title, path in (
        ("commit", ("commit",)),
        ("model", ("checkpoint_fingerprint",)),
        ("CPU", ("hardware", "cpu")),
        ("GPUs", ("hardware", "gpus")),
    ):
        rows.append((title, _at(first.environment, path), _at(second.environment, path)))
    versions = [run.environment.get("versions", {}) for run in (first, second)]
    rows += [(name, _shown(versions[0].get(name)), _shown(versions[1].get(name))) for name in versions[0]]
    return [row for row in rows if row[1] != row[2]]


def _at(data: dict[str, Any], path: Sequence[str]) -> str:
    value: Any = data
    for name in path:
        value = value.get(name, {}) if isinstance(value, dict) else {}
    return _shown(value or None)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return "on" if value is True else "off" if value is False else str(value)
