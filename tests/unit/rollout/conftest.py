from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), generation_eos=2)
    return load_tokenizer(folder)


@pytest.fixture
def only_sandbox() -> Iterator[None]:
    """No test of another process runs programs at the same time: what they leave behind is looked for by name."""
    with open(Path(tempfile.gettempdir()) / f"miles-tests-sandbox-{os.getuid()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        fcntl.flock(file, fcntl.LOCK_UN)
