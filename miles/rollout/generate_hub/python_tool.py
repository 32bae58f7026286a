"""A Python tool for `--generate-execute-tool-function-path`, in the sandbox of the code reward."""

from __future__ import annotations

import asyncio
import atexit
import functools
from typing import Any

from miles.rollout.rm_hub.code_reward import POOL_MARGIN_S, SANDBOX
from miles.rollout.rm_hub.pool import WorkerPool

TIMEOUT_S = 6.0
NUM_WORKERS = 2
SPEC = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


async def execute(name: str, params: dict[str, Any]) -> str:
    """What the program `params["code"]` prints, errors included."""
    if name != "python" or not isinstance(params.get("code"), str):
        return 'error: there is one tool, python, with the argument "code"'
    outcome = await asyncio.wrap_future(_pool().submit(("output", params["code"], TIMEOUT_S)))
    return str(outcome.value) if outcome.failure is None else f"error: the program could not be run ({outcome.detail})"


@functools.cache
def _pool() -> WorkerPool:
    pool = WorkerPool(SANDBOX, num_workers=NUM_WORKERS, timeout_s=TIMEOUT_S + POOL_MARGIN_S)
    pool.start()
    atexit.register(pool.close)
    return pool
