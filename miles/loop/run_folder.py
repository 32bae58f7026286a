"""The folder of a run: who may use it, and whether it belongs to these settings."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles.config.dump import dump_config, load_config
from miles.config.resolve import identity, identity_diff
from miles.config.sections import RunConfig
from miles.errors import ConfigError, StorageError
from miles.observe.atomic import write_atomically
from miles.observe.environment import describe_environment


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run. `lock_fd` keeps other runs out for as long as any process of this run holds it open."""

    path: Path
    save: Path  # checkpoints are written here
    load: Path  # and looked for here
    lock_fd: int

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def log_file(self) -> Path:
        return self.path / "log.txt"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def save_request(self) -> Path:
        """When this file appears, the step in progress is saved once it has ended."""
        return self.path / "save_now"

    @property
    def has_begun(self) -> bool:
        """Whether a step or an evaluation was finished here; a checkpoint never comes before one."""
        return self.metrics_file.exists() and self.metrics_file.stat().st_size > 0

    def close(self) -> None:
        os.close(self.lock_fd)


def run_folder_of(config: RunConfig, *, lock_fd: int) -> RunFolder:
    """The folder of a resolved config that is open already, under this lock."""
    folder = config.run_dir
    assert folder.run_name and folder.save and folder.load, "resolve.py sets run_name, save and load"
    return RunFolder(Path(folder.runs_dir) / folder.run_name, Path(folder.save), Path(folder.load), lock_fd)


def open_run_folder(config: RunConfig, *, command: Sequence[str]) -> RunFolder:
    """Make or reopen the run folder of a resolved config, lock it, write `config.yaml` and `environment.json`.

    Raises:
        StorageError: the folder cannot be written, or another run is using it.
        ConfigError: it belongs to a run with other settings; lists them.
    """
    path = run_folder_of(config, lock_fd=-1).path
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _cannot_write(path, error) from error
    folder = run_folder_of(config, lock_fd=lock_fd)
    try:
        _lock(folder)
        _check_identity(folder, config)
        _describe(folder, config, command)
    except OSError as error:
        folder.close()
        raise _cannot_write(path, error) from error
    except (ConfigError, StorageError):
        folder.close()
        raise
    return folder


def _lock(folder: RunFolder) -> None:
    try:
        fcntl.flock(folder.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(folder.lock_fd, 32, 0).decode() or "unknown"
        raise StorageError(
            f"{folder.path}: another run is using this folder (pid {holder}); wait for it, stop it, or choose another "
            "--run-name"
        ) from error
    os.ftruncate(folder.lock_fd, 0)
    os.pwrite(folder.lock_fd, str(os.getpid()).encode(), 0)


def _check_identity(folder: RunFolder, config: RunConfig) -> None:
    """A run that failed before its first step, for example over a wrong flag, has nothing to lose: it may start anew
    with other settings."""
    if not folder.config_file.exists() or not folder.has_begun:
        return
    advice = "give another --run-name to start a new run"
    try:
        stored = load_config(folder.config_file)
    except ConfigError as error:
        raise ConfigError(f"{folder.path} holds a run whose settings cannot be read ({error}): {advice}") from error
    differences = identity_diff(identity(stored), identity(config))
    if differences:
        raise ConfigError(
            f"{folder.path} belongs to a run with other settings ({'; '.join(differences)}): go back to them to resume "
            f"it, or {advice}"
        )


def _describe(folder: RunFolder, config: RunConfig, command: Sequence[str]) -> None:
    write_atomically(folder.config_file, dump_config(config))
    environment = describe_environment(
        command=command,
        model_folder=Path(config.model.hf_checkpoint) if config.model.hf_checkpoint else None,
        seeds={"seed": config.optim.seed, "rollout_seed": config.data.rollout_seed},
    )
    write_atomically(folder.path / "environment.json", json.dumps(environment, indent=2) + "\n")


def _cannot_write(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: cannot write the run folder: {error.strerror}; make room or get the rights there, or choose "
        "another --runs-dir"
    )
