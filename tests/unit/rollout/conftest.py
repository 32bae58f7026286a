from __future__ import annotations

from pathlib import Path

import pytest

from miles.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), generation_eos=2)
    return load_tokenizer(folder)
