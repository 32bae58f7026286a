"""The live page: one or many runs, read from their folders while they run. Nothing is requested from outside, and the
page is offered to this machine only unless another address is asked for."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from miles.errors import ConfigError, StorageError
from miles.report import signals
from miles.report.diagnose import diagnose
from miles.report.findings import Finding
from miles.report.gpu_now import GpuHistory, gpu_charts
from miles.report.html import HUES, STATE_HUES, STATIC, environment, run_view
from miles.report.ranges import Ranges
from miles.report.runs import RunData, find_runs, open_run
from miles.report.sample_view import load_groups, search
from miles.report.summary import number, state
from miles.report.svg import Line, line_chart

LOCAL_HOSTS = ["localhost", "127.0.0.1", "[::1]", "testserver"]
GROUPS_PER_PAGE = 8
REWARDS = ("all", "right", "wrong", "mixed")
MAX_OVERLAY = 7
_FILE = re.compile(r"(rollout|eval)_\d{1,9}")
_WATCHED = ("metrics.jsonl", "log.txt", "events.jsonl", "pauses.jsonl", "config.yaml")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass
class Read:
    """A run as it was read last: from which files, and how long reading took."""

    stamp: tuple[Any, ...]
    run: RunData
    findings: list[Finding]
    time: float
    seconds: float


class RunStore:
    """The runs of some folders. A run is read again when its files changed, but never for more than a fifth of the
    time: a long log is read less often."""

    def __init__(self, roots: Sequence[Path], ranges: Ranges | None) -> None:
        self._roots = list(roots)
        self._ranges = ranges
        self._reads: dict[str, Read] = {}
        self._lock = threading.Lock()

    def paths(self) -> dict[str, Path]:
        """Name -> folder; a name that two folders share gets its parent in front."""
        found: dict[str, Path] = {}
        for root in self._roots:
            for path in find_runs(root):
                name = path.name if path.name not in found else f"{path.parent.name}/{path.name}"
                found[name] = path
        return found

    def read(self, name: str) -> Read:
        """Raises a 404 for a name that is not listed: names are never paths."""
        path = self.paths().get(name)
        if path is None:
            raise HTTPException(404, f"there is no run {name!r}")
        with self._lock:
            known = self._reads.get(name)
            stamp = tuple((path / file).stat().st_mtime_ns if (path / file).exists() else 0 for file in _WATCHED)
            now = time.monotonic()
            if known is not None and (known.stamp == stamp or now - known.time < 5 * known.seconds):
                return known
            try:
                run = open_run(path)
            except (ConfigError, StorageError) as error:
                raise HTTPException(503, str(error)) from error
            findings = diagnose(run, ranges=self._ranges)
            self._reads[name] = Read(stamp, run, findings, now, time.monotonic() - now)
            return self._reads[name]


def make_app(roots: Sequence[Path], *, ranges: Ranges | None = None, hosts: Sequence[str] = ()) -> Starlette:
    """The application. `hosts` are names, besides this machine's own, that the page may be asked under."""
    pages = _Pages(roots, ranges)
    routes = [
        Route("/", pages.shell),
        Route("/runs", pages.runs),
        Route("/view", pages.view),
        Route("/overlay", pages.overlay),
        Route("/samples", pages.samples),
        Route("/gpu", pages.gpu),
        Route("/static/{name}", pages.static),
    ]
    # A page of another site must not read this one by pointing its own name at this machine.
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_HOSTS, *hosts], www_redirect=False)
    return Starlette(routes=routes, middleware=[guard])


