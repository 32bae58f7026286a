"""What follows the records of a run besides `metrics.jsonl`: trackers, and alarms for unhealthy numbers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from miles.config.flags import flatten
from miles.config.sections import RunConfig, TrackConfig
from miles.observe.log import get_logger
from miles.observe.metrics import MetricsWriter
from miles.observe.trackers import open_trackers, require_trackers
from miles.report.ranges import RangeAlarm, load_ranges

logger = get_logger(__name__)


def check_tracking(config: TrackConfig) -> None:
    """Raise a `ConfigError` for a missing package, key or file of ranges."""
    require_trackers(config)
    if config.ranges is not None:
        load_ranges(Path(config.ranges))


def follow(metrics: MetricsWriter, config: RunConfig, run_dir: Path, *, first_step: int, stack: ExitStack) -> None:
    """Let trackers and alarms hear of every record from now on; what trackers missed before is given to them."""
    trackers = open_trackers(
        config.track,
        run_dir,
        run_name=config.run_dir.run_name or run_dir.name,
        settings=flatten(config),
        first_step=first_step,
    )
    stack.callback(trackers.close)
    metrics.listen(trackers.log)
    if config.track.ranges is not None:
        alarm = RangeAlarm(load_ranges(Path(config.track.ranges)))
        metrics.listen(functools.partial(_raise_alarms, metrics, alarm))


def _raise_alarms(
    metrics: MetricsWriter, alarm: RangeAlarm, step: int, numbers: Mapping[str, float], kind: str
) -> None:
    """Log what leaves its range, and record it as an event."""
    if kind == "step":
        for text in alarm.check(step, numbers):
            logger.warning(f"outside the healthy range at step {step}: {text}")
            metrics.event("alarm", step=step, text=text)
