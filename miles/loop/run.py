"""The loop. Read this first: what one step is, and what is due after it.

A rollout engine writes answers, a reward scores them, a trainer updates the weights, the engine gets them back, again.
`stages.py` holds the stages, `build.py` makes the objects they work on, `schedule.py` says what is due.
"""

from __future__ import annotations

import contextlib

from miles.config.sections import RunConfig
from miles.loop import stages
from miles.loop.build import build
from miles.loop.run_folder import RunFolder
from miles.loop.worker import WorkerContext


def train(config: RunConfig, folder: RunFolder, context: WorkerContext) -> None:
    """Run from the last checkpoint, or from the start, to the last rollout or until a stop is requested."""
    with build(config, folder, context) as run:
        run_to_end(run)


def run_to_end(run: stages.Run) -> None:
    try:
        stages.evaluate_if_due(run)
        while run.num_done < run.schedule.num_rollout:
            step(run)
    except stages.Stopped:
        stages.save_for_good(run)
    else:
        stages.finish(run)


def evaluate(config: RunConfig, folder: RunFolder, context: WorkerContext) -> None:
    """Evaluate the weights once, and train nothing."""
    with build(config, folder, context) as run:
        run.evaluated_at = None  # of the run that saved the checkpoint
        with contextlib.suppress(stages.Stopped):
            stages.evaluate_if_due(run)


def step(run: stages.Run) -> None:
    """One rollout, the optimizer steps on it, and what is due after them."""
    with run.profiler.step(run.num_done):
        groups = stages.generate(run)
        result = None
        if not run.config.debug.debug_rollout_only:
            result = stages.train(run, groups)
            stages.publish(run)
    stages.report(run, groups, result)
    stages.finish_step(run)
    stages.evaluate_if_due(run)
    stages.save_if_due(run)
    stages.stop_if_requested(run)
