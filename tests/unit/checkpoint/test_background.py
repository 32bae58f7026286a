import json
import threading

import psutil
import pytest
import torch

from miles.checkpoint import background
from miles.checkpoint.background import Saver
from miles.checkpoint.keep import Keep
from miles.checkpoint.load import load_checkpoint
from miles.errors import StorageError


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    return folder


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def gate(monkeypatch):
    """A save begins to write once this is set."""
    gate, write = threading.Event(), background.save_checkpoint

    def waits(*arguments, **keywords):
        assert gate.wait(10)
        return write(*arguments, **keywords)

    monkeypatch.setattr(background, "save_checkpoint", waits)
    return gate


def tensors(value):
    return {"model": {"w": torch.full((4,), value)}, "optimizer": {"m": torch.full((4,), value)}}


def saver_of(root, source, **changes):
    return Saver(root, **{"model_source": source, "keep": Keep(), "background": True, **changes})


def test_training_goes_on_while_the_state_of_the_call_is_written(root, source, gate):
    saver, live = saver_of(root, source), tensors(1.0)
    saver.save(1, tensors=live, state={"n": 1})
    live["model"]["w"].fill_(2.0)
    assert saver.finished() == []
    gate.set()
    assert [saved.iteration for saved in saver.wait()] == [1]
    assert saver.wait() == []
    assert load_checkpoint(root).tensors["model"]["w"].tolist() == [1.0] * 4


def test_saves_follow_each_other_and_prune(root, source):
    saver = saver_of(root, source, keep=Keep(last=1))
    for iteration in (1, 2, 3):
        saver.save(iteration, tensors=tensors(float(iteration)), state={})
    saved = saver.wait()
    assert [one.iteration for one in saved] == [1, 2, 3]
    assert [one.removed for one in saved] == [[], [1], [2]]
    assert load_checkpoint(root).iteration == 3


def test_a_failed_save_is_raised_in_the_run(root, source, monkeypatch):
    def full(*arguments, **keywords):
        raise StorageError("no space")

    monkeypatch.setattr(background, "save_checkpoint", full)
    saver = saver_of(root, source)
    saver.save(1, tensors=tensors(1.0), state={})
    with pytest.raises(StorageError, match="no space"):
        saver.wait()
    saver.save(2, tensors=tensors(1.0), state={})
    with pytest.raises(StorageError, match="no space"):
        saver.save(3, tensors=tensors(1.0), state={})


def test_closing_lets_the_save_end_and_logs_its_error(root, source, gate, monkeypatch, caplog):
    saver = saver_of(root, source)
    saver.save(1, tensors=tensors(1.0), state={})
    gate.set()
    saver.close()
    assert load_checkpoint(root).iteration == 1
    monkeypatch.setattr(background, "prune", lambda *_: 1 / 0)
    saver.save(2, tensors=tensors(1.0), state={})
    saver.close()
    assert "division by zero" in caplog.text


def test_without_room_for_a_copy_it_saves_at_once(root, source, monkeypatch, caplog):
    memory = psutil.virtual_memory()._replace(available=10)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    saver = saver_of(root, source)
    saver.save(1, tensors=tensors(1.0), state={})
    assert load_checkpoint(root).iteration == 1
    assert [saved.iteration for saved in saver.finished()] == [1]
    assert "saving before going on" in caplog.text
