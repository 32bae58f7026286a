from datetime import datetime

import pytest

from miles.cli.main import main
from miles.config.flags import with_values
from miles.config.resolve import resolve
from miles.config.sections import RunConfig
from miles.loop import rehearse
from miles.loop.rehearsal import FAULTS
from miles.loop.rehearse import NUM_ROLLOUT, PROMISES, STEP, small_config

CURVE = [{"step": 0, "train/loss": 0.5}]
GOOD = {"code": 0, "says": "", "repairs": 0, "again": 0, "curve": CURVE, "counted": 1.0}


class FakeScenario:
    """A run whose end is given."""

    def __init__(self, config, scratch, name):
        self.end = ENDS.get(name, GOOD)
        self.starts = 0

    def run(self, fault=None):
        self.starts += 1
        return (self.end["code"], self.end["says"]) if self.starts == 1 else (self.end["again"], "last line")

    def events(self):
        time = datetime.fromtimestamp(1000.0).astimezone().isoformat()
        return [{"kind": "repair", "time": time}] * self.end["repairs"]

    def curve(self):
        return self.end["curve"]

    def metric(self, name):
        return self.end["counted"]

    def seconds_to(self, event_time, ended_at):
        return 1.5

    def steps_lost(self):
        return 1


ENDS = {}


@pytest.fixture
def rehearsed(monkeypatch, tmp_path):
    monkeypatch.setattr(rehearse, "_Scenario", FakeScenario)
    ENDS.clear()

    def run(fault, **end):
        ENDS[fault.replace(" ", "-")] = GOOD | end
        (outcome,) = rehearse.rehearse(RunConfig(), tmp_path, [fault], lambda outcome: None)
        return outcome

    return run


def test_every_fault_has_a_promise():
    assert list(FAULTS) == list(PROMISES)
    assert 0 < STEP < NUM_ROLLOUT - 1


def test_kept_promises(rehearsed):
    killed = rehearsed("worker killed", says="it was killed by SIGKILL", repairs=1)
    assert (killed.problem, killed.outcome, killed.detect_s, killed.steps_lost) == ("", "started again", 1.5, 1)
    assert rehearsed("sigterm", code=143, says="stopped by SIGTERM").problem == ""
    assert rehearsed("slow reward").detect_s is None
    assert rehearsed("poisoned sample", curve=[]).problem == ""
    assert rehearsed("lost file", code=2, says="x is missing", repairs=1, again=2, curve=[]).problem == ""


@pytest.mark.parametrize(
    ("fault", "end", "problem"),
    [
        ("slow reward", {"code": 1}, "exit code 1, promised 0"),
        ("sigterm", {"code": 143}, "nobody said 'stopped by SIGTERM'"),
        ("worker killed", {"says": "was killed by SIGKILL"}, "0 restarts, promised 1"),
        ("clock jump", {"curve": []}, "the loss curve is another one"),
        ("paused container", {"repairs": 1}, "1 restarts, promised 0"),
        ("poisoned sample", {"counted": 0.0}, "rollout/num_unscored is 0"),
        ("disk full", {"code": 1, "says": "bytes and 0 are free", "again": 1}, "the same command again ends with 1"),
    ],
)
def test_broken_promises(rehearsed, fault, end, problem):
    assert problem in rehearsed(fault, **end).problem


def test_a_run_that_fails_without_a_fault_is_no_rehearsal(rehearsed):
    ENDS["whole"] = GOOD | {"code": 1, "says": "no data"}
    with pytest.raises(AssertionError, match="no data"):
        rehearsed("sigterm")


def test_small_shapes(tmp_path):
    config, _ = resolve(with_values(RunConfig(), {"run_name": "a", "num_steps_per_rollout": 4, "lr": 1e-3}))
    small = small_config(config, tmp_path)
    assert (small.rollout.rollout_batch_size, small.rollout.n_samples_per_prompt) == (2, 4)
    assert small.batch.global_batch_size == 8 and small.batch.num_steps_per_rollout is None
    assert small.process.use_fault_tolerance and small.optim.lr == 1e-3


def test_unknown_faults_are_refused(capsys):
    assert main(["rehearse", "--faults", "earthquake"]) == 2
    assert "worker hung" in capsys.readouterr().err
