from miles.config.sections import ProcessConfig
from miles.loop.recover import End, Restarts

FAILED = End(1, "died", repairable=True)


def restarts(**values):
    return Restarts(ProcessConfig(**{"use_fault_tolerance": True, "max_restarts": 3, "restart_backoff": 1.0, **values}))


def test_waits_double_and_end():
    policy = restarts(max_restarts=4)
    assert [policy.wait_s(FAILED, last_step=-1) for _ in range(5)] == [1, 2, 4, 8, None]


def test_waits_have_a_limit():
    policy = restarts(max_restarts=9, restart_backoff=20.0)
    assert [policy.wait_s(FAILED, last_step=-1) for _ in range(4)] == [20, 40, 60, 60]


def test_only_a_new_step_counts_as_progress():
    policy = restarts(max_restarts=2)
    steps = [5, 4, 6, 5, 6]  # a step computed again is none
    assert [policy.wait_s(FAILED, last_step=step) for step in steps] == [1, 2, 1, 2, None]


def test_without_the_flag_or_hope_the_run_ends():
    assert restarts(use_fault_tolerance=False).wait_s(FAILED, last_step=3) is None
    assert restarts().wait_s(End(2, "wrong flag"), last_step=3) is None
    assert restarts().wait_s(End(0), last_step=3) is None
