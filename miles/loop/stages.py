"""The stages of the loop, each a few lines over the objects of `build.py`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from miles.checkpoint.background import Saved, Saver
from miles.checkpoint.convert import convert_checkpoint
from miles.checkpoint.hf import export_hf
from miles.checkpoint.keep import NOTE, Note
from miles.checkpoint.load import LoadedCheckpoint
from miles.checkpoint.peft import export_adapter
from miles.config.resolve import identity, identity_diff
from miles.config.sections import RunConfig
from miles.data.buffer import GroupBuffer
from miles.engine.local import LocalEngine
from miles.errors import CheckpointError, EngineError, PluginError, RewardError, TrainError
from miles.evals.run import EvalResult
from miles.loop.numbers import Hardware, of_rollout, rollout_perf, trainer_perf
from miles.loop.placement import Placement, peak_memory_gb
from miles.loop.profiler import StepProfiler
from miles.loop.run_folder import RunFolder
from miles.loop.schedule import Schedule
from miles.loop.worker import WorkerContext
from miles.observe.gate import GATE
from miles.observe.log import get_logger, log_record
from miles.observe.metrics import MetricsWriter
from miles.observe.samples import write_samples
from miles.observe.timers import Timers
from miles.plan.memory import released_tags
from miles.rollout.generate_hub.multi_turn import tool_numbers
from miles.rollout.hooks import RolloutHooks
from miles.rollout.metrics import rollout_metrics
from miles.rollout.producer import Producer
from miles.rollout.replace import RolloutFunction
from miles.rollout.replay import ReplayProducer, save_rollout
from miles.rollout.rewards import RewardRunner
from miles.rollout.sft import SftProducer
from miles.rollout.to_train import to_train_samples
from miles.types import Sample, Trainer, TrainResult

logger = get_logger(__name__)


RolloutProducer = Producer | SftProducer | ReplayProducer | RolloutFunction


class Stopped(Exception):
    """A stop was requested; whatever was being written is dropped."""


@dataclass
class Run:
    """Everything a run consists of, and how far it has come. Made by `build.py`."""

    config: RunConfig
    folder: RunFolder
    context: WorkerContext
    model_folder: Path
    start_folder: Path  # of the weights of a fresh start
    placement: Placement
    hardware: Hardware
    schedule: Schedule
    source: GroupBuffer
    rewards: RewardRunner | None  # None for supervised training without evaluation
    producer: RolloutProducer
    engine: LocalEngine | None  # None when nothing is generated
    evaluate: Callable[[int, str | None], Coroutine[Any, Any, EvalResult]] | None  # None without evaluation sets
    hooks: RolloutHooks
    trainer: Trainer
    timers: Timers
    runner: asyncio.Runner
    metrics: MetricsWriter
    saver: Saver
    profiler: StepProfiler
    num_done: int = 0  # finished rollouts
    version: int = 0  # of the weights
    evaluated_at: int | None = None  # num_done of the last evaluation
    score: float | None = None  # mean over the sets of the last evaluation
    saved_at: int | None = None  # num_done of the last checkpoint
    num_engine_steps: int = 0  # when the last rollout was reported
    source_state: dict[str, Any] = field(default_factory=dict)  # data position after the last finished rollout
    waiting: asyncio.Task[Any] | None = None

    def take_save_request(self) -> bool:
        """Whether a checkpoint was asked for by file or signal since the last call."""
        named = self.config.run_dir.save_trigger_sentinel
        found = [path for path in (self.folder.save_request, named and Path(named)) if path and path.exists()]
        for path in found:
            path.unlink(missing_ok=True)
        return bool(found)

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end. Raises `Stopped` when a stop is requested before or meanwhile."""

        async def watched() -> Any:
            self.waiting = asyncio.ensure_future(coroutine)
            self.interrupt_if_stopping()
            try:
                return await self.waiting
            finally:
                self.waiting = None

        try:
            return self.runner.run(watched())
        except asyncio.CancelledError:
            raise Stopped from None

    def complete(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end, also when a stop is requested: for what belongs to a step whose weights have
        changed. A stop that dropped it would save new weights under the number of the old ones."""
        return self.runner.run(coroutine)

    def interrupt_if_stopping(self) -> None:
        """Cancel what is waited for when a stop is requested. Safe in a signal handler."""
        if self.waiting is not None and self.context.stop_requested():
            self.runner.get_loop().call_soon_threadsafe(self.waiting.cancel)


def restore(run: Run, loaded: LoadedCheckpoint | None) -> None:
    """Go on from a checkpoint when there is one."""
    if loaded is None:
        logger.info(f"no checkpoint in {run.folder.load}: starting fresh")
    else:
        state = loaded.state
        if loaded.path.parent == run.folder.save:
            _check_identity(loaded, run.config)
        run.trainer.load(loaded.tensors, state["trainer"])
        run.source.load_state_dict(state["source"])
        run.num_done, run.version, run.evaluated_at = state["num_done"], state["version"], state["evaluated_at"]
        run.saved_at = run.num_done
        logger.info(f"Loaded model from {loaded.path}")
        logger.info(f"Loaded optimizer from {loaded.path}: the next step is {run.num_done}")
        if run.engine is not None:
            run.engine.set_version(run.version)
    run.source_state = run.source.state_dict()
    run.metrics.event("start" if loaded is None else "resume", step=run.num_done)


def _check_identity(loaded: LoadedCheckpoint, config: RunConfig) -> None:
    """The folder of `--save` can be shared by mistake. One run goes on from another's checkpoint by `--load` only."""
    differences = identity_diff(loaded.state["identity"], identity(config))
    if differences:
        raise CheckpointError(
            f"{loaded.path} was saved by a run with other settings ({'; '.join(differences)}): go back to them to "
            "resume it, or give another --save; --load goes on from it with new settings"
        )


def evaluate_if_due(run: Run) -> None:
    """Evaluate on the engine of the run, unless this count of rollouts has been evaluated already."""
    if run.evaluate is None or not run.schedule.eval_due(run.num_done) or run.evaluated_at == run.num_done:
        return
    if run.num_done == 0 and run.config.eval.skip_eval_before_train:
        return
    with run.timers.span("eval"), _folder_to_evaluate(run) as hf_dir:
        outcome: EvalResult = _wait(run, run.evaluate(run.num_done, hf_dir))
    if not run.complete(run.hooks.eval_logged(run.num_done, {**outcome.samples}, {**outcome.metrics})):
        log_record("eval", run.num_done, outcome.metrics, logger=logger)
    scores = "  ".join(f"{name} {outcome.metrics[f'eval/{name}']:.3f}" for name in outcome.samples)
    logger.info(f"evaluation after {run.num_done} rollouts: {scores or 'skipped by the hook'}")
    run.metrics.write(run.num_done, outcome.metrics, kind="eval")
    samples = run.folder.path / "samples" / f"eval_{run.num_done}.parquet"
    write_samples(samples, outcome.samples, reward_key=run.config.reward.reward_key)
    run.evaluated_at = run.num_done
    run.score = fmean(outcome.metrics[f"eval/{name}"] for name in outcome.samples) if outcome.samples else None
    if run.engine is not None:
        # Keys and values of shared prompts would be reused: equal to the last bits only, so an evaluation, or a resume
        # without it, would change training.
        run.engine.set_version(run.version)


@contextmanager
def _folder_to_evaluate(run: Run) -> Iterator[str | None]:
    """The current weights as a Hugging Face folder, merged with LoRA, for as long as a hook that wants one reads it."""
    if run.hooks.evaluation is None or not run.hooks.evaluation.reads_folder:
        yield None
        return
    folder = run.folder.path / "eval_hf"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    try:
        weights, dtype = folder / "weights", str(run.placement.dtype).removeprefix("torch.")
        with run.timers.span("export_hf"):
            _export(run, weights)
            if run.config.lora.is_on:
                adapter, weights = weights, folder / "merged"
                convert_checkpoint(adapter, weights, origin=run.start_folder, dtype=dtype)
        yield str(weights.absolute())
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # with what the hook has put there


def generate(run: Run) -> list[list[Sample]]:
    """Write and score the answers of a rollout."""
    run.context.heartbeat.set_step(run.num_done, num_steps=run.schedule.num_rollout)
    with run.timers.span("rollout"):
        groups: list[list[Sample]] = _wait(run, run.producer.collect(run.num_done))
    if (template := run.config.debug.save_debug_rollout_data) is not None:
        save_rollout(template, run.num_done, groups, reward_key=run.config.reward.reward_key)
    return groups


def _wait(run: Run, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Wait for what the rollout, an evaluation or a hook makes of answers."""
    with _saving_what_is_done(run):
        return run.wait(coroutine)


@contextmanager
def _saving_what_is_done(run: Run) -> Iterator[None]:
    """When this fails, the finished steps are saved first, unless a weight has changed since."""
    before = run.trainer.num_updates
    try:
        yield
    except (EngineError, PluginError, RewardError, TrainError) as error:
        if run.num_done > 0 and run.trainer.num_updates == before:
            logger.warning(f"{error}; the finished rollouts are saved before the run ends")  # a save can fail too
            save_for_good(run)
        raise


def train(run: Run, groups: list[list[Sample]]) -> TrainResult:
    """Make the optimizer steps of a rollout."""
    samples = to_train_samples(groups, reward_key=run.config.reward.reward_key)
    samples = _wait(run, run.hooks.to_train([sample for group in groups for sample in group], samples))
    tags = released_tags(run.config.engine)
    if run.engine is not None and tags:
        with run.timers.span("finalize_and_resume_engines"):
            run.engine.release_memory(tags)
    offloads = run.config.memory.offload_train
    if offloads:
        with run.timers.span("wake_up"):
            run.trainer.onload()
    with run.timers.span("train"), _saving_what_is_done(run):
        result = run.trainer.train(samples, rollout_id=run.num_done, weight_version=run.version)
    if offloads:
        with run.timers.span("sleep"):
            run.trainer.offload()
    return result


def publish(run: Run) -> None:
    """Let the engine know that the weights it reads have changed."""
    with run.timers.span("update_weights"):
        run.version += 1
        if run.engine is not None:
            run.engine.set_version(run.version)
    tags = released_tags(run.config.engine)
    if run.engine is not None and tags:
        with run.timers.span("finalize_and_resume_engines"):
            run.engine.resume_memory(tags)


def report(run: Run, groups: list[list[Sample]], result: TrainResult | None) -> None:
    """Log the records of a finished rollout, write its numbers and its samples. Without a result nothing was
    trained."""
    step, reward_key = run.num_done, run.config.reward.reward_key
    if run.config.process.heat_guard:
        run.timers.add("paused", GATE.take_seconds())
    seconds = run.timers.take() | (result.seconds if result is not None else {})
    written = {
        **rollout_metrics(groups, reward_key=reward_key),
        **run.producer.counts,
        **tool_numbers([sample for group in groups for sample in group]),
        **(run.rewards.take_counts() if run.rewards is not None else {}),
        **rollout_perf(
            groups, seconds=seconds["rollout"], num_engine_steps=_new_engine_steps(run), hardware=run.hardware
        ),
        "perf/peak_memory_gb": peak_memory_gb(run.placement.device),
    }
    flat = [sample for group in groups for sample in group]
    if not run.complete(run.hooks.logged(step, flat, dict(written), seconds["rollout"])):
        log_record("perf", step, written, logger=logger)
    metrics = written
    if result is not None:
        trained = trainer_perf(groups, result, seconds=seconds, hardware=run.hardware)
        trained["perf/offloaded_gb"] = run.trainer.offloaded_bytes / 2**30
        log_record("rollout", step, result.rollout, logger=logger)
        for record in result.steps:
            log_record("step", int(record["train/step"]), record, logger=logger)
        log_record("perf", step, trained, logger=logger)
        metrics = {**written, **result.rollout, **of_rollout(result.steps), **trained}
    run.metrics.write(step, metrics)
    run.context.heartbeat.report_step(step, metrics, num_steps=run.schedule.num_rollout)
    write_samples(run.folder.path / "samples" / f"rollout_{step}.parquet", {"train": flat}, reward_key=reward_key)


def _new_engine_steps(run: Run) -> int:
    """Steps of the engine since the last report; none without an engine."""
    before, run.num_engine_steps = run.num_engine_steps, run.engine.stats()["steps"] if run.engine is not None else 0
    return run.num_engine_steps - before


def finish_step(run: Run) -> None:
    """Count the rollout as done: from here on a checkpoint holds it."""
    run.num_done += 1
    run.source_state = run.source.state_dict()


def save_if_due(run: Run) -> None:
    """Save when it is due or asked for, and say what has been saved meanwhile."""
    if run.take_save_request() or run.schedule.save_due(run.num_done):
        save(run)
    elif run.schedule.restart_save_due(run.num_done):
        save(run, temporary=True)
    note_saved(run, run.saver.finished())


def save(run: Run, *, temporary: bool = False) -> None:
    """Save what is done, unless it is saved already. Nothing is done before the first rollout."""
    if run.num_done == 0 or run.saved_at == run.num_done:
        return
    with run.timers.span("save_model"):
        tensors, trainer_state = run.trainer.save()
        score = run.score if run.evaluated_at == run.num_done else None
        state = {
            "trainer": trainer_state,
            "source": run.source_state,
            "num_done": run.num_done,
            "version": run.version,
            "evaluated_at": run.evaluated_at,
            "identity": identity(run.config),
            NOTE: Note(temporary=temporary, score=score).as_json(),
        }
        run.saver.save(run.num_done, tensors=tensors, state=state)
    run.saved_at = run.num_done


def save_for_good(run: Run) -> None:
    """The last save: on disk when this returns."""
    save(run)
    note_saved(run, run.saver.wait())


def note_saved(run: Run, saved: list[Saved]) -> None:
    """Say what was saved to stay; what a repair needs comes and goes with every step."""
    for checkpoint in (one for one in saved if not one.is_temporary):
        run.metrics.event("checkpoint", step=checkpoint.iteration, path=str(checkpoint.path))
        gone = f", removed those of {', '.join(map(str, checkpoint.removed))}" if checkpoint.removed else ""
        logger.info(f"saved {checkpoint.path}{gone}")


def stop_if_requested(run: Run) -> None:
    if run.context.stop_requested():
        raise Stopped


def finish(run: Run) -> None:
    """Wait for the last save, export the final weights when asked to, and say that the run is complete."""
    with run.timers.span("save_model"):
        note_saved(run, run.saver.wait())
    if run.config.run_dir.save_hf is not None:
        target = Path(run.config.run_dir.save_hf)
        with run.timers.span("export_hf"):
            _export(run, target)
        logger.info(f"exported {target}")
    run.metrics.event("finish", step=run.num_done)
    logger.info(f"finished {run.num_done} of {run.schedule.num_rollout} rollouts")


def _export(run: Run, target: Path) -> None:
    """Write the current weights as a Hugging Face folder; with LoRA the adapter alone."""
    tensors, _ = run.trainer.save()
    if run.config.lora.is_on:
        export_adapter(target, source=run.start_folder, tensors=tensors["adapter"], lora=run.config.lora)
    else:
        export_hf(target, source=run.model_folder, tensors=tensors["model"], dtype=run.placement.dtype)
