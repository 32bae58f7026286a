import fcntl
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from miles.cli.main import main
from miles.errors import ConfigError
from miles.loop import watch as watch_module
from miles.loop.watch import CannotSeeError, ContainerTarget, FileLog, FolderTarget, HeatWait, ProcessTarget, watch
from miles.observe.error_rule import Limits, look
from miles.observe.heat import HeatLimits
from tests.unit.observe.engine_logs import busy_run, dead_run, error_line, log, step_line

RULE_ONE = Limits(no_step_s=0)


class Simulated:
    """A run of `end` seconds with these errors per second, on an invented clock."""

    name = "run"

    def __init__(self, errors, *, end, clock, lines=()):
        self.errors, self.end, self.clock, self.lines = errors, end, clock, list(lines)
        self.stopped_at = None

    def is_running(self):
        return self.clock[0] < self.end

    def look(self, now):
        lines, self.lines = self.lines, []
        return look([*lines, *[error_line(0)] * sum(self.errors.get(int(now) - back, 0) for back in range(1, 61))])

    def stop(self):
        self.stopped_at = self.clock[0]


def simulate(errors, *, end, limits=RULE_ONE, lines=()):
    clock, said = [0.0], []
    target = Simulated(errors, end=end, clock=clock, lines=lines)

    def wait(seconds):
        clock[0] += seconds
        return 0.0

    code = watch(target, limits, said.append, clock=lambda: clock[0], wait=wait)
    return code, target.stopped_at, said


def test_a_dead_engine_is_stopped_in_about_five_minutes():
    code, stopped_at, said = simulate(dict.fromkeys(range(10_000), 10), end=10_000)
    assert (code, stopped_at) == (1, 300)
    assert said[-1].startswith(
        "run: more than 100 errors from the rollout engine in each of 10 checks, last 600 in 60 s"
    )
    assert simulate(dead_run(60)[0], end=3600)[0] == 1


def test_six_checks_take_three_minutes():
    assert simulate(dict.fromkeys(range(10_000), 10), end=10_000, limits=Limits(checks=6, no_step_s=0))[1] == 180


def test_bursts_of_a_busy_engine_do_not_stop_it():
    errors = {second: 10 for start in (0, 180, 360) for second in range(start, start + 60)}
    code, stopped_at, said = simulate(errors, end=541)
    assert (code, stopped_at) == (0, None)
    assert said[-1] == "run: the run ended"
    errors, end = busy_run()
    assert simulate(errors, end=end)[0] == 0


def test_a_failed_import_is_said_at_once_and_stops_the_run_in_ten_minutes():
    lines = ["ModuleNotFoundError: No module named 'my_rewards'", *[error_line(0)] * 44]
    code, stopped_at, said = simulate({}, end=7200, limits=Limits(), lines=lines)
    assert (code, stopped_at) == (1, 600)
    assert "PYTHONPATH" in said[0]
    assert "no line of a step for 10 minutes. Likely cause: a module" in said[-1]


