"""Runs the other test_triton_*.py files in a process where Triton interprets its kernels.

Whether Triton compiles or interprets is settled when a kernel is defined, and any other test may have imported the
kernels before; so the interpreter gets a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()

# The interpreter of older versions fails with NumPy 2.4: it takes one-element arrays for numbers.
OLDEST_TRITON = (3, 8)


@pytest.mark.timeout(600)  # half a minute on a quiet machine
def test_kernels_agree_with_their_references_in_the_interpreter() -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        pytest.skip(f"the interpreter of Triton {triton.__version__} is too old")
    files = sorted(str(file) for file in HERE.parent.glob("test_triton_*.py") if file != HERE)
    assert len(files) == 7
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, cwd=HERE.parents[3], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout, result.stdout
