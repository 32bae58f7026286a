"""The capture kit: does every stored figure follow from the raw data that is stored with it?

Of a run: pauses are marked again, clean medians computed again, the log compared with `metrics.jsonl`, rewards with the
samples, and the watchdog rule replayed at 30 offsets. Of benchmark results: each figure from the numbers it is made of.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeGuard

import pyarrow.parquet

from miles.observe.error_rule import NUM_OFFSETS, Limits, replay
from miles.report.logs import finite
from miles.report.runs import RunData, open_run
from miles.report.summary import stored_summary
from miles.report.symptoms import refusals

TOLERANCE = 1e-6
RESULT_FIELDS = ("name", "hardware", "versions", "commit", "date", "command")
_FROM_LIST: dict[str, Callable[[list[float]], float]] = {"median": median, "mean": fmean, "min": min, "max": max}


@dataclass(frozen=True, slots=True)
class Check:
    """`ok` is None when there is no raw data to follow the figure from."""

    name: str
    ok: bool | None
    detail: str


def check_run(run: RunData) -> list[Check]:
    """Every check that the files of a run allow."""
    return [*_summary(run), *_log_and_metrics(run), *_samples(run), *_watchdog(run)]


def _summary(run: RunData) -> Iterator[Check]:
    """`summary.json` was written by `miles report`; the records and pauses it was made of may have changed."""
    path = run.folder / "summary.json" if run.folder is not None else None
    if path is None or not path.is_file():
        yield Check("stored summary", None, "no summary.json; `miles report` writes it")
        return
    stored = json.loads(path.read_text(encoding="utf-8"))
    fresh = json.loads(json.dumps(stored_summary(run)))
    for name in ("clean_rollouts", "clean_steps"):
        same = stored.get(name) == fresh[name]
        yield Check(f"pauses marked again: {name}", same, f"{len(fresh[name])} of {fresh['num_steps']} steps")
    for name in ("medians", "signals"):
        wrong = sorted(_differences(stored.get(name), fresh[name], name))
        count = sum(len(values) for values in fresh[name].values())
        yield Check(f"{name} computed again", not wrong, ", ".join(wrong[:5]) or f"{count} figures follow")


def _differences(stored: Any, fresh: Any, place: str) -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(fresh, dict):
        for name in stored.keys() | fresh.keys():
            yield from _differences(stored.get(name), fresh.get(name), f"{place}.{name}")
    elif isinstance(stored, (int, float)) and isinstance(fresh, (int, float)):
        if not math.isclose(stored, fresh, rel_tol=TOLERANCE, abs_tol=1e-12):
            yield f"{place} is {stored}, follows as {fresh}"
    elif stored != fresh:
        yield f"{place} is {stored}, follows as {fresh}"


def _log_and_metrics(run: RunData) -> Iterator[Check]:
    if run.folder is None or run.log is None:
        return
    logged = {step.number: step.metrics for step in open_run(run.log.path).steps}
    compared, wrong = 0, []
    for step in run.steps:
        for name, value in logged.get(step.number, {}).items():
            truth = step.metrics.get(name)
            if truth is not None and finite(value):
                compared += 1
                if not math.isclose(value, truth, rel_tol=TOLERANCE, abs_tol=1e-15):
                    wrong.append(f"{name} of step {step.number}: {value} in the log, {truth} in metrics.jsonl")
    ok = None if not compared else not wrong
    yield Check("log agrees with metrics.jsonl", ok, "; ".join(wrong[:3]) or f"{compared:,} numbers")


def _samples(run: RunData) -> Iterator[Check]:
    """The mean of the stored rewards is the logged reward, where no reward is missing."""
    compared, wrong = 0, []
    rewards = dict(run.series("rollout/raw_reward"))
    for number in run.sample_steps():
        assert run.folder is not None
        table = pyarrow.parquet.read_table(run.folder / "samples" / f"rollout_{number}.parquet", columns=["reward"])
        values = table.column("reward").to_pylist()
        if number in rewards and values and all(finite(value) for value in values):
            compared += 1
            if not math.isclose(fmean(values), rewards[number], rel_tol=1e-5, abs_tol=1e-6):
                wrong.append(f"step {number}: samples {fmean(values)}, logged {rewards[number]}")
    if compared:
        yield Check("rewards follow from the samples", not wrong, "; ".join(wrong[:3]) or f"{compared} steps")


def _watchdog(run: RunData) -> Iterator[Check]:
    if run.log is None or not run.log.unavailable:
        yield Check("watchdog rule", None, "no refused request in the log")
        return
    rule = replay(refusals(run.log), Limits())
    text = f"stops the run at {rule.num_stopped} of {NUM_OFFSETS} offsets; at most {rule.most_in_a_row} checks in a row"
    if rule.stopped_after is not None:
        text += f"; after {rule.stopped_after[0]} to {rule.stopped_after[1]} s"
    # A run that finished must not have been stopped; of another one the rule may say either, but not both.
    fits = rule.num_stopped == 0 if run.finished else rule.num_stopped in (0, NUM_OFFSETS)
    yield Check("watchdog rule", fits, text)


def check_results(folder: Path) -> list[Check]:
    """Every `*.json` of a folder of benchmark results."""
    checks = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            checks.append(Check(path.name, False, f"is no JSON: {error}"))
            continue
        missing = [name for name in RESULT_FIELDS if not result.get(name)]
        found = list(_figures(result, ""))
        wrong = [f"{place}: {text}" for place, right, text in found if not right]
        if missing:
            wrong.insert(0, f"lacks {', '.join(missing)}")
        ok = None if not wrong and not found else not wrong
        checks.append(Check(path.name, ok, "; ".join(wrong[:4]) or f"{len(found)} figures follow"))
    return checks


def _figures(data: Any, place: str) -> Iterator[tuple[str, bool, str]]:
    """(place, whether it follows, text) of every figure that is made of others beside it."""
    if isinstance(data, list):
        for index, value in enumerate(data):
            yield from _figures(value, f"{place}[{index}]")
    if not isinstance(data, dict):
        return
    for name, value in data.items():
        yield from _figures(value, f"{place}.{name}" if place else name)
    for name, expected in _made_of(data):
        value = data[name]
        if isinstance(value, (int, float)) and math.isfinite(expected):
            right = math.isclose(value, expected, rel_tol=1e-4, abs_tol=_rounding(value))
            yield f"{place}.{name}" if place else name, right, f"{value}, but {expected:.6g} follows"


def wilson(num_right: int, num: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of a share at 95 percent (1927)."""
    share, spread = num_right / num, z * z / num
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / num + spread / num / 4) / (1 + spread)
    return middle - half, middle + half