def test_a_log_file_is_followed(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(error_line(0) + "\n")
    follow = FileLog(path)
    assert follow.look(0.0).num_errors == 0, "what was there is history"
    with open(path, "a") as file:
        file.write(error_line(1) + "\n" + error_line(2) + "\n" + step_line(3, 0))
    assert (follow.look(30.0).num_errors, follow.look(31.0).has_step) == (2, False)
    with open(path, "a") as file:
        file.write("\n" + error_line(4) + "\n")
    seen = follow.look(60.0)
    assert (seen.num_errors, seen.has_step) == (3, True)
    assert follow.look(91.0).num_errors == 1, "the first two are older than 60 s"
    path.write_text(error_line(5) + "\n")
    assert follow.look(200.0).num_errors == 1, "begun anew"
    path.unlink()
    assert follow.look(230.0) is None


DOCKER = """#!{python} -S
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
open(here + "/calls", "a").write(" ".join(sys.argv[1:]) + "\\n")
command = sys.argv[1]
if os.path.exists(here + "/broken") and open(here + "/broken").read() == command:
    sys.exit("daemon is gone")
if command == "ps" and not os.path.exists(here + "/ended"):
    print("0123abcd")
if command == "logs":
    sys.stderr.write(open(here + "/log").read())
if command == "stop":
    open(here + "/ended", "w")
"""


@pytest.fixture
def docker(tmp_path):
    path = tmp_path / "docker"
    path.write_text(DOCKER.format(python=sys.executable))
    path.chmod(0o755)
    (tmp_path / "log").write_text((error_line(0) + "\n") * 578)
    return path


def watch_container(docker):
    said = []
    target = ContainerTarget("wd-dead", docker=str(docker))
    limits = Limits(checks=2, no_step_s=0)
    return watch(target, limits, said.append, wait=lambda seconds: 0.0), said


def test_a_container(docker):
    code, said = watch_container(docker)
    assert code == 1
    assert "wd-dead: more than 100 errors from the rollout engine in each of 2 checks, last 578 in 60 s" in said[-1]
    calls = (docker.parent / "calls").read_text().splitlines()
    assert calls[:2] == ["ps -q --filter name=^wd-dead$", "logs --since 60s wd-dead"]
    assert calls[-1] == "stop wd-dead"


def test_a_container_that_has_ended(docker):
    (docker.parent / "ended").touch()
    assert watch_container(docker) == (0, ["wd-dead: the run ended"])


def test_without_docker_the_run_has_no_guard(docker, tmp_path):
    (docker.parent / "broken").write_text("ps")
    code, said = watch_container(docker)
    assert code == 2
    assert said == ["wd-dead: " + f"{docker} ps failed: daemon is gone; the watch cannot see the run and stops"]
    assert watch_container(tmp_path / "no-docker")[0] == 2


def test_a_failed_log_read_does_not_count(docker):
    (docker.parent / "broken").write_text("logs")
    said, target = [], ContainerTarget("wd-dead", docker=str(docker))

    def wait(seconds):
        if len(said) == 3:
            (docker.parent / "broken").unlink()
        return 0.0

    assert watch(target, Limits(checks=2, no_step_s=0), said.append, wait=wait) == 1
    assert said[:3] == ["wd-dead: the log cannot be read, this check does not count"] * 3


@pytest.mark.parametrize("name", ["--all", "", "a b", "$(reboot)"])
def test_a_container_name_cannot_be_an_option(name):
    with pytest.raises(ConfigError):
        ContainerTarget(name)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_process(sleeper):
    target = ProcessTarget(sleeper.pid, None)
    assert target.is_running()
    target.pause()
    wait_for_status(sleeper.pid, psutil.STATUS_STOPPED)
    target.stop()
    assert not target.is_running()
    with pytest.raises(ConfigError, match="no such process"):
        ProcessTarget(2**22 + 1, None)


def test_a_run_folder(tmp_path, sleeper):
    with pytest.raises(ConfigError, match="not a run folder"):
        FolderTarget(tmp_path)
    (tmp_path / ".lock").write_text(str(sleeper.pid))
    with pytest.raises(ConfigError, match="no run is using"):
        FolderTarget(tmp_path)
    with open(tmp_path / ".lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (tmp_path / "log.txt").touch()
        target = FolderTarget(tmp_path)
        assert target.is_running()
    assert not target.is_running()


HEAT_WATCH = """
import sys, time
from pathlib import Path
from miles.loop import watch
from miles.observe.heat import HeatLimits
watch.POLL_S = 0.05
class Hot:
    def celsius(self): return 90.0
target = watch.ProcessTarget(int(sys.argv[1]), None)
with watch.HeatWait(target, Hot(), HeatLimits(), lambda text: print(text, flush=True), Path(sys.argv[2])) as wait:
    wait(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_watch_that_ends_in_any_way_resumes_the_run(tmp_path, sleeper, number):
    command = [sys.executable, "-c", HEAT_WATCH, str(sleeper.pid), str(tmp_path / "pauses.jsonl")]
    guard = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert "paused at 90 C" in guard.stdout.readline()
    wait_for_status(sleeper.pid, psutil.STATUS_STOPPED)
    guard.send_signal(number)
    guard.wait(10)
    wait_for_status(sleeper.pid, psutil.STATUS_SLEEPING)
    assert (tmp_path / "pauses.jsonl").read_text().count('"pause"') == 1


def test_the_heat_wait_says_how_long_the_run_stood_still(sleeper, monkeypatch):
    monkeypatch.setattr(watch_module, "POLL_S", 0.02)
    values = iter([90.0, 60.0, 60.0, 60.0])

    class Sensor:
        def celsius(self):
            return next(values, 60.0)

    said = []
    limits = HeatLimits(min_s=0.05, max_s=1.0)
    with HeatWait(ProcessTarget(sleeper.pid, None), Sensor(), limits, said.append, None) as wait:
        assert 0.05 <= wait(0.3) < 2.0
    assert ["paused" in said[0], "resumed" in said[1]] == [True, True]


def wait_for_status(pid, status):
    end = time.monotonic() + 10
    while psutil.Process(pid).status() != status:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_replay_prints_the_table_of_the_manual(tmp_path, capsys):
    errors, end = busy_run()
    path = tmp_path / "busy.log"
    path.write_text("\n".join(log(errors, end=end, step_every=150)))
    assert main(["watch", "--replay", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "22357 errors" in lines[0]
    assert [line.split() for line in lines[2:5]] == [
        "6 17 of 30 6 153 to 169 s 153 to 182 s".split(), "8 0 of 30 6 - 213 to 242 s".split(),
        "10 0 of 30 6 - 273 to 302 s".split(),
    ]  # fmt: skip
    assert main(["watch", "--replay", str(path), "--checks", "6"]) == 1


def test_replay_of_dead_and_silent_runs(tmp_path, capsys):
    errors, end = dead_run(minutes=10)
    path = tmp_path / "dead.log"
    path.write_text("\n".join(log(errors, end=end)))
    assert main(["watch", "--replay", str(path)]) == 1
    assert "30 of 30" in capsys.readouterr().out
    path.write_text("\n".join([step_line(0, 0), step_line(4000, 1)]))
    assert main(["watch", "--replay", str(path)]) == 1
    assert "which stops the run" in capsys.readouterr().out
    assert main(["watch", "--replay", str(path), "--no-step-minutes", "90"]) == 0


@pytest.mark.parametrize(
    "argv",
    [["--replay", "missing.log"], ["--pid", "1", "--checks", "0"], ["--pid", "1", "--limit", "-1"], ["missing"]],
)
def test_wrong_arguments_end_with_2(argv, capsys):
    assert main(["watch", *argv]) == 2


def test_a_value_that_is_no_number_ends_with_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["watch", "--pid", str(os.getpid()), "--checks", "ten"])
    assert ended.value.code == 2


def test_an_invisible_run_is_an_error_of_its_own():
    assert CannotSeeError("x").exit_code == 2
