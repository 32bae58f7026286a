from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.errors
import psutil
import pytest

from miles.config.sections import DataConfig
from miles.data import rows as rows_module
from miles.data.prompts import load_prompts
from miles.data.rows import read_rows
from miles.data.source import PromptSource
from miles.data.store import DiskSamples
from miles.errors import DataError, StorageError
from miles.text.tokenizer import Tokenizer
from miles.types import Sample


def test_a_file_larger_than_memory_gives_the_same_prompts_from_disk(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"input": f"{n} + 2", "a": {"n": n}, "metadata": {"n": n}} for n in range(3000)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(prompt_data=f"{file}@[-2500:-1]", label_key="a")

    def load() -> PromptSource:
        loaded = load_prompts(data, tokenizer, max_context_len=100)
        assert isinstance(loaded.prompts, DiskSamples) == (psutil.virtual_memory().available < 10**6)
        return PromptSource(loaded.prompts, n_samples_per_prompt=2, seed=3, shuffle=True)

    in_memory = load()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    on_disk = load()
    assert on_disk.state_dict() == in_memory.state_dict() and len(on_disk) == 2499
    assert on_disk.next(2600) == in_memory.next(2600)


def test_disk_samples_are_a_sequence() -> None:
    samples = DiskSamples()
    for n in range(4):
        samples.append(Sample(prompt=f"p{n}", tokens=[n], label=n))
    assert [s.tokens for s in samples] == [[0], [1], [2], [3]]
    assert samples[-1].tokens == [3] and [s.tokens for s in samples[1:3]] == [[1], [2]]
    with pytest.raises(IndexError):
        samples[4]


def test_a_full_disk_is_said_in_a_sentence() -> None:
    samples = DiskSamples()
    samples._file = open("/dev/full", "wb")  # noqa: SIM115 - a device without room
    with pytest.raises(StorageError, match="No space left on device; make room, or name another folder in TMPDIR"):
        samples.append(Sample(prompt="p", tokens=[1]))


def test_a_file_on_the_hub_is_fetched_and_sliced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").write_text('{"input": "a"}\n{"input": "b"}\n')
    asked = []

    def download(repository: str, file: str, **given: object) -> str:
        asked.append((repository, file, given["repo_type"]))
        return str(tmp_path / "train.jsonl")

    monkeypatch.setattr(rows_module, "hf_hub_download", download)
    _, rows = read_rows("hf://datasets/openai/gsm8k/main/train.jsonl@[1:]", flag="--prompt-data")
    assert rows == [(2, {"input": "b"})]
    assert asked == [("openai/gsm8k", "main/train.jsonl", "dataset")]


def test_what_the_hub_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(rows_module, "hf_hub_download", download)
    with pytest.raises(DataError, match=r"--prompt-data hf://datasets/a/b/c.jsonl: the hub .* \(offline\)"):
        read_rows("hf://datasets/a/b/c.jsonl", flag="--prompt-data")
    with pytest.raises(DataError, match="give --prompt-data hf://datasets/OWNER/NAME/FILE"):
        read_rows("hf://datasets/a/b", flag="--prompt-data")
