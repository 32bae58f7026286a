from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.memory_options import interval
from tests.e2e.harness import MODEL, REPOSITORY, ROWS


def test_interval_of_one_more_value() -> None:
    """Mean 5, standard deviation 1, t 3.182 for three degrees of freedom, sqrt(1 + 1 / 4)."""
    shift = 1.5**0.5 / 1.5  # makes the sample standard deviation 1
    low, high = interval([5 - 1.5 * shift, 5 - 0.5 * shift, 5 + 0.5 * shift, 5 + 1.5 * shift])
    deviation = shift * (2 * (1.5**2 + 0.5**2) / 3) ** 0.5
    assert (low + high) / 2 == pytest.approx(5.0)
    assert (high - low) / 2 == pytest.approx(3.182 * deviation * 1.25**0.5)


@pytest.mark.slow
def test_options_are_run_and_judged(tmp_path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    line = [
        *(sys.executable, "benchmarks/memory_options.py", str(MODEL), str(data), str(data), "--device", "cpu"),
        *("--steps", "2", "--seeds", "2", "--options", "recompute", "adam_bfloat16", "--at-once", "2"),
    ]
    done = subprocess.run(
        line, cwd=REPOSITORY, env={"PYTHONPATH": ".", "PATH": "/usr/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["runs"]["recompute"]["same_as_seed_0"]
    assert set(found["runs"]) == {"seed_0", "seed_1", "recompute", "adam_bfloat16"}
    assert found["runs"]["adam_bfloat16"]["inside"].keys() == {"reward", "accuracy"}
