import pytest

from miles.config.sections import ProcessConfig
from miles.loop.monitor import Monitor
from miles.loop.recover import End


class Screen:
    """A display that keeps what it is shown, and can lose its terminal."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.gone = False

    def line(self, text: str) -> None:
        if self.gone:
            raise BrokenPipeError
        self.shown.append(text)

    def step(self, step, metrics, *, num_steps):
        self.line(f"step {step} of {num_steps}")

    def tick(self, *, phase, age_s, detail, step, num_steps):
        self.line(f"{phase} {detail}")

    def close(self) -> None:
        self.line("closed")


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture
def monitor(tmp_path, screen):
    return Monitor(tmp_path / "log.txt", ProcessConfig(), display=screen)


def test_output_goes_to_log_and_display(monitor, screen, tmp_path):
    monitor.output(b"hello \xff\n")
    monitor.output(b"stacks\n", shown=False)
    assert screen.shown == ["hello \ufffd"]
    assert (tmp_path / "log.txt").read_bytes() == b"hello \xff\nstacks\n"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("[2026-01-01 00:00:00.000 main] a.py:1 - Error: no answer from 4 graders", "no answer from 4 graders"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "torch.OutOfMemoryError: CUDA out of memory."),
        ("Fatal Python error: Segmentation fault", "Fatal Python error: Segmentation fault"),
        ("step 3: {'train/loss': 0.5}", ""),
    ],
)
def test_the_last_error_is_kept(monitor, line, error):
    monitor.output(line.encode() + b"\n")
    assert monitor.last_error_line == error


def test_messages_reach_watchdog_display_and_conclusion(monitor, screen):
    beat = {
        "paused": False,
        "phase": "train",
        "phase_count": 1,
        "progress_count": 1,
        "detail": "2 of 4",
        "step": 3,
        "num_steps": 9,
    }
    monitor.message({"kind": "beat", **beat})
    monitor.message({"kind": "step", "step": 3, "num_steps": 9, "metrics": {}})
    monitor.message({"kind": "error", "message": "no more", "exit_code": 2, "repairable": False})
    assert monitor.where == "in phase train of step 3"
    assert monitor.tick() is None
    assert screen.shown == ["step 3 of 9", "train 2 of 4"]
    assert monitor.error == End(2, "no more")


def test_a_terminal_that_is_gone_does_not_end_the_run(monitor, screen, tmp_path):
    screen.gone = True
    monitor.output(b"one\n")
    screen.gone = False
    monitor.output(b"two\n")
    monitor.tick()
    monitor.close()
    assert screen.shown == []
    assert (tmp_path / "log.txt").read_bytes() == b"one\ntwo\n"
