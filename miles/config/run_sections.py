"""The flags of the run folder, the checkpoints, the processes and the machines."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.fields import ABOVE_ZERO, AT_LEAST_ONE, NOT_NEGATIVE, SATISFIED, Bounds, flag

PORT = Bounds("from 0 to 65535", low=0, high=65535)


@dataclass(frozen=True)
class RunDirConfig:
    """Run folder and checkpoints"""

    runs_dir: str = flag("runs", "folder that holds the run folders", resume=True)
    run_name: str | None = flag(
        None, "name of the run folder; default: made from model, data and settings", resume=True
    )
    save: str | None = flag(None, "checkpoint folder; default: checkpoints/ in the run folder", resume=True)
    save_interval: int | None = flag(
        None,
        "rollouts between checkpoints; the last one is always saved",
        unit="rollouts",
        bounds=AT_LEAST_ONE,
        resume=True,
    )
    async_save: bool = flag(False, "write checkpoints while training goes on, from a copy in memory", resume=True)
    save_keep_last: int | None = flag(
        None,
        "keep this many of the latest checkpoints; default: all",
        unit="checkpoints",
        bounds=AT_LEAST_ONE,
        resume=True,
    )
    save_keep_best: int | None = flag(
        None,
        "keep this many of those with the best evaluation (mean of the sets), besides the latest",
        unit="checkpoints",
        bounds=AT_LEAST_ONE,
        resume=True,
    )
    save_trigger_sentinel: str | None = flag(
        None,
        "a checkpoint is saved after the step in which this file appears; default: save_now in the run folder "
        "(SIGUSR2 to `miles train` does the same)",
        resume=True,
    )
    load: str | None = flag(None, "folder of checkpoints to resume from; default: the one of --save", resume=True)
    save_hf: str | None = flag(None, "also export the final weights as a Hugging Face folder", resume=True)


@dataclass(frozen=True)
class TrackConfig:
    """Trackers and alarms (metrics.jsonl is always written)"""

    use_wandb: bool = flag(False, "mirror the numbers to Weights & Biases; key: WANDB_API_KEY", resume=True)
    wandb_mode: str = flag(
        "online", "offline keeps the data in a local folder", choices=("online", "offline", "disabled"), resume=True
    )
    wandb_project: str | None = flag(None, "project of the W&B run; default: miles", resume=True)
    wandb_group: str | None = flag(None, "group of the W&B run; none is needed", resume=True)
    wandb_dir: str | None = flag(None, "folder for the W&B files; default: the run folder", resume=True)
    use_tensorboard: bool = flag(
        False, "mirror the numbers to TensorBoard, in TENSORBOARD_DIR or tensorboard/ of the run folder", resume=True
    )
    use_prometheus: bool = flag(False, "offer the newest numbers to Prometheus, on this machine only", resume=True)
    prometheus_port: int = flag(9090, "port of --use-prometheus", bounds=PORT, resume=True)
    ranges: str | None = flag(
        None, "healthy ranges, written by `miles compare --ranges`: leaving them is an alarm", resume=True
    )


@dataclass(frozen=True)
class ProcessConfig:
    """Processes"""

    in_process: bool = flag(False, "run the worker in this process, for debugging and notebooks", resume=True)
    use_fault_tolerance: bool = flag(
        False, "start a worker again that died or hangs, from the last completed step", resume=True
    )
    max_restarts: int = flag(
        3, "restarts without a newly finished step in between", unit="restarts", bounds=AT_LEAST_ONE, resume=True
    )
    restart_backoff: float = flag(
        1.0,
        "wait before the first restart; each further one in a row waits twice as long",
        unit="s",
        bounds=NOT_NEGATIVE,
        resume=True,
    )
    restart_save_interval: int = flag(
        1,
        "with --use-fault-tolerance: rollouts between the checkpoints to restart from; only the latest is kept",
        unit="rollouts",
        bounds=AT_LEAST_ONE,
        resume=True,
    )
    heat_guard: bool = flag(
        False, "wait between decode steps and micro-batches while the GPU is hot (pauses.jsonl)", resume=True
    )
    heat_pause: float = flag(84.0, "temperature at which --heat-guard pauses", unit="C", bounds=ABOVE_ZERO, resume=True)
    heat_resume: float = flag(
        74.0,
        "temperature at which it goes on, after 45 s at least; after 120 s it goes on in any case",
        unit="C",
        bounds=ABOVE_ZERO,
        resume=True,
    )
    heartbeat_timeout: float = flag(
        5.0, "a worker that is silent for longer counts as hung", unit="s", bounds=ABOVE_ZERO, resume=True
    )
    profile_steps: str | None = flag(
        None, "steps A:B (B not included) whose trace for Perfetto is written to the run folder", resume=True
    )
    phase_deadlines: dict[str, float] = flag(
        {}, 'longest time of a phase in seconds, as JSON: {"rollout": 600}', unit="s", bounds=ABOVE_ZERO, resume=True
    )
    progress: str = flag(
        "auto",
        "progress display; auto: a live one on a terminal, else plain lines",
        choices=("auto", "live", "plain", "off"),
        resume=True,
    )


@dataclass(frozen=True)
class DebugConfig:
    """Half a run, and samples that are stored and trained on again"""

    save_debug_rollout_data: str | None = flag(
        None, "also store the samples of each rollout in this parquet file, named with {rollout_id}", resume=True
    )
    load_debug_rollout_data: str | None = flag(
        None, "train on these stored samples, without an engine; samples/rollout_{rollout_id}.parquet of a run will do"
    )
    debug_train_only: bool = flag(False, "no engine: train on --load-debug-rollout-data, which sets this")
    debug_rollout_only: bool = flag(False, "write and score answers, and train nothing")
    save_debug_event_data: str | None = flag(
        None, "public name of a folder for events; events.jsonl in the run folder has them", effect=SATISFIED
    )


@dataclass(frozen=True)
class PublicLayoutConfig:
    """Layout flags of public Miles, satisfied by one device with one copy of the weights"""

    colocate: bool = flag(True, "engine and trainer share the device", effect=SATISFIED)
    actor_num_nodes: int = flag(1, "machines of the trainer", choices=(1,), effect=SATISFIED)
    actor_num_gpus_per_node: int = flag(1, "GPUs of the trainer on a machine", choices=(1,), effect=SATISFIED)
    num_gpus_per_node: int = flag(1, "GPUs of a machine", choices=(1,), effect=SATISFIED)
    rollout_num_gpus: int = flag(1, "GPUs of the engines", choices=(1,), effect=SATISFIED)
    rollout_num_gpus_per_engine: int = flag(1, "GPUs of one engine", choices=(1,), effect=SATISFIED)
    update_weights_interval: int = flag(1, "rollouts between weight updates", choices=(1,), effect=SATISFIED)
    check_weight_update_equal: bool = flag(
        True, "engine and trainer have equal weights: they read the same tensors", effect=SATISFIED
    )
    balance_data: bool = flag(True, "micro-batches are balanced by tokens", effect=SATISFIED)
    update_weight_buffer_size: int = flag(
        2**29, "bucket of a weight update; nothing is copied here", unit="bytes", effect=SATISFIED, bounds=AT_LEAST_ONE
    )
