"""Small run folders for tests, written with the writers that runs use."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from miles.config.dump import dump_config
from miles.config.flags import with_values
from miles.config.sections import RunConfig
from miles.observe.samples import write_samples
from miles.types import Sample, SampleStatus

START = datetime(2026, 10, 17, 12, 0, tzinfo=UTC)
STEP_S, ROLLOUT_S = 10.0, 4.0


def make_run(
    path: Path,
    rewards: Sequence[float],
    *,
    samples: Callable[[int], list[Sample]] | None = None,
    evals: dict[int, float] | None = None,
    extra: Callable[[int], dict[str, float]] = lambda step: {},
    finish: bool = True,
    **settings: object,
) -> Path:
    """A run folder whose step k ends 10 (k + 1) seconds after START and whose rollouts last 4 seconds."""
    path.mkdir(parents=True)
    values = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "run_name": path.name, "runs_dir": str(path.parent)}
    (path / "config.yaml").write_text(dump_config(with_values(RunConfig(), values | settings)))
    environment = {"command": "miles train", "versions": {"python": "3.11"}, "hardware": {"cpu": "CPU", "num_cpus": 2}}
    (path / "environment.json").write_text(json.dumps(environment))
    records = [
        {"kind": "eval", "step": step, "time": _time(step), "eval/held_out": score}
        for step, score in (evals or {}).items()
    ]
    for step, reward in enumerate(rewards):
        metrics = {
            "rollout/raw_reward": reward,
            "rollout/response_lengths": 20.0,
            "rollout/truncated": 0.1,
            "rollout/zero_std/count_0": 1.0,
            "rollout/no_signal_group_ratio": 0.25,
            "train/train_rollout_logprob_abs_diff": 0.015,
            "train/ppo_kl": 0.0,
            "train/pg_clipfrac": 0.0,
            "train/grad_norm": 0.5,
            "perf/rollout_time": ROLLOUT_S,
            "perf/actor_train_time": 5.0,
            "perf/train_time": 6.0,
            "perf/step_time": STEP_S,
        } | extra(step)
        records.append({"kind": "step", "step": step, "time": _time(step + 1), **metrics})
        if samples is not None:
            write_samples(path / "samples" / f"rollout_{step}.parquet", {"train": samples(step)})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    events = [{"schema": 1, "time": _time(0), "kind": "start", "step": 0}]
    if finish:
        events.append({"schema": 1, "time": _time(len(rewards)), "kind": "finish", "step": len(rewards)})
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def _time(step: int) -> str:
    return (START + timedelta(seconds=STEP_S * step)).isoformat()


def sample(group: int, index: int, *, prompt: str, response: str, reward: float, log_prob: float = -0.5) -> Sample:
    tokens = [1, 2, 3]
    return Sample(
        group_index=group,
        index=index,
        prompt=prompt,
        tokens=[9, *tokens],
        response=response,
        response_length=len(tokens),
        label="42",
        reward=reward,
        loss_mask=[1, 1, 0],
        rollout_log_probs=[log_prob] * 3,
        weight_versions=[0] * 3,
        status=SampleStatus.COMPLETED,
    )
