import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from miles.checkpoint import save as save_module
from miles.checkpoint.load import load_checkpoint, weights_folder
from miles.checkpoint.save import save_checkpoint, saving_to
from miles.errors import CheckpointError, StorageError

NUM_KILLS = 20


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


def tensors_of(iteration: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(iteration)
    weight = torch.randn(64, 32, generator=generator)
    return {
        "model": {"model.norm.weight": weight[0].clone(), "lm_head.weight": weight},
        "optimizer": {"lm_head.weight.exp_avg": weight * 2, "step": torch.tensor(iteration)},
    }


def save(root, iteration, source, **state):
    content = {"iteration": iteration, "rng": (1, 2), "lr": 2.5e-9, **state}
    return save_checkpoint(root, iteration, tensors=tensors_of(iteration), state=content, model_source=source)


def assert_is(loaded, iteration):
    assert loaded.iteration == loaded.state["iteration"] == iteration
    expected = tensors_of(iteration)
    assert loaded.tensors.keys() == expected.keys()
    for stem, content in expected.items():
        assert loaded.tensors[stem].keys() == content.keys()
        for name, tensor in content.items():
            assert loaded.tensors[stem][name].dtype == tensor.dtype
            assert torch.equal(loaded.tensors[stem][name], tensor)


def test_what_was_saved_is_loaded_bit_for_bit(root, source):
    path = save(root, 12, source)
    assert path == root / "iter_0000012"
    loaded = load_checkpoint(root)
    assert_is(loaded, 12)
    assert loaded.state["lr"] == 2.5e-9 and loaded.state["rng"] == [1, 2]
    assert sorted(item.name for item in root.iterdir()) == ["iter_0000012", "latest_checkpointed_iteration.txt"]
    assert json.loads((path / "model" / "config.json").read_text())["dtype"] == "float32"


def test_nothing_there_is_none(root):
    assert load_checkpoint(root) is None
    root.mkdir()
    assert load_checkpoint(root) is None


def test_the_tracker_decides_and_newer_folders_are_named(root, source, caplog):
    for iteration in (1, 2, 3):
        save(root, iteration, source)
    (root / "latest_checkpointed_iteration.txt").write_text("2\n")
    assert_is(load_checkpoint(root), 2)
    assert "iter_0000003: skipped" in caplog.text


def test_leftovers_are_named_at_load_and_removed_by_the_next_save(root, source, caplog):
    save(root, 1, source)
    leftover = root / ".tmp-iter_0000002-999"
    leftover.mkdir()
    (leftover / "optimizer.safetensors").write_bytes(b"half")
    assert_is(load_checkpoint(root), 1)
    assert ".tmp-iter_0000002-999: skipped" in caplog.text
    save(root, 2, source)
    assert not leftover.exists()


def test_a_first_save_that_was_cut_off_before_the_tracker(root, source, caplog):
    save(root, 5, source)
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert_is(load_checkpoint(root), 5)
    assert "taking the newest" in caplog.text


def test_a_checkpoint_that_is_gone_is_an_error(root, source):
    save(root, 1, source)
    shutil.rmtree(save(root, 2, source))
    with pytest.raises(CheckpointError, match=r"says 2, but .*iter_0000002 does not exist; .*resume from it: 1"):
        load_checkpoint(root)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "model/model.safetensors", "model/config.json"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_file_is_an_error_not_a_fresh_start(root, source, name, cut):
    path = save(root, 1, source) / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content[: len(content) // 2] if cut else content)
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(root)


def test_saving_the_same_iteration_again(root, source):
    first = save(root, 3, source).stat().st_ino
    assert save(root, 3, source).stat().st_ino == first, "the same content is left alone"
    assert save(root, 3, source, more=1).stat().st_ino != first
    assert load_checkpoint(root).state["more"] == 1
    (root / "iter_0000003" / "optimizer.safetensors").write_bytes(b"damaged")
    save(root, 3, source, more=1)
    assert_is(load_checkpoint(root), 3)
    assert len(list(root.iterdir())) == 2


def test_kill_9_at_any_point_of_a_replacement(root, source, caplog):
    """The same iteration saved with other content: the old or the new one is there at any moment."""
    save(root, 1, source)
    save(root, 3, source)
    template = root.with_name("template")
    shutil.copytree(root, template)
    num_events = run_and_kill_at(root, source, event=None, iterations=(3,), more=1)
    assert load_checkpoint(root).state["more"] == 1
    found, window_seen = set(), False
    for event in range(num_events - 16, num_events + 1):  # the replacement itself comes last
        shutil.rmtree(root)
        shutil.copytree(template, root)
        run_and_kill_at(root, source, event=event, iterations=(3,), more=1)
        between = not (root / "iter_0000003").exists()
        caplog.clear()
        loaded = load_checkpoint(root)
        assert_is(loaded, 3)
        assert ("iter_0000003: its replacement was cut off" in caplog.text) == between
        window_seen |= between
        found.add(loaded.state.get("more"))
    assert found == {None, 1} and window_seen


def test_a_replaced_checkpoint_is_put_back_by_the_next_save_too(root, source):
    path = save(root, 3, source)
    path.rename(root / ".tmp-replaced-iter_0000003-99")
    save(root, 4, source)
    assert sorted(item.name for item in root.glob("*iter*")) == [
        "iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_weights_of_a_run_folder_a_root_a_checkpoint_or_a_model(tmp_path, source):
    root = tmp_path / "run" / "checkpoints"
    save(root, 1, source)
    path = save(root, 2, source)
    for named in (tmp_path / "run", root, path, path / "model"):
        assert weights_folder(named) == path / "model"
    assert weights_folder(root / "iter_0000001") == root / "iter_0000001" / "model"
    (path / "model" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        weights_folder(root)


def test_space_is_checked_before_anything_is_written(root, source, monkeypatch):
    save(root, 1, source)
    usage = shutil.disk_usage(root)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match=r"needs [\d,]+ bytes and 100,000 are free; .*iteration 1 is intact"):
        save(root, 2, source)
    assert sorted(item.name for item in root.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("function", ["save_file", "export_hf", "_sync_tree"])
def test_a_disk_that_fills_up_while_saving(root, source, monkeypatch, function):
    save(root, 1, source)

    def full(*arguments, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(save_module, function, full)
    with pytest.raises(StorageError, match=r"No space left on device; .*iteration 1 is intact.*--save"):
        save(root, 2, source)
    monkeypatch.undo()
    assert sorted(item.name for item in root.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert_is(load_checkpoint(root), 1)


def test_a_full_file_system(tmp_path, source, monkeypatch):
    """The same with a real one of 6 MB, where the tensors alone do not fit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small file system here; it takes root on Linux")
    try:
        save(disk / "checkpoints", 1, source)
        monkeypatch.setattr(save_module, "_check_space", lambda *arguments: None)
        large = {"model": {"w": torch.zeros(1)}, "optimizer": {"m": torch.zeros(2_000_000)}}
        with pytest.raises(StorageError, match=r"No space left on device.*iteration 1 is intact"):
            save_checkpoint(disk / "checkpoints", 2, tensors=large, state={}, model_source=source)
        assert_is(load_checkpoint(disk / "checkpoints"), 1)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def run_and_kill_at(root, source, *, event: int | None, iterations=(2, 3), **state) -> int:
    """Save 2 and then 3, or other iterations, in a child that is killed at its `event`-th file operation. Returns how
    many it began."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def on_event(name, arguments):
            nonlocal count
            if name == "open" or name.startswith(("os.", "shutil.")):
                count += 1
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(on_event)
        for iteration in iterations:
            save(root, iteration, source, **state)
        os.write(write_fd, str(count).encode())
        os._exit(0)
    os.close(write_fd)
    with open(read_fd, "rb") as reader:
        counted = reader.read()
    assert os.waitpid(child, 0)[1] == (signal.SIGKILL if event is not None else 0)
    return int(counted or b"0")


def test_field_note_26_kill_9_at_any_point_of_a_save(root, source, caplog):
    save(root, 1, source)
    template = root.with_name("template")
    shutil.copytree(root, template)
    num_events = run_and_kill_at(root, source, event=None)
    resumed = []
    for event in sorted(random.Random(26).sample(range(1, num_events + 1), NUM_KILLS)):
        shutil.rmtree(root)
        shutil.copytree(template, root)
        caplog.clear()
        run_and_kill_at(root, source, event=event)
        skipped = [path.name for path in root.glob(".tmp-*")]
        loaded = load_checkpoint(root)
        assert_is(loaded, loaded.iteration)
        assert all(f"{name}: skipped" in caplog.text for name in skipped)
        resumed.append(loaded.iteration)
        save(root, 4, source)
        assert_is(load_checkpoint(root), 4)
    assert resumed == sorted(resumed)
    assert set(resumed) >= {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_kill_9_at_a_random_moment(root, source, caplog, seed):
    """By time, not by file operation: a loop of saves in another process, some of them replacements."""
    save(root, 1, source)
    child = os.fork()
    if child == 0:
        for count in itertools.count():
            for iteration in (2, 3):
                save(root, iteration, source, count=count)
    time.sleep(0.05 + random.Random(seed).random() * 0.3)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    skipped = [path.name for path in root.glob(".tmp-iter*")]
    loaded = load_checkpoint(root)
    assert_is(loaded, loaded.iteration)
    assert all(f"{name}: skipped" in caplog.text for name in skipped)
    save(root, 4, source)
    assert_is(load_checkpoint(root), 4)
    assert not list(root.glob(".tmp-*"))


def test_two_runs_cannot_save_to_one_folder(tmp_path):
    folder = tmp_path / "checkpoints"
    with saving_to(folder), pytest.raises(StorageError, match="another run is saving here"), saving_to(folder):
        pass
    with saving_to(folder):
        pass


def test_a_folder_that_cannot_hold_checkpoints_is_found_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    expected = "file: no checkpoint could be saved here: File exists"
    with pytest.raises(StorageError, match=expected), saving_to(tmp_path / "file"):
        pass
