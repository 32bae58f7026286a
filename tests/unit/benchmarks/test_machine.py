"""The record that every benchmark ends with."""

import json
from pathlib import Path

import pytest
import torch

import benchmarks.machine
from benchmarks.machine import record


@pytest.mark.parametrize(("on_cpu", "hardware"), [(False, "nvidia-h200"), (True, "two-cores")])
def test_a_result_is_of_the_hardware_that_computed_it(monkeypatch, tmp_path, capsys, on_cpu, hardware):
    found = {"hardware": {"cpu": "Two Cores"}, "versions": {}, "commit": "abc", "command": "python x"}
    monkeypatch.setattr(benchmarks.machine, "describe_environment", lambda **_: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    record({"name": "some", "seconds": 1.0}, write=tmp_path / "new", on_cpu=on_cpu)
    (file,) = (tmp_path / "new").iterdir()
    stored = json.loads(file.read_text())
    assert file.name == f"some_{hardware}_{stored['date']}.json"
    assert json.loads(capsys.readouterr().out) == stored
    assert stored["hardware"] == ("Two Cores" if on_cpu else "NVIDIA H200")


def test_no_benchmark_makes_a_record_of_its_own():
    scripts = Path(benchmarks.machine.__file__).parent.glob("*.py")
    own = [path.name for path in scripts if "describe_environment" in path.read_text()]
    assert own == ["machine.py"]
