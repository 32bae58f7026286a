from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.harness import REPOSITORY, Miles, Server

# Runs start in folders of their own and name rewards of `tests/e2e/rewards.py`.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))


@pytest.fixture(scope="session")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def miles(server, tmp_path) -> Miles:
    return Miles(server, tmp_path)


@pytest.fixture(scope="session")
def whole_run(server, tmp_path_factory) -> Path:
    """The folder of a run of 4 rollouts that nothing interrupts; not to be changed."""
    miles = Miles(server, tmp_path_factory.mktemp("whole"))
    ended = miles.train()
    assert ended.code == 0, ended.err
    return miles.run