class _Pages:
    """The answers to requests. Plain functions: Starlette runs them in threads, so reading files blocks nothing."""

    def __init__(self, roots: Sequence[Path], ranges: Ranges | None) -> None:
        self._store, self._gpus, self._ranges = RunStore(roots, ranges), GpuHistory(), ranges

    def shell(self, request: Request) -> Response:
        return _page("dashboard.html.jinja", request)

    def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        types = {"style.css": "text/css", "page.js": "text/javascript", "dashboard.js": "text/javascript"}
        if name not in types:
            raise HTTPException(404)
        return Response((STATIC / name).read_bytes(), media_type=types[name], headers=HEADERS)

    def runs(self, request: Request) -> Response:
        """Every run with its state, for the list at the side."""
        listed = []
        for name in self._store.paths():
            read = self._store.read(name)
            run = read.run
            rewards = signals.values(run, "reward")
            findings = [finding for finding in read.findings if finding.level != "note"]
            listed.append(
                {
                    "name": name,
                    "state": state(run),
                    "hue": STATE_HUES[state(run)],
                    "steps": len(run.steps),
                    "total": run.number_setting("num_rollout"),
                    "reward": number(rewards[-1]) if rewards else "",
                    "alarms": len(findings) + sum(event["kind"] == "alarm" for event in run.events),
                    "files": _sample_files(run),
                }
            )
        return JSONResponse(listed, headers=HEADERS)

    def view(self, request: Request) -> Response:
        read = self._store.read(request.query_params.get("run", ""))
        alarms = [event for event in read.run.events if event["kind"] == "alarm"]
        view = run_view(read.run, read.findings, ranges=self._ranges)
        return _page("live.html.jinja", request, view=view, alarms=alarms[-20:])

    def overlay(self, request: Request) -> Response:
        """The eight signals of several runs over each other."""
        names = request.query_params.getlist("run")[:MAX_OVERLAY]
        runs = [(name, self._store.read(name).run) for name in names]
        charts = []
        for signal in signals.SIGNALS:
            lines = [
                Line(name, points, HUES[place])
                for place, (name, run) in enumerate(runs)
                if (points := signals.points(run, signal.key))
            ]
            charts.append((signal, Markup(line_chart(lines, title=signal.title, width=420, height=190))))
        legend = [(HUES[place], 0, name) for place, name in enumerate(names)]
        return _page("overlay.html.jinja", request, charts=charts, legend=legend)

    def samples(self, request: Request) -> Response:
        """A page of the groups of one step, those that match the search."""
        query = request.query_params
        run = self._store.read(query.get("run", "")).run
        file, reward, page = query.get("file", ""), query.get("reward", "all"), query.get("page", "0")
        if not _FILE.fullmatch(file) or reward not in REWARDS or not page.isdecimal():
            raise HTTPException(400, "samples need file=rollout_N or eval_N, a known reward and a page number")
        try:
            groups = load_groups(run, file)
        except FileNotFoundError as error:
            raise HTTPException(404, f"{file} of this run is not on disk") from error
        found = search(groups, query.get("q", ""), reward=reward)
        start, end = int(page) * GROUPS_PER_PAGE, (int(page) + 1) * GROUPS_PER_PAGE
        counts = {"found": len(found), "total": len(groups), "page": int(page), "more": len(found) > end}
        return _page("samples.html.jinja", request, groups=found[start:end], **counts)

    def gpu(self, request: Request) -> Response:
        return _html(gpu_charts(self._gpus.samples()), request)


def _sample_files(run: RunData) -> list[str]:
    evals = sorted(int(path.stem[5:]) for path in (run.path / "samples").glob("eval_*.parquet"))
    return [f"rollout_{step}" for step in reversed(run.sample_steps())] + [f"eval_{step}" for step in reversed(evals)]


def _page(template: str, request: Request, **shown: Any) -> Response:
    return _html(environment().get_template(template).render(**shown), request)


def _html(text: str, request: Request) -> Response:
    """With a tag of the content, so that a page that did not change is not sent again."""
    tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:20]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return HTMLResponse(text, headers=HEADERS | {"ETag": tag, "Cache-Control": "no-cache"})


def serve(roots: Sequence[Path], *, host: str, port: int, ranges: Ranges | None = None) -> None:
    """Serve until interrupted. Raises `ConfigError` when the port is taken."""
    app = make_app(roots, ranges=ranges, hosts=[host])
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    try:
        socket = config.bind_socket()
    except SystemExit as error:  # what uvicorn makes of an address that cannot be had
        raise ConfigError(f"--host {host} --port {port}: cannot listen there; choose another port") from error
    with socket:
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{socket.getsockname()[1]}/", flush=True)
        server.run(sockets=[socket])
