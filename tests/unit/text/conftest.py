from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.text.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), generation_eos=[0, 2])
