import io

import pytest
from rich.console import Console

from miles.observe.display import (
    LiveDisplay,
    LogDisplay,
    PlainDisplay,
    describe_step,
    duration,
    is_record,
    make_display,
)

METRICS = {
    "rollout/raw_reward": 0.628906,
    "rollout/response_lengths": 21.25,
    "perf/tokens_per_gpu_per_sec": 5214.4,
    "eval/held_out": 0.5,
    "eval/held_out-truncated_ratio": 0.1,
}
RECORD = "[2026-01-01 00:00:00.000 main] run.py:10 - step 0: {'train/loss': 0.5}"
NOTICE = "[2026-01-01 00:00:00.000 main] run.py:10 - starting fresh: no checkpoint in runs/a"


def test_records_are_told_from_notices():
    assert is_record(RECORD)
    assert not is_record(NOTICE)


def test_a_step_in_one_line():
    line = describe_step(2, METRICS, num_steps=40, left_s=31.4)
    assert line == "step 2 (3/40): reward 0.629  length 21.2  tokens/s 5,214  eval/held_out 0.500  left 0:31"
    assert describe_step(0, {"train/loss": 2.0}, num_steps=None, left_s=None) == "step 0: loss 2.0000"


def test_duration():
    assert [duration(seconds) for seconds in (7.9, 751, 3720)] == ["0:07", "12:31", "1:02:00"]


def test_plain_display_has_a_line_per_step_and_per_30_s_of_a_phase(capsys):
    display = PlainDisplay()
    display.line(RECORD)
    display.line(NOTICE)
    for phase, ages in {"generate": range(0, 65), "train": range(0, 25), "save": range(0, 35)}.items():
        for age_s in ages:
            display.tick(phase=phase, age_s=float(age_s), detail="", step=1, num_steps=4)
    display.step(1, METRICS, num_steps=4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        NOTICE,
        "step 1 (2/4): generate for 0:30",
        "step 1 (2/4): generate for 1:00",
        "step 1 (2/4): save for 0:30",
    ]
    assert lines[4].startswith("step 1 (2/4): reward 0.629")
    assert len(lines) == 5


def test_the_log_itself_can_be_the_display(capsys):
    display = LogDisplay()
    display.line(RECORD)
    display.step(0, METRICS, num_steps=1)
    assert capsys.readouterr().out == RECORD + "\n"


def test_live_display_shows_phase_age_and_the_last_step():
    screen = io.StringIO()
    display = LiveDisplay(Console(file=screen, force_terminal=True, width=120, color_system=None))
    display.line(RECORD)
    display.line(NOTICE)
    display.step(0, METRICS, num_steps=4)  # two steps have ended before the time of one is known
    display.step(1, METRICS, num_steps=4)
    display.tick(phase="generate", age_s=12.0, detail="3 of 16 answers", step=2, num_steps=4)
    display.close()
    shown = screen.getvalue()
    assert "step 2 (3/4)" in shown and "generate 0:12" in shown and "3 of 16 answers" in shown
    assert "reward 0.629" in shown and "left 0:0" in shown
    assert "starting fresh" in shown and "train/loss" not in shown


@pytest.mark.parametrize(("progress", "kind"), [("auto", PlainDisplay), ("plain", PlainDisplay), ("off", LogDisplay)])
def test_without_a_terminal_lines_are_plain(progress, kind):
    assert isinstance(make_display(progress), kind)
