import pytest

from miles.observe.timers import Timers


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nested_spans_count_for_the_outer_one_and_tell_the_innermost_phase():
    clock = Clock()
    phases: list[str] = []
    timers = Timers(phases.append, clock=clock)
    with timers.span("rollout"):
        clock.now += 1
        with timers.span("reward"):
            clock.now += 2
        clock.now += 4
    assert timers.take() == {"reward": 2.0, "rollout": 7.0}
    assert phases == ["rollout", "reward", "rollout", "idle"]
    assert timers.take() == {}


def test_spans_add_up_until_taken_also_when_one_raises():
    clock = Clock()
    timers = Timers(clock=clock)
    for _ in range(2):
        with pytest.raises(ValueError), timers.span("train"):
            clock.now += 3
            raise ValueError
    timers.add("train", 0.5)
    assert timers.take() == {"train": 6.5}


def test_a_span_inside_itself_is_refused():
    timers = Timers()
    with timers.span("train"), pytest.raises(AssertionError, match="twice"), timers.span("train"):
        pass