def _rounding(value: float) -> float:
    """A figure may be stored with fewer digits than it was computed with: half of its last one."""
    decimals = repr(value).partition(".")[2]
    return 0.505 * 10.0 ** -len(decimals) if decimals.isdecimal() else 1e-9


def _made_of(data: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Figures of one record and what they follow as."""
    seconds, limit = data.get("seconds"), data.get("limit_seconds")
    if seconds and limit and "share_of_limit" in data:
        yield "share_of_limit", limit / seconds
    modes = data.get("modes")
    for name in data:
        first, over, second = name.partition("_over_")
        if over and isinstance(modes, dict) and {first, second} <= modes.keys():
            yield name, modes[first]["seconds"] / modes[second]["seconds"]
        kind, _, rest = name.partition("_")
        raw = data.get(rest)
        if kind in _FROM_LIST and _are_numbers(raw):
            yield name, float(_FROM_LIST[kind](raw))
        if _are_numbers(data.get(f"{name}s")):  # ratio, ratios; rewards are averaged
            yield name, (fmean if name == "reward" else median)(data[f"{name}s"])
        if kind == "num" and isinstance(raw, dict) and raw and all(isinstance(one, bool) for one in raw.values()):
            yield name, sum(raw.values())
    if all(isinstance(data.get(name), (int, float)) for name in ("planned", "measured", "error")):
        yield "error", data["planned"] / data["measured"] - 1
    cases = data.get("cases")
    if "largest_error" in data and isinstance(cases, dict):
        yield "largest_error", max(abs(case["error"]) for case in cases.values())
    rows = data.get("faults") or data.get("pairs")
    if isinstance(rows, list) and rows and isinstance(rows[0], dict):
        yield from _of_rows(data, rows)
    if _are_numbers(data.get("right")) and "answers" in data:
        yield from _of_answers(data, data["answers"], data["right"])
    if all(isinstance(data.get(name), (int, float)) for name in ("accuracy", "low", "high", "items")):
        num_right = round(data["accuracy"] * data["items"])
        yield "accuracy", num_right / data["items"]
        yield from zip(("low", "high"), wilson(num_right, data["items"]), strict=True)
    curve = data.get("held_out_curve")
    if isinstance(curve, list) and curve:
        yield from (
            (name, curve[at][1]) for name, at in (("held_out_before", 0), ("held_out_after", -1)) if name in data
        )
    if isinstance(data.get("reward_curve"), list) and "steps" in data:
        yield "steps", len(data["reward_curve"])
    settings = data.get("settings")
    if isinstance(settings, list) and settings and isinstance(settings[0], dict):
        yield from ((name, raw) for name, raw in settings[0].items() if name in data and isinstance(raw, (int, float)))


def _are_numbers(raw: Any) -> TypeGuard[list[float]]:
    return isinstance(raw, list) and bool(raw) and all(isinstance(one, (int, float)) for one in raw)


def _of_rows(data: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Of a table of rehearsed faults, or of pairs of a run and what it is measured against."""
    if "num_broken" in data:
        yield "num_broken", sum(bool(row["problem"]) for row in rows)
    if "ratio" in data and "limit" in rows[0]:
        yield "ratio", median(row["seconds"] / row["limit"] for row in rows)
        yield "seconds", median(row["seconds"] for row in rows)
        yield "limit_seconds", median(row["limit"] for row in rows)
    if "wasted_token_share" in data:
        yield "wasted_token_share", fmean(row["wasted"] for row in rows)


def _of_answers(data: dict[str, Any], num: int, right: list[int]) -> Iterator[tuple[str, float]]:
    """pass@k (arXiv 2107.03374) and the share of mixed groups of k, by how many of the `num` answers are right."""

    def all_of(kind: list[int], k: int) -> float:
        return fmean(math.comb(count, k) / math.comb(num, k) for count in kind)

    wrong = [num - count for count in right]
    for name in data:
        if match := re.fullmatch(r"(pass@|mixed_groups_of_)(\d+)", name):
            k = int(match[2])
            yield name, 1 - all_of(wrong, k) - (0 if match[1] == "pass@" else all_of(right, k))
