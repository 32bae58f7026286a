"""Short quickstart runs with every kind of reward of the user's own: what it gives is what the run trains on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from miles.observe.metrics import read_records
from miles.observe.samples import read_samples

pytestmark = pytest.mark.slow

REWARDS = """
import asyncio

def value(response):
    return (len(response) % 5) / 4

def plain(args, sample):
    return value(sample.response)

async def with_await(args, sample):
    await asyncio.sleep(0.001)
    return value(sample.response)

def group(args, samples):
    return [value(sample.response) for sample in samples]

async def group_with_await(args, samples):
    await asyncio.sleep(0.001)
    return [value(sample.response) for sample in samples]

def as_dict(args, sample):
    return {"score": value(sample.response), "length": len(sample.response)}

def sometimes(args, sample):
    if sample.index == 37:
        raise OSError("the judge is away")
    return value(sample.response)
"""


def value(response: str) -> float:
    return (len(response) % 5) / 4


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = json.dumps(value(body["response"])).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


KINDS = {
    "plain": ["--custom-rm-path", "my_reward.plain"],
    "async": ["--custom-rm-path", "my_reward.with_await"],
    "group": ["--custom-rm-path", "my_reward.group", "--group-rm"],
    "async group": ["--custom-rm-path", "my_reward.group_with_await", "--group-rm"],
    "dict": ["--custom-rm-path", "my_reward.as_dict", "--reward-key", "score"],
    "dropped": ["--custom-rm-path", "my_reward.sometimes", "--rm-on-error", "drop", "--rm-watch-type", "gsm8k"],
    "remote": ["--rm-type", "remote_rm", "--rm-url", "SERVICE"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_quickstart_run_with_a_reward_of_ones_own(kind: str, service: str, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(REWARDS)
    flags = [service if word == "SERVICE" else word for word in KINDS[kind]]
    short = ["--num-rollout", "2", "--eval-interval", "2", "--skip-eval-before-train", "--progress", "off"]
    short += ["--run-name", "run", "--rollout-batch-size", "8"]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    command = [sys.executable, "-m", "miles", "quickstart", *short, *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [record for record in read_records(tmp_path / "runs/run/metrics.jsonl") if record["kind"] == "step"]
    assert len(steps) == 2
    for step, record in enumerate(steps):
        rows = read_samples(tmp_path / f"runs/run/samples/rollout_{step}.parquet")
        assert [row["reward"] for row in rows] == [value(row["response"]) for row in rows]
        assert record["rollout/raw_reward"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))
        num_dropped = 1 if kind == "dropped" and step == 0 else 0
        assert (len(rows), record["rollout/num_failed"]) == (64 - num_dropped, num_dropped)
        assert ("rollout/watch_reward" in record) == (kind == "dropped")
