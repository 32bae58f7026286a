import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from miles.cli import dashboard
from miles.errors import ConfigError
from miles.report.gpu_now import gpu_charts, parse
from miles.report.server import make_app
from tests.conftest import REPOSITORY
from tests.unit.report.folders import make_run, sample


def _samples(step):
    return [sample(0, a, prompt="what is 6*7?", response="42" if a else "six", reward=float(a)) for a in range(2)]


@pytest.fixture
def client(tmp_path):
    make_run(tmp_path / "first", [0.1, 0.2, 0.3], samples=_samples)
    with TestClient(make_app([tmp_path])) as client:
        yield client


def test_runs_are_listed_with_their_state(client):
    (run,) = client.get("/runs").json()
    assert (run["name"], run["state"], run["steps"]) == ("first", "finished", 3)
    assert run["files"] == ["rollout_2", "rollout_1", "rollout_0"]


def test_a_page_that_did_not_change_is_not_sent_again(client):
    first = client.get("/view", params={"run": "first"})
    assert first.status_code == 200 and 'id="signals"' in first.text
    again = client.get("/view", params={"run": "first"}, headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""


@pytest.mark.parametrize(
    "query, found", [({"q": "six"}, 1), ({"q": "nothing"}, 0), ({"reward": "mixed"}, 1), ({"reward": "right"}, 0)]
)
def test_samples_are_searched(client, query, found):
    reply = client.get("/samples", params={"run": "first", "file": "rollout_0"} | query)
    assert f'data-found="{found} of 1 groups"' in reply.text


@pytest.mark.parametrize(
    "address, status",
    [
        ("/view?run=..%2F..%2Fetc", 404),
        ("/samples?run=first&file=..%2Fconfig", 400),
        ("/samples?run=first&file=rollout_99", 404),
        ("/samples?run=first&file=rollout_0&page=-1", 400),
        ("/static/..%2Fserver.py", 404),
        ("/static/report.html.jinja", 404),
    ],
)
def test_names_are_never_paths(client, address, status):
    assert client.get(address).status_code == status


def test_other_host_names_are_refused(client):
    assert client.get("/runs", headers={"Host": "evil.example"}).status_code == 400


def test_policy_forbids_everything_from_outside(client):
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "http" not in policy


def test_driver_output_is_read():
    text = "1024, 81559, 37, 45\n[N/A], [N/A], 12, 50\n"
    first, second = parse(text, seconds=4.0)
    assert first.used_gb == pytest.approx(1.0737, abs=1e-3) and first.use_percent == 37
    assert second.used_gb is None and second.celsius == 50
    page = gpu_charts([first, second])
    assert "GPU 0 45 C" in page and "memory, GB of 86" in page
    assert "no GPU" in gpu_charts([])


def test_a_missing_folder_is_said():
    with pytest.raises(ConfigError, match="there is no such folder"):
        dashboard.run(["/nowhere/at/all"])


def test_command_serves_and_a_taken_port_is_said(tmp_path):
    make_run(tmp_path / "first", [0.1])
    command = [sys.executable, "-m", "miles", "dashboard", str(tmp_path), "--port"]
    process = subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        address = process.stdout.readline().strip()
        port = address.rstrip("/").rpartition(":")[2]
        taken = subprocess.run([*command, port], capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
        assert taken.returncode == 2 and f"--port {port}: cannot listen there" in taken.stderr
    finally:
        process.terminate()
        process.wait(timeout=20)
    assert address.startswith("http://127.0.0.1:")
