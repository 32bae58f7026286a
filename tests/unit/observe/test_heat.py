import json
import threading
import time

import pytest

from miles.config.sections import ProcessConfig
from miles.errors import ConfigError
from miles.observe import gate as gate_module
from miles.observe import heat
from miles.observe.gate import GATE, Gate
from miles.observe.heartbeat import Heartbeat
from miles.observe.heat import HeatGuard, HeatLimits, NvmlSensor, SensorError, guarding, record_to


class FakeSensor:
    """Reads a list from front to back; its last value stays. None: the sensor fails."""

    def __init__(self, *values):
        self.values = list(values)

    def celsius(self):
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        if value is None:
            raise SensorError("no answer")
        return value


def follow(values, *, seconds=200):
    """Poll every 5 s; returns what was done, with the second."""
    done, records, clock = [], [], [0.0]
    guard = HeatGuard(
        FakeSensor(*values),
        HeatLimits(),
        pause=lambda: done.append(("pause", clock[0])),
        resume=lambda: done.append(("resume", clock[0])),
        record=records.append,
    )
    for clock[0] in range(0, seconds, 5):
        guard.poll(clock[0])
    return done, records, guard


def test_a_cool_gpu_is_left_alone():
    assert follow([83.9])[0] == []


def test_it_resumes_when_cool_but_not_before_45_s():
    done, records, _ = follow([60, 84, 70])
    assert done == [("pause", 5), ("resume", 50)]
    assert [(entry["kind"], entry["celsius"], entry.get("seconds")) for entry in records] == [
        ("pause", 84, None), ("resume", 70, 45.0),
    ]  # fmt: skip


def test_75_is_not_cool_enough_and_74_is():
    values = [84, *[75] * 12, 74]
    assert follow(values, seconds=100)[0] == [("pause", 0), ("resume", 65)]


def test_after_120_s_it_resumes_at_any_temperature_and_may_pause_again():
    assert follow([90])[0] == [("pause", 0), ("resume", 120), ("pause", 125)]


def test_a_sensor_that_fails_never_pauses_and_never_keeps_a_pause(caplog):
    assert follow([None])[0] == []
    assert caplog.text.count("cannot be read") == 1, "said once"
    assert follow([85, None])[0] == [("pause", 0), ("resume", 120)]


def test_closing_resumes():
    done, records, guard = follow([84], seconds=10)
    guard.close(7.0)
    guard.close(8.0)
    assert [what for what, _ in done] == ["pause", "resume"]
    assert records[-1]["seconds"] == 7.0


def test_without_nvml_or_gpu_the_flag_is_an_error():
    with pytest.raises(ConfigError, match="--heat-guard"):
        NvmlSensor()


def test_the_gate_holds_and_counts():
    clock = [10.0]
    gate = Gate(clock=lambda: clock[0])
    gate.wait()
    gate.shut()
    passed = threading.Event()
    threading.Thread(target=lambda: (gate.wait(), passed.set()), daemon=True).start()
    assert not passed.wait(0.05)
    clock[0] = 25.0
    gate.open()
    assert passed.wait(5)
    assert (gate.take_seconds(), gate.take_seconds()) == (15.0, 0.0)


def test_a_gate_that_nobody_opens_opens_by_itself(monkeypatch):
    monkeypatch.setattr(gate_module, "LONGEST_WAIT_S", 0.1)
    gate = Gate()
    gate.shut()
    gate.wait()
    assert gate.is_open


def test_a_stop_goes_through_a_shut_gate():
    gate = Gate()
    gate.shut()
    gate.ignore()
    gate.wait()
    gate.begin()
    assert gate.is_open
    gate.shut()
    threading.Timer(0.05, gate.open).start()
    gate.wait()
    assert gate.is_open, "the next run in this process heeds it again"


def test_in_process_it_shuts_the_gate_and_always_opens_it(tmp_path, monkeypatch):
    monkeypatch.setattr(heat, "POLL_S", 0.01)
    messages = []
    heartbeat = Heartbeat(messages.append)
    with guarding(FakeSensor(90.0), ProcessConfig(heat_guard=True), tmp_path, heartbeat):
        end = time.monotonic() + 10
        while GATE.is_open and time.monotonic() < end:
            time.sleep(0.01)
        assert not GATE.is_open
    assert GATE.is_open
    assert [message["paused"] for message in messages] == [True, False]
    entries = [json.loads(line) for line in (tmp_path / "pauses.jsonl").read_text().splitlines()]
    assert [entry["kind"] for entry in entries] == ["pause", "resume"]
    assert GATE.take_seconds() > 0
    with guarding(None, ProcessConfig(), tmp_path, heartbeat):
        assert GATE.is_open


def test_a_full_disk_does_not_stop_the_guard(tmp_path, caplog):
    record_to(tmp_path / "missing" / "pauses.jsonl")({"time": "t", "kind": "pause", "celsius": 85.0})
    assert "cannot be written down" in caplog.text
