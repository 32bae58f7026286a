"""Synthetic logs in the form of public Miles, with the figures of the runs that the watch was made for."""

from collections.abc import Iterator
from datetime import datetime, timedelta

START = datetime(2026, 10, 22, 7, 16, 29)
URL = "http://172.17.0.3:20035/generate"


def stamp(second: float) -> str:
    return (START + timedelta(seconds=second)).isoformat(sep=" ", timespec="milliseconds")


def error_line(second: float) -> str:
    return (
        f"[{stamp(second)} rollout_executor] http_utils.py:241 - Error: Server error '503 Service Unavailable' for url "
        f"'{URL}'"
    )


def step_line(second: float, step: int) -> str:
    return f"[{stamp(second)} trainer] actor.py:100 - step {step}: {{'train/loss': 0.0}}"


def log(errors: dict[int, int], *, end: int, step_every: int | None = None) -> Iterator[str]:
    for second in range(end + 1):
        if step_every and second % step_every == 0:
            yield step_line(second, second // step_every)
        for number in range(errors.get(second, 0)):
            yield error_line(second + number / 1000)
    yield f"[{stamp(end)} trainer] train.py:1 - done"


def burst(start: int, seconds: int, rate: int) -> dict[int, int]:
    return dict.fromkeys(range(start, start + seconds), rate)


def busy_run() -> tuple[dict[int, int], int]:
    """22,357 errors in bursts of up to 60 s, 2,209 in the worst minute, two bursts 45 s apart; and the last second."""
    errors = burst(0, 40, 36) | burst(85, 27, 36) | burst(700, 60, 36)
    errors[700] += 49
    for number in range(8):
        errors |= burst(1400 + 700 * number, 60, 36)
    errors |= burst(7700, 12, 38)
    return errors, 9000


def dead_run(minutes: int) -> tuple[dict[int, int], int]:
    """More than 2,669 errors in every full minute, without an end."""
    return burst(21, 60 * minutes - 21, 53), 60 * minutes
