"""Settings and fixtures of the whole suite. Threads are limited before torch can be imported: the suite must run well
on two cores."""

from __future__ import annotations

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest

# A shell starts its background jobs with Ctrl+C ignored, and children inherit that; the tests send it to them.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile("miles", max_examples=25, deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("miles")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REPOSITORY / "tests" / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # only here, so that tests without it start at once

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def cases_dir() -> Path:
    """Cases of right answers; `MILES_CASES_DIR` names a folder with other cases of the same form."""
    return Path(os.environ.get("MILES_CASES_DIR", REPOSITORY / "tests" / "cases"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder that holds `gsm8k/`; tests that need it are skipped where it is missing."""
    folder = Path(os.environ.get("MILES_DATA_DIR", REPOSITORY.parent / "shared" / "data"))
    if not (folder / "gsm8k" / "test.jsonl").is_file():
        pytest.skip(f"GSM8K is not in {folder}; set MILES_DATA_DIR")
    return folder


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Hugging Face folder of SmolLM2-135M-Instruct, made by `miles models get smollm2-135m-instruct`."""
    folder = Path(os.environ.get("MILES_SMOLLM2_DIR", REPOSITORY / "models" / "smollm2-135m-instruct"))
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"no SmolLM2 in {folder}; run `miles models get smollm2-135m-instruct` or set MILES_SMOLLM2_DIR")
    return folder
