"""The command line: dispatch, exit codes, messages, and what is imported."""

import os
import subprocess
import sys
from types import ModuleType

import pytest

from miles import __version__
from miles.cli import main as cli
from miles.errors import ConfigError, DataError, EngineError


def command(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    module = ModuleType("miles.cli.train")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "miles.cli.train", module)


def test_command_gets_its_arguments_and_decides_the_exit_code(monkeypatch):
    seen = []
    command(monkeypatch, lambda argv: seen.append(argv) or 7)
    assert cli.main(["train", "--lr", "1"]) == 7
    assert seen == [["--lr", "1"]]


@pytest.mark.parametrize("error, code", [(DataError("row 3 is empty"), 2), (EngineError("the engine died"), 1)])
def test_error_of_a_user_is_one_line_without_a_traceback(monkeypatch, capsys, error, code):
    def run(argv):
        raise error

    command(monkeypatch, run)
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == f"miles: {error}\n"


def test_every_violation_is_shown(monkeypatch, capsys):
    def run(argv):
        raise ConfigError("--lr: needs a value", "--seed: needs a value")

    command(monkeypatch, run)
    assert cli.main(["train"]) == 2
    error = capsys.readouterr().err
    assert "2 things are wrong" in error and "1. --lr" in error and "2. --seed" in error


def test_a_mistake_of_this_code_keeps_its_traceback(monkeypatch):
    def run(argv):
        assert not argv, "our mistake"

    command(monkeypatch, run)
    with pytest.raises(AssertionError, match="our mistake"):
        cli.main(["train", "--lr", "1"])


def test_interrupt_ends_with_130(monkeypatch, capsys):
    def run(argv):
        raise KeyboardInterrupt

    command(monkeypatch, run)
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "miles: interrupted\n"


def test_unknown_command_names_the_closest(capsys):
    assert cli.main(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], []])
def test_help_lists_every_command(capsys, argv):
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in cli.COMMANDS)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"miles {__version__}\n"


def test_python_m_miles_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "miles", "trian"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("miles: there is no command 'trian'")


def test_reader_of_a_pipe_may_leave():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "miles"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
