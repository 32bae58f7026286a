"""Terminals, streams, folders and processes around a run that are not as usual."""

import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest

from tests.e2e.harness import SETTINGS, assert_same, flags, is_one_error, state_of


def command(**settings) -> list[str]:
    return [sys.executable, "-m", "miles", "train", *flags({**SETTINGS, **settings})]


def test_closed_streams(miles, whole_run):
    """In a process of its own: the numbers of closed streams would go to the next files and pipes."""
    line = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", *command()]
    assert subprocess.run(line, cwd=miles.folder).returncode == 0
    assert_same(miles.state(), state_of(whole_run))


@pytest.mark.parametrize("stream", ["stdout_without_reader", "stdout_without_space"])
def test_a_terminal_that_goes_away_does_not_end_the_run(miles, whole_run, stream):
    assert miles.train(before=[[stream]]).code == 0
    assert_same(miles.state(), state_of(whole_run))
    assert "finished 4 of 4 rollouts" in miles.log()


def test_names_that_neither_terminal_nor_locale_can_show(miles):
    """Also through the worker's pipe: its lines are read as UTF-8 whatever the terminal speaks."""
    folder = miles.folder / "é 中 😀"
    folder.mkdir()
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TERM": ""}
    environment.pop("HOME", None)
    settings = {"runs_dir": folder, "run_name": "ü", "in_process": None, "num_rollout": 1}
    done = subprocess.run(command(**settings), cwd=miles.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "starting fresh" in (folder / "ü" / "log.txt").read_text(errors="replace")
    assert (folder / "ü" / "samples" / "rollout_0.parquet").exists()


def test_a_live_display_on_a_terminal_that_is_resized(miles, whole_run):
    (miles.folder / "slow").touch()
    main, terminal = pty.openpty()
    running = miles.start_train(before=[["use_terminal", os.ttyname(terminal)]])
    shown = os.read(main, 1024)
    os.close(terminal)  # the run has it too by now, and closes it last
    while True:
        size = (3, 20) if len(shown) % 2 else (50, 200)
        ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        try:
            shown += os.read(main, 1024)
        except OSError:  # the other side is closed
            break
    os.close(main)
    assert running.wait().code == 0
    assert b"step 3 (4/4)" in shown and b"Traceback" not in shown
    assert_same(miles.state(), state_of(whole_run))


def test_a_run_folder_behind_a_link(miles, whole_run):
    (miles.folder / "elsewhere").mkdir()
    miles.runs.mkdir()
    miles.run.symlink_to(miles.folder / "elsewhere")
    assert miles.train().code == 0
    assert miles.run.is_symlink()
    assert_same(state_of(miles.folder / "elsewhere"), state_of(whole_run))


def test_a_working_directory_that_is_gone(miles):
    gone = miles.folder / "gone"
    gone.mkdir()
    running = miles.start_train(cwd=gone, before=[["remove_working_directory"]])
    is_one_error(running.wait(), 1, "runs/run: cannot write the run folder: No such file or directory")


def test_a_moved_run_goes_on(miles, whole_run):
    assert miles.train(num_rollout=2).code == 0
    shutil.move(miles.run, miles.runs / "moved")
    assert miles.train(run_name="moved").code == 0
    assert_same(miles.state("moved"), state_of(whole_run))
