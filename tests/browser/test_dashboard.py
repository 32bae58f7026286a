"""The live page in a real browser: what it shows, what it does, and that it asks for nothing from outside."""

import asyncio
import threading
from urllib.parse import urlsplit

import pytest
import uvicorn

from miles.report.html import render_report
from miles.report.runs import open_run
from miles.report.server import make_app
from tests.browser.chrome import BINARY, browser
from tests.unit.report.folders import make_run, sample

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs Chromium: apt-get install chromium")


def _samples(step):
    return [
        sample(
            g, 2 * g + a, prompt=f"prompt {g} of step {step}", response="<i>six</i>" if a else "42", reward=float(not a)
        )
        for g in range(12)
        for a in range(2)
    ]


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "first", [0.1 * n for n in range(6)], samples=_samples, lr=1e-6, num_rollout=6)
    make_run(tmp_path / "second", [0.05 * n for n in range(6)], samples=_samples, lr=1e-5, finish=False)
    return tmp_path


@pytest.fixture
def address(runs):
    config = uvicorn.Config(make_app([runs]), host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    socket.close()


def _in_browser(steps):
    async def whole():
        async with browser() as page:
            await steps(page)
            assert page.errors == []
            return page.requests

    return asyncio.run(whole())


def test_page_shows_runs_signals_and_samples_and_asks_nobody_else(address):
    async def steps(page):
        await page.open(address + "/#run=first")
        await page.until("document.querySelectorAll('#signals svg').length === 7")
        assert await page.run(
            "[...document.querySelectorAll('nav .name')].map((n) => n.textContent).sort().join()"
        ) == ("first,second")
        assert await page.run("document.querySelector('#view h1').textContent") == "first"
        await page.until("document.querySelectorAll('#samples details').length === 8")
        assert "12 of 12 groups" in await page.run("document.getElementById('found').textContent")

        await page.run("document.getElementById('next').click()")
        await page.until("document.querySelectorAll('#samples details').length === 4")

        await page.run(
            "document.getElementById('pick-text').value = 'PROMPT 11'; document.getElementById('pick-text').oninput()"
        )
        await page.until("document.getElementById('found').textContent.startsWith('1 of 12')")
        assert await page.run("document.querySelectorAll('#samples i').length") == 0, "answers are text, not markup"

    hosts = {urlsplit(request).netloc for request in _in_browser(steps) if not request.startswith("data:")}
    assert hosts == {urlsplit(address).netloc}


def test_theme_is_kept_and_both_are_readable(address):
    contrast = """(() => {
      const light = (text) => text.match(/\\d+/g).slice(0, 3).map(Number).reduce((sum, part) => sum + part, 0);
      const style = getComputedStyle(document.body);
      return light(style.color) - light(style.backgroundColor);
    })()"""

    async def steps(page):
        await page.open(address)
        await page.run("document.documentElement.dataset.theme = 'light'")
        assert await page.run(contrast) < -400
        await page.run("document.getElementById('theme').click()")
        assert await page.run("document.documentElement.dataset.theme") == "dark"
        assert await page.run(contrast) > 400
        await page.open(address + "/?again")
        assert await page.run("document.documentElement.dataset.theme") == "dark"

    _in_browser(steps)


def test_a_step_that_is_written_appears(address, runs):
    async def steps(page):
        await page.open(address + "/#run=second")
        await page.until("document.querySelector('#view h1')?.textContent === 'second'")
        path = runs / "second" / "metrics.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines, lines[-1].replace('"step": 5', '"step": 6')]) + "\n")
        await page.until("document.querySelector('#view header').textContent.includes('7 steps')")

    _in_browser(steps)


def test_ticked_runs_are_laid_over_each_other(address):
    async def steps(page):
        await page.open(address)
        await page.until("document.querySelectorAll('nav input').length === 2")
        await page.run("document.querySelectorAll('nav input').forEach((box) => box.click())")
        await page.run("document.getElementById('overlay').click()")
        await page.until("document.getElementById('overlay-card')")
        paths = "document.querySelectorAll('#overlay-card figure:first-child path.bold').length"
        assert await page.run(paths) == 2

    _in_browser(steps)


def test_the_report_works_as_a_file(runs, tmp_path):
    page_file = tmp_path / "report.html"
    page_file.write_text(render_report(open_run(runs / "first")))

    async def steps(page):
        await page.open(page_file.as_uri())
        await page.run(
            "document.querySelector('#signals svg').dispatchEvent("
            "new MouseEvent('mousemove', {bubbles: true, clientX: 300, clientY: 300}))"
        )
        assert (await page.run("document.getElementById('tip').textContent")).startswith("step ")
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")

    assert {request.split(":")[0] for request in _in_browser(steps)} <= {"file", "data"}
