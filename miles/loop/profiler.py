"""`--profile-steps a:b`: a trace of each of these steps, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from miles.observe.log import get_logger

logger = get_logger(__name__)


class StepProfiler:
    """Writes `trace_step_<n>.json.gz` into the run folder for the steps that were asked for."""

    def __init__(self, steps: str | None, folder: Path) -> None:
        first, _, last = (steps or "0:0").partition(":")
        self._steps = range(int(first), int(last))
        self._folder = folder

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block when its step was asked for."""
        if number not in self._steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            yield
        path = self._folder / f"trace_step_{number}.json.gz"
        profiler.export_chrome_trace(str(path))
        logger.info(f"wrote the trace of step {number} to {path}; open it at ui.perfetto.dev")
