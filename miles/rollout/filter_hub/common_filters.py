"""Filters for `--dynamic-sampling-filter-path`: `f(args, group)` gives a `FilterOutput`, or something true to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles.rollout.reward_value import raw_accuracy
from miles.types import Sample, SampleStatus


@dataclass(frozen=True, slots=True)
class FilterOutput:
    """`reason` names the metric that counts dropped groups: `rollout/dynamic_filter/drop_<reason>`."""

    keep: bool
    reason: str | None = None


def apply_reward_nonzero_std_filter(args: Any, group: list[Sample]) -> FilterOutput:
    """Keep a group whose answers differ in accuracy (DAPO, arXiv:2503.14476).

    The reward before any shaping decides: a length penalty makes a group of wrong answers differ, and teaches nothing
    but length.
    """
    values = [raw_accuracy(sample, args.reward_key) for sample in group]
    if all(value == values[0] for value in values):
        return FilterOutput(False, f"zero_std_{round(float(values[0]), 1)}")
    return FilterOutput(True)


def check_no_aborted(args: Any, group: list[Sample]) -> FilterOutput:
    """Keep a group without an answer that was cut off."""
    aborted = any(sample.status is SampleStatus.ABORTED for sample in group)
    return FilterOutput(not aborted, "group_has_aborted" if aborted else None)
