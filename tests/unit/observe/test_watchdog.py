from miles.observe.watchdog import DEFAULT_STALL_S, START_SILENCE_S, Watchdog, where


class Run:
    """A worker and its watcher on an invented clock: 0.25 s a tick, a beat every second tick."""

    def __init__(self, **deadlines: float) -> None:
        self.now = 100.0
        self.watchdog = Watchdog(heartbeat_timeout_s=5.0, phase_deadlines=deadlines, now=self.now)
        self.message = {
            "phase": "generate",
            "phase_count": 1,
            "paused": False,
            "progress_count": 1,
            "detail": "",
            "step": 2,
            "num_steps": 9,
        }

    def go(self, seconds: float, *, beats: bool = True) -> tuple[str, float] | None:
        for tick in range(int(seconds * 4)):
            self.now += 0.25
            if beats and tick % 2 == 0:
                self.watchdog.beat(self.message)
            if verdict := self.watchdog.tick(self.now):
                return verdict, (tick + 1) / 4
        return None


def test_beats_keep_a_worker_alive():
    assert Run().go(600) is None


def test_silence_is_seen_after_the_timeout():
    run = Run()
    run.go(10)
    verdict, after_s = run.go(60, beats=False)
    assert "silent" in verdict and after_s <= 5.5
    assert run.watchdog.phase == "generate"


def test_starting_up_may_be_silent_for_longer():
    run = Run()
    verdict, after_s = run.go(2 * START_SILENCE_S, beats=False)
    assert "silent" in verdict and after_s >= START_SILENCE_S


def test_a_phase_has_a_deadline_though_it_beats():
    run = Run(generate=20.0)
    verdict, after_s = run.go(60)
    assert "20 s" in verdict and 20 < after_s < 21


def test_a_new_phase_starts_its_deadline_anew():
    run = Run(generate=20.0)
    for count in range(2, 8):
        assert run.go(15) is None
        run.message |= {"phase_count": count, "progress_count": count}
    assert run.watchdog.phase_age_s < 20


def test_without_a_deadline_progress_is_enough():
    run = Run()
    for count in range(2, 5):
        assert run.go(DEFAULT_STALL_S * 0.9) is None
        run.message["progress_count"] = count
    verdict, _ = run.go(DEFAULT_STALL_S * 1.1)
    assert "no progress" in verdict


def test_a_paused_container_and_a_clock_jump_are_no_hang():
    run = Run(generate=20.0)
    for jump_s in (3600.0, -50.0, 7.0):
        run.go(2)
        run.now += jump_s
        assert run.watchdog.tick(run.now) is None
    assert run.go(2) is None


def test_a_pause_does_not_count_against_a_phase():
    run = Run(generate=20.0)
    run.go(15)
    run.message["paused"] = True
    assert run.go(100) is None
    run.message["paused"] = False
    verdict, after_s = run.go(60)
    assert "20 s" in verdict and 4 < after_s < 6.5


def test_where():
    assert where("train", 3) == "in phase train of step 3"
    assert where("load", -1) == "in phase load"
