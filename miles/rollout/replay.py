"""`--load-debug-rollout-data`: train on rollouts that were stored, without an engine."""

from __future__ import annotations

from pathlib import Path

from miles.errors import ConfigError, StorageError
from miles.observe.samples import load_samples, write_samples
from miles.types import Sample

PLACE = "{rollout_id}"
TRAIN_SET = "train"


def data_file(template: str, rollout_id: int) -> Path:
    """The file of a rollout: the template with its number."""
    return Path(template.replace(PLACE, str(rollout_id)))


def save_rollout(template: str, rollout_id: int, groups: list[list[Sample]], *, reward_key: str | None) -> None:
    samples = {TRAIN_SET: [sample for group in groups for sample in group]}
    write_samples(data_file(template, rollout_id), samples, reward_key=reward_key)


class ReplayProducer:
    """Takes the place of `Producer`: the groups of a rollout come from its file."""

    def __init__(self, template: str) -> None:
        self._template = template
        self.counts: dict[str, float] = {}

    async def collect(self, rollout_id: int) -> list[list[Sample]]:
        path = data_file(self._template, rollout_id)
        if not path.exists():
            raise StorageError(
                f"--load-debug-rollout-data {path}: there is no such file; the samples/rollout_{PLACE}.parquet of any "
                "run folder will do, and --num-rollout says how many are wanted"
            )
        samples = load_samples(path).get(TRAIN_SET)
        if not samples:
            raise ConfigError(f"--load-debug-rollout-data {path}: these are no training samples")
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group_index, []).append(sample)
        return list(groups.values())
