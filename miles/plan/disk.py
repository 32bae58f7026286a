"""Bytes that a run takes on disk: the checkpoints that are there at one time, the samples of every rollout, and the
weights that are exported."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.resolve import samples_per_rollout
from miles.plan.memory import MASTER_BYTES, Job

SPARE_BYTES = 64 << 20  # tokenizer, state and log of a checkpoint, and what a file system rounds up
SAMPLE_TOKEN_BYTES = 12  # of a token in samples/*.parquet: id, log-prob, mask and its share of the text, compressed


@dataclass(frozen=True, slots=True)
class Disk:
    """`num_checkpoints` stay and `num_at_once` are there while one is written. `export_bytes` are there at the end with
    `--save-hf`, which may lie elsewhere, and during an evaluation by a `CheckpointEvalFn`; which `--eval-function-path`
    is one is known when it is loaded, so they count for each."""

    checkpoint_bytes: int
    num_checkpoints: int
    num_at_once: int
    sample_bytes: int
    export_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.num_at_once * self.checkpoint_bytes + self.sample_bytes + self.export_bytes

    def problem(self, free_bytes: int) -> str:
        """What is wrong with so much room, and what helps; empty when it is enough."""
        if free_bytes < self.checkpoint_bytes:
            return "not one fits; free space or give another --save"
        return "it will be full; --save-keep-last N keeps fewer" if free_bytes < self.needed_bytes else ""


def disk_of(job: Job, *, num_rollout: int) -> Disk:
    config, folder = job.config, job.config.run_dir
    saved = kept = 1 if folder.save_interval is None else -(-num_rollout // folder.save_interval)
    if folder.save_keep_last or folder.save_keep_best:
        kept = min(saved, (folder.save_keep_last or 1) + (folder.save_keep_best or 0))
    at_once = kept + (kept < saved) + config.process.use_fault_tolerance  # to repair, one more is kept
    tokens = num_rollout * samples_per_rollout(config) * job.sample_len
    evaluates = None not in (config.hooks.eval_function_path, config.eval.eval_interval)
    exported = 0
    if evaluates or folder.save_hf is not None:
        # with LoRA the adapters, for an evaluation with the model that they are merged with
        whole = evaluates or not config.lora.is_on
        exported = MASTER_BYTES * job.num_adapted + whole * job.itemsize * job.spec.num_parameters + SPARE_BYTES
    return Disk(job.checkpoint_bytes + SPARE_BYTES, kept, at_once, tokens * SAMPLE_TOKEN_BYTES, exported)
