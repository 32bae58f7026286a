"""A loopback address under which a program of the user finds the live engine: `http://127.0.0.1:PORT/sessions/NAME/v1`.

What stands behind a session answers (path, JSON body) with JSON. Names are random, so that only who was given one can
ask under it.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from miles.errors import RequestError

HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 * 2**20
Answer = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class Endpoint:
    """One server in a thread of its own, for any number of sessions. Raises `OSError` when no port can be had."""

    def __init__(self) -> None:
        self._sessions: dict[str, Answer] = {}
        routes = [
            Route("/sessions/{name}/v1/models", self._models),
            Route("/sessions/{name}/{path:path}", self._post, methods=["POST"]),
        ]
        guard = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
        config = uvicorn.Config(
            Starlette(routes=routes, middleware=[guard]), log_level="error", lifespan="off", backlog=4096
        )
        self._server = uvicorn.Server(config)
        listening = socket.create_server((HOST, 0), backlog=4096)
        self._address = f"http://{HOST}:{listening.getsockname()[1]}"
        # a daemon: an open connection must not keep the process from ending
        threading.Thread(target=self._server.run, args=([listening],), name="endpoint", daemon=True).start()

    @contextmanager
    def session(self, answer: Answer) -> Iterator[str]:
        """The base URL of a session that `answer` stands behind, which ends with the block."""
        name = secrets.token_urlsafe(16)
        self._sessions[name] = answer
        try:
            yield f"{self._address}/sessions/{name}/v1"
        finally:
            del self._sessions[name]

    def close(self) -> None:
        self._server.should_exit = True

    async def _models(self, request: Request) -> Response:
        known = request.path_params["name"] in self._sessions
        return JSONResponse({"object": "list", "data": [{"id": "miles", "object": "model"}]}) if known else _unknown()

    async def _post(self, request: Request) -> Response:
        answer = self._sessions.get(request.path_params["name"])
        if answer is None:
            return _unknown()
        try:
            sent = await request.body()
            if len(sent) > MAX_BODY_BYTES:
                return _problem(f"the body has {len(sent)} bytes; at most {MAX_BODY_BYTES} are taken", status=413)
            body = json.loads(sent)
            json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair is no character
        except ClientDisconnect:
            return _problem("the body is not complete")
        except (ValueError, RecursionError) as error:
            return _problem(f"the body cannot be read as JSON: {error}")
        if not isinstance(body, dict):
            return _problem("the body is not a JSON object")
        try:
            given = await answer(request.path_params["path"], body)
        except RequestError as error:
            return _problem(str(error), status=error.status, code=error.code)
        return _stream(given) if body.get("stream") else JSONResponse(given)


def _unknown() -> Response:
    return _problem("there is no such session: it ends when the program that was given its address ends", status=404)


def _problem(text: str, *, status: int = 400, code: str = "invalid_request") -> Response:
    return JSONResponse({"error": {"message": text, "type": code, "code": code}}, status_code=status)


def _stream(given: dict[str, Any]) -> Response:
    """The whole answer as the one chunk of a stream of server-sent events, for programs that only know streams."""
    choices = [{**choice} for choice in given["choices"]]
    for choice in choices:
        if "message" in choice:
            message = choice.pop("message")
            calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls", ()))]
            choice["delta"] = {**message, "tool_calls": calls} if calls else message
    chunk = {**given, "object": given["object"].replace("chat.completion", "chat.completion.chunk"), "choices": choices}
    events = (f"data: {text}\n\n" for text in (json.dumps(chunk), "[DONE]"))
    return StreamingResponse(events, media_type="text/event-stream")
