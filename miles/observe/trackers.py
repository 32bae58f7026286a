"""Mirrors the numbers of a run to Weights & Biases, TensorBoard and Prometheus.

`metrics.jsonl` is the truth. There is one writer, and steps only rise. `trackers.json` in the run folder keeps the W&B
run and the last record that each tracker has, so a resumed run goes on as the same run, and a tracker that is switched
on later, or that missed something, is given what it lacks. Keys come from the environment only and are never written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import netrc
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from miles.config.sections import TrackConfig
from miles.errors import ConfigError
from miles.observe import names
from miles.observe.atomic import write_atomically
from miles.observe.log import get_logger
from miles.observe.metrics import read_records

logger = get_logger(__name__)

STATE_FILE = "trackers.json"
LOOPBACK = "127.0.0.1"
WANDB_HOST = "api.wandb.ai"
STEP_AXES = {"train/*": "rollout/step", "rollout/*": "rollout/step", "perf/*": "rollout/step", "eval/*": "eval/step"}


class Tracker(Protocol):
    """One place that numbers go to. `redoes` says whether a step that is done again replaces the older one; `failures`
    are the errors that may come from outside."""

    name: str
    redoes: bool
    failures: tuple[type[Exception], ...]

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All trackers of a run. Give `log` every record after it is on disk."""

    def __init__(self, run_dir: Path, trackers: list[Tracker], state: dict[str, Any]) -> None:
        self._path = run_dir / STATE_FILE
        self._trackers = trackers
        self._state = state
        self.num_failed = 0

    def catch_up(self, metrics_file: Path, *, first_step: int) -> None:
        """Log what `metrics.jsonl` has and a tracker has not. `first_step` is the step that the run begins with."""
        for tracker in self._trackers:
            if tracker.redoes:
                self._state[tracker.name] = min(self._state.get(tracker.name, -1), 2 * first_step - 1)
        for record in read_records(metrics_file):
            numbers = {name: value for name, value in record.items() if "/" in name}
            self.log(record["step"], numbers, record["kind"])

    def log(self, step: int, metrics: Mapping[str, float], kind: str) -> None:
        """A tracker that fails is left out from then on: it must not end the run that it watches."""
        # The evaluation after n steps comes before step n, so records count 2 n and 2 n + 1.
        place = 2 * step + (kind == "step")
        axis = "eval/step" if kind == "eval" else "rollout/step"
        for tracker in list(self._trackers):
            if place <= self._state.get(tracker.name, -1):
                continue
            try:
                tracker.log(step, {axis: float(step), **metrics})
            except tracker.failures as error:
                self._leave_out(tracker, error)
                continue
            self._state[tracker.name] = place
        if self._trackers:
            _write_state(self._path, self._state)

    def _leave_out(self, tracker: Tracker, error: Exception) -> None:
        self.num_failed += 1
        self._trackers.remove(tracker)
        logger.warning(f"{tracker.name} failed and is left out from here on; metrics.jsonl has every number: {error}")

    def close(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.close()
            except tracker.failures as error:
                self.num_failed += 1
                logger.warning(f"{tracker.name} could not be closed: {error}")


def require_trackers(config: TrackConfig) -> None:
    """Raise a `ConfigError` for what is missing: a package, or a key. Quick: comes before a model loads."""
    problems = []
    for wanted, flag, package, extra in (
        (config.use_wandb, "--use-wandb", "wandb", "wandb"),
        (config.use_tensorboard, "--use-tensorboard", "tensorboard", "tensorboard"),
        (config.use_prometheus, "--use-prometheus", "prometheus_client", "serve"),
    ):
        if wanted and not _is_installed(package):
            problems.append(f"{flag} needs `pip install miles[{extra}]`")
    if not problems and config.use_wandb and config.wandb_mode == "online" and not _has_wandb_key():
        problems.append(
            "--use-wandb finds no key: set WANDB_API_KEY in the environment (not on the command line), or use "
            "--wandb-mode offline"
        )
    if problems:
        raise ConfigError(*problems)


def open_trackers(
    config: TrackConfig, run_dir: Path, *, run_name: str, settings: Mapping[str, Any], first_step: int
) -> Trackers:
    """The trackers that are switched on, brought up to date with `metrics.jsonl`."""
    require_trackers(config)
    state = _read_state(run_dir / STATE_FILE)
    opened: list[Tracker] = []
    if config.use_wandb and config.wandb_mode != "disabled":
        opened.append(_Wandb(config, run_dir, run_name=run_name, settings=settings, state=state))
    if config.use_tensorboard:
        opened.append(_TensorBoard(run_dir, first_step=first_step))
    if config.use_prometheus:
        opened.append(_Prometheus(config.prometheus_port, run_name=run_name))
    trackers = Trackers(run_dir, opened, state)
    if opened:
        _write_state(run_dir / STATE_FILE, state)
        trackers.catch_up(run_dir / "metrics.jsonl", first_step=first_step)
    return trackers


class _Wandb:
    """A run that was redone from a checkpoint keeps the points it has: W&B takes no older step."""

    name = "wandb"
    redoes = False

    def __init__(
        self, config: TrackConfig, run_dir: Path, *, run_name: str, settings: Mapping[str, Any], state: dict[str, Any]
    ) -> None:
        import wandb  # takes a second, and only a run that wants it pays

        self.failures: tuple[type[Exception], ...] = (OSError, wandb.errors.Error)
        mode: Any = config.wandb_mode
        state.setdefault("wandb_run_id", secrets.token_hex(4))
        folder = Path(config.wandb_dir) if config.wandb_dir else run_dir
        folder.mkdir(parents=True, exist_ok=True)
        if config.wandb_mode == "offline":
            logger.info("W&B offline mode enabled. Data will be saved locally.")
        try:
            self._run = wandb.init(
                project=config.wandb_project or "miles",
                group=config.wandb_group,
                name=run_name,
                id=state["wandb_run_id"],
                resume="allow",
                mode=mode,
                dir=str(folder),
                config=dict(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"W&B refused the run: {error}; --wandb-mode offline works without it") from error
        for pattern, axis in STEP_AXES.items():
            self._run.define_metric(pattern, step_metric=axis)
        logger.info(f"W&B run {state['wandb_run_id']} in {folder}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    """Scalars in the folder `TENSORBOARD_DIR`, else `tensorboard/` of the run. A step that is redone replaces the older
    one."""

    name = "tensorboard"
    redoes = True

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, run_dir: Path, *, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder = Path(os.environ.get("TENSORBOARD_DIR") or run_dir / "tensorboard")
        logger.info(f"Saving tensorboard log to {folder}")
        self._writer = EventFileWriter(str(folder))
        if first_step > 0:
            # Tells TensorBoard to forget this and later steps of the files before.
            started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=first_step, session_log=started))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Prometheus:
    """The newest numbers as gauges on a port of this machine, for a Prometheus server to collect."""

    name = "prometheus"
    redoes = True

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, port: int, *, run_name: str) -> None:
        import prometheus_client

        self._make_gauge = prometheus_client.Gauge
        self._run_name = run_name
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, addr=LOOPBACK, registry=self._registry
            )
        except OSError as error:
            raise ConfigError(f"--prometheus-port {port}: cannot listen there: {error.strerror}") from error
        logger.info(f"Prometheus collects from http://{LOOPBACK}:{self._server.server_port}/metrics")

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                metric = names.describe(name)
                safe = "miles_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
                gauge = self._make_gauge(safe, f"{metric.meaning} ({metric.unit})", ["run"], registry=self._registry)
                self._gauges[name] = gauge
            gauge.labels(run=self._run_name).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _is_installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(WANDB_HOST) is not None
    return False


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no run before, or a file that was damaged: trackers begin anew
        return {}
    return state if isinstance(state, dict) else {}


def _write_state(path: Path, state: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a full disk is reported by the files that matter
        write_atomically(path, json.dumps(state) + "\n")
