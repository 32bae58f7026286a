import json
import logging
import sys
import types
import urllib.request

import pytest

from miles.config.sections import TrackConfig
from miles.errors import ConfigError
from miles.observe import trackers
from miles.observe.metrics import MetricsWriter
from miles.observe.trackers import open_trackers, require_trackers

KEY = "0123456789abcdef0123456789abcdef01234567"


class FakeWandb:
    """The part of the client that is used; remembers what it was given, by run id."""

    class errors:  # noqa: N801 (as the client names it)
        class Error(Exception):
            pass

    def __init__(self):
        self.runs, self.inits, self.fail = {}, [], False

    def Settings(self, **values):  # noqa: N802
        return values

    def init(self, **values):
        self.inits.append(values)
        rows = self.runs.setdefault(values["id"], [])

        def log(numbers, *, step):
            if self.fail:
                raise self.errors.Error("no space on the server")
            rows.append((step, numbers))

        return types.SimpleNamespace(log=log, define_metric=lambda name, step_metric: None, finish=lambda: None)


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    return fake


def _open(run_dir, config, first_step=0):
    return open_trackers(config, run_dir, run_name="run", settings={"lr": 1e-6}, first_step=first_step)


def _run(run_dir, config, steps, *, first_step=0):
    """Write steps as a run does: the record on disk, then to the trackers."""
    writer = MetricsWriter(run_dir, first_step=first_step if first_step else None)
    opened = _open(run_dir, config, first_step)
    writer.listen(opened.log)
    for step in steps:
        if step % 2 == 0:
            writer.write(step, {"eval/held_out": step / 10}, kind="eval")
        writer.write(step, {"rollout/raw_reward": step / 10})
    opened.close()
    writer.close()
    return opened


def test_steps_rise_and_evaluations_come_before_their_step(tmp_path, wandb):
    _run(tmp_path, TrackConfig(use_wandb=True, wandb_project="lab"), range(4))
    (rows,) = wandb.runs.values()
    steps = [step for step, _ in rows]
    assert steps == sorted(steps) == [0, 0, 1, 2, 2, 3]
    assert rows[0][1] == {"eval/step": 0.0, "eval/held_out": 0.0}
    assert rows[1][1] == {"rollout/step": 0.0, "rollout/raw_reward": 0.0}
    assert wandb.inits[0]["project"] == "lab" and wandb.inits[0]["group"] is None


def test_resume_goes_on_with_the_same_run(tmp_path, wandb):
    """Five steps; the checkpoint is from after the third, so two are done again."""
    config = TrackConfig(use_wandb=True)
    _run(tmp_path, config, range(5))
    _run(tmp_path, config, range(3, 8), first_step=3)
    ((_, rows),) = wandb.runs.items()
    steps = [step for step, numbers in rows if "rollout/raw_reward" in numbers]
    assert steps == list(range(8))
    assert [init["resume"] for init in wandb.inits] == ["allow", "allow"]


def test_a_tracker_switched_on_later_is_given_what_it_lacks(tmp_path, wandb):
    _run(tmp_path, TrackConfig(), range(4))
    _run(tmp_path, TrackConfig(use_wandb=True), range(4, 6), first_step=4)
    (rows,) = wandb.runs.values()
    assert [step for step, numbers in rows if "rollout/raw_reward" in numbers] == list(range(6))


def test_a_failing_tracker_is_left_out_and_counted(tmp_path, wandb, caplog):
    wandb.fail = True
    with caplog.at_level(logging.WARNING):
        opened = _run(tmp_path, TrackConfig(use_wandb=True), range(3))
    assert opened.num_failed == 1
    assert len([record for record in caplog.records if "left out" in record.message]) == 1
    assert (tmp_path / "metrics.jsonl").read_text().count('"kind": "step"') == 3


def test_the_key_is_written_nowhere(tmp_path, wandb, caplog):
    with caplog.at_level(logging.DEBUG):
        _run(tmp_path, TrackConfig(use_wandb=True), range(2))
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY not in written and KEY not in caplog.text
    assert KEY not in json.dumps([init["config"] for init in wandb.inits])


def test_what_is_missing_is_said_before_a_model_loads(monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "_is_installed", lambda package: False)
    with pytest.raises(ConfigError) as raised:
        require_trackers(TrackConfig(use_wandb=True, use_tensorboard=True, use_prometheus=True))
    assert [line.split()[0] for line in raised.value.violations] == [
        "--use-wandb", "--use-tensorboard", "--use-prometheus",
    ]  # fmt: skip


def test_online_needs_a_key_and_offline_none(monkeypatch, tmp_path, wandb):
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        require_trackers(TrackConfig(use_wandb=True))
    require_trackers(TrackConfig(use_wandb=True, wandb_mode="offline"))
    require_trackers(TrackConfig(use_wandb=True, wandb_mode="disabled"))


def test_prometheus_offers_the_newest_numbers(tmp_path):
    pytest.importorskip("prometheus_client")
    writer = MetricsWriter(tmp_path, first_step=None)
    opened = _open(tmp_path, TrackConfig(use_prometheus=True, prometheus_port=0))
    writer.listen(opened.log)
    for step in range(3):
        writer.write(step, {"rollout/raw_reward": step / 4})
    (tracker,) = opened._trackers
    with urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics") as reply:
        text = reply.read().decode()
    opened.close()
    writer.close()
    assert 'miles_rollout_raw_reward{run="run"} 0.5' in text
    assert "mean of the rewards as graded (reward)" in text


def test_tensorboard_files_hold_each_step_once(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "tb"
    monkeypatch.setenv("TENSORBOARD_DIR", str(folder))
    config = TrackConfig(use_tensorboard=True)
    _run(tmp_path, config, range(5))
    _run(tmp_path, config, range(3, 7), first_step=3)
    events = accumulator.EventAccumulator(str(folder)).Reload()
    scalars = events.Scalars("rollout/raw_reward")
    assert [scalar.step for scalar in scalars] == list(range(7))
    assert scalars[6].value == pytest.approx(0.6)


def test_no_tracker_writes_nothing(tmp_path):
    _run(tmp_path, TrackConfig(), range(2))
    assert not (tmp_path / "trackers.json").exists()
