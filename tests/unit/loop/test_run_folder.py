import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.config.flags import with_values
from miles.config.resolve import resolve
from miles.config.sections import RunConfig
from miles.errors import ConfigError, StorageError
from miles.loop.run_folder import RunFolder, open_run_folder


def config_of(runs_dir: Path, **values) -> RunConfig:
    config, _ = resolve(with_values(RunConfig(), {"runs_dir": str(runs_dir), "run_name": "a", **values}))
    return config


def open_folder(runs_dir: Path, **values) -> RunFolder:
    return open_run_folder(config_of(runs_dir, **values), command=["miles", "train", "--hf-token", "s3cret"])


def begin(folder: RunFolder) -> None:
    """Leave the folder as a run does that has finished a step."""
    folder.metrics_file.write_text('{"kind": "step", "step": 0}\n')
    folder.close()


def test_a_new_folder_describes_the_run(tmp_path):
    folder = open_folder(tmp_path)
    folder.close()
    assert folder.path == tmp_path / "a"
    assert folder.save == folder.load == tmp_path / "a" / "checkpoints"
    assert "rollout_batch_size: 32" in folder.config_file.read_text()
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment["seeds"] == {"seed": 1234, "rollout_seed": 42}
    assert environment["command"] == "miles train --hf-token ***"


def test_the_same_settings_reopen_it_and_new_resumable_values_are_kept(tmp_path):
    open_folder(tmp_path, num_rollout=10).close()
    folder = open_folder(tmp_path, num_rollout=20)
    folder.close()
    assert "num_rollout: 20" in folder.config_file.read_text()


def test_other_settings_are_refused_and_listed(tmp_path):
    begin(open_folder(tmp_path, lr=1e-3, rollout_batch_size=8))
    before = (tmp_path / "a" / "config.yaml").read_text()
    with pytest.raises(ConfigError) as caught:
        open_folder(tmp_path, lr=1e-2, rollout_batch_size=16)
    message = str(caught.value)
    assert "--lr: 0.001 in the run folder, 0.01 now" in message
    assert "--rollout-batch-size: 8 in the run folder, 16 now" in message
    assert "--run-name" in message
    assert (tmp_path / "a" / "config.yaml").read_text() == before
    open_folder(tmp_path, lr=1e-3, rollout_batch_size=8).close()


def test_a_run_that_never_began_may_be_started_with_other_settings(tmp_path):
    open_folder(tmp_path, lr=1e-3).close()
    open_folder(tmp_path, lr=1e-2).close()
    assert "lr: 0.01" in (tmp_path / "a" / "config.yaml").read_text()


def test_a_run_whose_settings_cannot_be_read_is_kept(tmp_path):
    folder = open_folder(tmp_path)
    begin(folder)
    folder.config_file.write_text("lr: [")
    with pytest.raises(ConfigError, match="holds a run whose settings cannot be read .* --run-name"):
        open_folder(tmp_path)
    assert folder.config_file.read_text() == "lr: ["


def test_a_folder_in_use_is_refused_with_the_pid(tmp_path):
    first = open_folder(tmp_path)
    with pytest.raises(StorageError, match=rf"another run is using this folder \(pid {os.getpid()}\)"):
        open_folder(tmp_path)
    first.close()
    open_folder(tmp_path).close()


def test_a_folder_stays_in_use_while_a_worker_holds_its_lock(tmp_path):
    first = open_folder(tmp_path)
    worker = subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[first.lock_fd],
    )
    first.close()
    with pytest.raises(StorageError, match="another run"):
        open_folder(tmp_path)
    worker.communicate(b"\n")
    open_folder(tmp_path).close()


def test_a_path_that_cannot_be_a_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/a: cannot write the run folder: Not a directory; .*--runs-dir"):
        open_folder(tmp_path / "file")


def test_a_read_only_folder_is_one_sentence(tmp_path):
    runs_dir = tmp_path / "runs"
    (runs_dir / "a").mkdir(parents=True)
    mounted = False
    if os.geteuid() == 0:  # root may write in spite of the mode
        command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(runs_dir)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        if not mounted:
            pytest.skip("root without the right to mount: nothing here is read-only")
    else:
        (runs_dir / "a").chmod(0o500)
    try:
        with pytest.raises(
            StorageError, match="cannot write the run folder: (Read-only file system|Permission denied)"
        ):
            open_folder(runs_dir)
    finally:
        if mounted:
            subprocess.run(["umount", str(runs_dir)], check=True)


def test_a_full_disk_is_one_sentence(tmp_path):
    runs_dir = tmp_path / "runs"
    runs_dir.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(runs_dir)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small file system here; it takes root on Linux")
    try:
        with pytest.raises(StorageError, match="cannot write the run folder: No space left on device"):
            open_folder(runs_dir)
    finally:
        subprocess.run(["umount", str(runs_dir)], check=True)
