"""When things are due. A count of finished rollouts decides; the first and the last are always included."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.resolve import samples_per_rollout
from miles.config.sections import RunConfig


@dataclass(frozen=True)
class Schedule:
    """`num_rollout` rollouts in all, of `steps_per_rollout` optimizer steps each."""

    num_rollout: int
    steps_per_rollout: int
    eval_interval: int | None
    save_interval: int | None
    restart_save_interval: int | None = None

    @property
    def num_steps(self) -> int:
        return self.num_rollout * self.steps_per_rollout

    def eval_due(self, num_done: int) -> bool:
        return self._due(self.eval_interval, num_done)

    def save_due(self, num_done: int) -> bool:
        return num_done == self.num_rollout or self._due(self.save_interval, num_done)

    def restart_save_due(self, num_done: int) -> bool:
        """Whether a checkpoint is due that only a repair needs."""
        return self._due(self.restart_save_interval, num_done)

    def _due(self, interval: int | None, num_done: int) -> bool:
        return interval is not None and (num_done % interval == 0 or num_done == self.num_rollout)


def plan_schedule(config: RunConfig, *, num_prompts: int) -> Schedule:
    """The schedule of a run over `num_prompts` prompts; `--num-epoch` becomes a number of rollouts here."""
    num_rollout = config.data.num_rollout
    if num_rollout is None:
        assert config.data.num_epoch is not None, "rules.py demands --num-rollout or --num-epoch"
        num_rollout = max(1, num_prompts * config.data.num_epoch // config.rollout.rollout_batch_size)
    assert config.batch.global_batch_size is not None, "resolve.py sets it"
    return Schedule(
        num_rollout=num_rollout,
        steps_per_rollout=samples_per_rollout(config) // config.batch.global_batch_size,
        eval_interval=config.eval.eval_interval,
        save_interval=config.run_dir.save_interval,
        restart_save_interval=config.process.restart_save_interval if config.process.use_fault_tolerance else None,
    )
