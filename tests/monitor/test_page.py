"""The page: what its server answers, and what a real browser shows of it."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shoal.monitor.page import PageServer
from shoal.monitor.run import COLUMNS, RunView
from tests.monitor.made_up import START, MadeUpPeer, MadeUpRun

# A busy machine starts a browser slowly.
pytestmark = pytest.mark.timeout(240)
BROWSER_MILLISECONDS = 200_000
SHOTS = os.environ.get("SHOAL_SCREENSHOTS", "")
"""A folder in which the browser test leaves its pictures, for people who want to look at them."""


@pytest.fixture
def made_up() -> MadeUpRun:
    run = MadeUpRun(RunView("run <b>"), 60)
    for _ in range(45):
        run.pass_second()
    return run


@contextmanager
def serving(view: RunView, **options: Any) -> Iterator[PageServer]:
    with closing(PageServer(view, **options)) as server:
        yield server


def connect(server: PageServer) -> http.client.HTTPConnection:
    address = urllib.parse.urlsplit(server.url)
    return http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)


def ask(
    server: PageServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    with closing(connect(server)) as connection:
        connection.request(method, path, headers=headers)
        with connection.getresponse() as answer:
            return answer.status, answer.headers, answer.read()


@contextmanager
def following(server: PageServer) -> Iterator[http.client.HTTPResponse]:
    with closing(connect(server)) as connection:
        connection.request("GET", "/events")
        with connection.getresponse() as stream:
            assert stream.status == 200
            yield stream


def next_event(stream: http.client.HTTPResponse) -> dict[str, Any]:
    line = stream.readline()
    assert line.startswith(b"data: ")
    assert stream.readline() == b"\n"
    return json.loads(line[6:])


def test_the_stream_begins_with_everything_and_goes_on_with_what_changes(made_up):
    with serving(made_up.view) as server, following(server) as stream:
        first = next_event(stream)
        assert (first["run"], first["columns"], len(first["rows"])) == ("run <b>", list(COLUMNS), 60)
        assert first["summary"]["peers"] == first["point"]["peers"] == 60
        assert {event["kind"] for event in first["events"]} >= {"epoch"}
        with made_up.view.lock:
            gone, made_up.peers = made_up.peers[0], made_up.peers[1:4]
            made_up.pass_second()
            made_up.view.hear_goodbye(gone.peer, made_up.now)
        news = next_event(stream)
        assert {row[0] for row in news["rows"]} == {str(peer.peer) for peer in (gone, *made_up.peers)}
        assert "left" in [event["kind"] for event in news["events"]]
        assert next_event(stream)["events"] == []


def test_numbers_that_are_not_known_are_null():
    view = RunView("run")
    peer = MadeUpPeer(random.Random(0), 0)
    view.hear_progress(peer.record(START, 1), START + 60, START)
    view.tick(START)
    with serving(view) as server:
        with following(server) as stream:
            assert next_event(stream)["summary"]["step"] is None
        history = json.loads(ask(server, "/history?level=1")[2])
        assert history["step"] == [None]
        assert history["peers"] == [1]


def test_there_is_nothing_to_write_and_nothing_but_the_page(made_up):
    with serving(made_up.view) as server:
        for path in ("/", "/page.js", "/page.css", "/uPlot.iife.min.js", "/uPlot.min.css", "/history?level=2"):
            status, headers, _ = ask(server, path)
            assert status == 200, path
            assert "default-src 'self'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                assert ask(server, path, method)[0] == 405
        levels = [f"/history?level={level}" for level in ("3", "-1", "x")]
        for path in (*levels, "/index.html", "/page.py", "/..%2Fpage.py"):
            assert ask(server, path)[0] == 404, path


def test_other_names_of_this_machine_are_not_answered(made_up):
    """A web site whose name leads to this machine could read the page otherwise."""
    with serving(made_up.view) as server:
        assert ask(server, "/events", Host="evil.example")[0] == 400
        assert ask(server, "/", Host="localhost:1")[0] == 200
    with serving(made_up.view, host="localhost") as server:
        assert ask(server, "/events", Host="evil.example")[0] == 400
    with serving(made_up.view, host="127.0.0.2") as server:
        assert server.url.startswith("http://127.0.0.2:")
        assert ask(server, "/", Host="lab.example")[0] == 200, "the user wanted others to see it"


def test_only_so_many_browsers_are_served(made_up, monkeypatch):
    monkeypatch.setattr("shoal.monitor.page.MAX_STREAMS", 2)
    with serving(made_up.view) as server, following(server) as one, following(server) as other:
        next_event(one)
        next_event(other)
        assert ask(server, "/events")[0] == 503


def test_so_many_also_if_all_come_at_once(made_up, monkeypatch):
    monkeypatch.setattr("shoal.monitor.page.MAX_STREAMS", 2)
    with serving(made_up.view) as server, ExitStack() as stack:
        browsers = [stack.enter_context(closing(connect(server))) for _ in range(20)]
        for browser in browsers:
            browser.connect()
        for browser in browsers:
            browser.request("GET", "/events")
        answers = [stack.enter_context(browser.getresponse()) for browser in browsers]
        followed = [answer for answer in answers if answer.status == 200 and answer.readline()]
        assert len(followed) == 2


# --- who asks slowly, or not at all -----------------------------------------------------------------------------------


def visit(server: PageServer) -> socket.socket:
    address = urllib.parse.urlsplit(server.url)
    return socket.create_connection((address.hostname or "", address.port), timeout=60)


def has_ended(visitor: socket.socket) -> bool:
    """Wait until the server ends a connection, on which it has answered nothing."""
    try:
        return visitor.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("begins_with", [b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_request_that_never_ends_is_not_waited_for(made_up, monkeypatch, begins_with):
    monkeypatch.setattr("shoal.monitor.visitors.SECONDS", 0.5)
    with serving(made_up.view) as server, visit(server) as visitor:
        visitor.sendall(begins_with)
        assert has_ended(visitor)


def test_a_request_that_comes_line_by_line_is_not_waited_for_longer(made_up, monkeypatch):
    monkeypatch.setattr("shoal.monitor.visitors.SECONDS", 0.5)
    with serving(made_up.view) as server, visit(server) as visitor:
        visitor.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        visitor.settimeout(0.05)
        answer: bytes | None = None
        while answer is None:
            with suppress(TimeoutError):
                visitor.sendall(b"X: y\r\n")
                answer = visitor.recv(1)
        assert answer == b""


def test_the_oldest_of_many_silent_visitors_makes_room(made_up, monkeypatch):
    monkeypatch.setattr("shoal.monitor.visitors.MOST_WAITING", 3)
    with serving(made_up.view) as server, following(server) as stream, ExitStack() as stack:
        next_event(stream)
        silent = [stack.enter_context(visit(server)) for _ in range(6)]
        assert ask(server, "/page.css")[0] == 200
        assert all(map(has_ended, silent[:4]))
        next_event(stream)
        silent[-1].sendall(b"GET /page.css HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert silent[-1].recv(12) == b"HTTP/1.1 200"


def test_whoever_follows_the_run_stays(made_up, monkeypatch):
    monkeypatch.setattr("shoal.monitor.visitors.SECONDS", 2.0)
    monkeypatch.setattr("shoal.monitor.page.SECONDS_BETWEEN_NEWS", 0.05)
    with serving(made_up.view) as server, following(server) as stream:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            next_event(stream)


def test_whoever_takes_no_news_leaves_the_place_to_others(made_up, monkeypatch):
    monkeypatch.setattr("shoal.monitor.visitors.SECONDS", 0.5)
    monkeypatch.setattr("shoal.monitor.page.SECONDS_BETWEEN_NEWS", 0.01)
    monkeypatch.setattr("shoal.monitor.page.MAX_STREAMS", 1)
    monkeypatch.setattr(RunView, "rows_since", lambda *_: ["much" * 2**20])
    with serving(made_up.view) as server, following(server):
        while ask(server, "/events", method="HEAD")[0] == 503:
            pass


def test_a_port_that_is_taken_is_an_error(made_up):
    with serving(made_up.view) as server, pytest.raises(OSError, match=r"in use|permitted"):
        PageServer(made_up.view, urllib.parse.urlsplit(server.url).port or 0)


# --- in a browser -----------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def feeding(run: MadeUpRun) -> Iterator[None]:
    ended = threading.Event()

    def feed() -> None:
        while not ended.wait(0.5):
            run.pass_second()

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.leaves_something
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_a_browser_shows_the_run(made_up, tmp_path, monkeypatch):
    playwright = pytest.importorskip("playwright.sync_api")
    hostile = MadeUpPeer(made_up.peers[0].rng, 1)
    made_up.peers.append(hostile)
    honest = hostile.report
    hostile.report = lambda *when: msgspec.structs.replace(honest(*when), version="<img src=x>")  # type: ignore[method-assign]
    shots = Path(SHOTS or tmp_path)
    with serving(made_up.view) as server, feeding(made_up), playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=BROWSER_MILLISECONDS)
        page = browser.new_page(viewport={"width": 1280, "height": 1200}, color_scheme="light")
        page.set_default_timeout(BROWSER_MILLISECONDS)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url)
        # Not wait_for_function, which the page forbids: it may evaluate no texts.
        page.locator("html[data-news]:not([data-news='1']):not([data-news='2'])").wait_for(state="attached")
        assert page.locator("#run").text_content() == "run <b>"
        assert page.locator("#link").text_content() == "live"
        assert page.locator("#charts canvas").count() == 4
        assert page.locator("#rows tr").count() == 50
        page.screenshot(path=shots / "light.png")
        page.locator("#more").click()
        assert page.locator("#rows tr").count() == 61
        page.get_by_role("button", name="peer", exact=True).click()
        names = [name[1:] for name in page.locator("#rows tr td:first-child").all_text_contents()]
        ids = sorted(str(peer.peer) for peer in made_up.peers)
        assert names == [each[-8:] for each in ids], "sorted"
        page.locator("#filter").fill("<IMG")
        playwright.expect(page.locator("#rows tr")).to_have_count(1, timeout=BROWSER_MILLISECONDS)
        assert page.locator("img").count() == 0, "texts of peers are text"
        page.locator("#filter").fill("")
        page.get_by_role("button", name="1 day").click()
        gone = made_up.peers.pop(0)
        made_up.view.hear_goodbye(gone.peer, made_up.now)
        page.locator("#events .left").wait_for()
        colours = [page.evaluate("getComputedStyle(document.body).backgroundColor")]
        page.emulate_media(color_scheme="dark")
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert colours[0] != colours[1]
        page.screenshot(path=shots / "dark.png")
        page.set_viewport_size({"width": 390, "height": 1600})
        page.locator("figure[data-width='small']").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "only the table scrolls sideways"
        page.screenshot(path=shots / "narrow.png")
        assert complaints == []
        # A browser does not come back by itself after an answer that is no stream, such as that of a full server.
        with monkeypatch.context() as patch:
            patch.setattr("shoal.monitor.page.MAX_STREAMS", 0)
            page.reload()
            page.locator("#link.lost").wait_for()
        page.locator("#link.live").wait_for()
        browser.close()
