"""The page: what its server answers, and what a real browser shows of it."""

from __future__ import annotations

import csv
import http.client
import io
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
from tests.monitor.listening import can_listen
from tests.monitor.made_up import START, MadeUpPeer, MadeUpRun, made_up_stages

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


@pytest.fixture
def rich() -> MadeUpRun:
    """A run of two minutes, with all that a page can show."""
    run = MadeUpRun(RunView("run", goal_epochs=40), 13, with_extras=True)
    for second in range(125):
        run.pass_second()
        if second == 40:
            run.peers[2].failed += 1
        if second == 60:
            run.view.hear_goodbye(run.peers.pop().peer, run.now)
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


def test_stream_starts_complete_then_sends_changes(made_up):
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


def read_csv(server: PageServer, path: str) -> list[dict[str, str]]:
    status, headers, content = ask(server, path)
    assert (status, headers.get_content_type()) == (200, "text/csv")
    assert "attachment" in headers["content-disposition"]
    return list(csv.DictReader(io.StringIO(content.decode())))


def test_tables_for_other_programs(rich):
    with serving(rich.view) as server:
        peers = read_csv(server, "/peers.csv")
        assert [row["peer"] for row in peers] == [str(peer) for peer in rich.view.peers]
        assert peers[0]["name"] == "lab-0"
        history = read_csv(server, "/history.csv?level=1")
        assert float(history[-1]["peers"]) == 12
        assert history[0]["time"].endswith("+00:00")
        assert "figure/held-out loss" in history[0]
        assert ask(server, "/history.csv?level=9")[0] == 404
        events = read_csv(server, "/events.csv")
        assert {event["kind"] for event in events} >= {"left", "epoch", "failed"}


def test_spreadsheet_formulas_are_quoted():
    view, rng = RunView("run"), random.Random(0)
    peer = MadeUpPeer(rng, 0, "=HYPERLINK(1)")
    view.hear_progress(peer.record(START, 1), START + 60, START)
    report = msgspec.structs.replace(peer.report(START, START, 1), link="@x", metrics={"loss": -1.0})
    view.hear_report(peer.peer, report, START)
    with serving(view) as server:
        (row,) = read_csv(server, "/peers.csv")
        assert (row["name"], row["link"], row["loss"]) == ("'=HYPERLINK(1)", "'@x", "-1.0")


def test_details_of_one_peer(rich):
    peer = str(rich.peers[0].peer)
    with serving(rich.view) as server:
        told = json.loads(ask(server, f"/peer?id={peer}")[2])
        assert (told["peer"], told["name"]) == (peer, "lab-0")
        assert set(told["figures"]) == {"loss", "accuracy", "held-out loss"}
        assert ask(server, "/peer?id=nobody")[0] == 404
        assert ask(server, "/peer")[0] == 404


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


def test_page_is_read_only(made_up):
    with serving(made_up.view) as server:
        for path in (
            "/",
            "/page.js",
            "/page.css",
            "/uPlot.iife.min.js",
            "/uPlot.min.css",
            "/history?level=2",
            "/peers.csv",
            "/events.csv",
            "/history.csv",
        ):
            status, headers, _ = ask(server, path)
            assert status == 200, path
            assert "default-src 'self'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                assert ask(server, path, method)[0] == 405
        levels = [f"/history?level={level}" for level in ("3", "-1", "x")]
        for path in (*levels, "/index.html", "/page.py", "/..%2Fpage.py"):
            assert ask(server, path)[0] == 404, path


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::1"])
def test_page_on_loopback_rejects_foreign_names(made_up, host):
    """A web site whose name leads to this machine could read the page otherwise."""
    if not can_listen(host):
        pytest.skip(f"this machine has no {host}")
    with serving(made_up.view, host=host) as server:
        for path in ("/", "/events", "/peers.csv", "/nothing"):
            status, headers, text = ask(server, path, Host="evil.example")
            assert status == 400, path
            assert b"'evil.example'" in text
            assert b"http://localhost" in text
            assert headers["x-content-type-options"] == "nosniff"
        own = urllib.parse.urlsplit(server.url).netloc
        for name in (own, "localhost", "localhost:1", "127.0.0.1:2", "[::1]:9", "page.localhost"):
            assert ask(server, "/", Host=name)[0] == 200, name


def test_programs_that_send_no_name_are_answered(made_up):
    with serving(made_up.view) as server, visit(server) as visitor:
        visitor.sendall(b"GET /peers.csv HTTP/1.0\r\n\r\n")
        assert b" 200 " in visitor.recv(4096).partition(b"\r\n")[0]


def test_public_page_answers_any_name(made_up):
    with serving(made_up.view, host="0.0.0.0") as server:
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
def test_endless_requests_are_cut_off(made_up, monkeypatch, begins_with):
    monkeypatch.setattr("shoal.monitor.page.VISIT_SECONDS", 0.5)
    with serving(made_up.view) as server, visit(server) as visitor:
        visitor.sendall(begins_with)
        assert has_ended(visitor)


def test_slow_requests_get_no_extra_time(made_up, monkeypatch):
    monkeypatch.setattr("shoal.monitor.page.VISIT_SECONDS", 0.5)
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
    monkeypatch.setattr("shoal.monitor.page.MOST_VISITORS", 3)
    with serving(made_up.view) as server, following(server) as stream, ExitStack() as stack:
        next_event(stream)
        silent = [stack.enter_context(visit(server)) for _ in range(6)]
        assert ask(server, "/page.css")[0] == 200
        assert all(map(has_ended, silent[:4]))
        next_event(stream)
        silent[-1].sendall(b"GET /page.css HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert silent[-1].recv(12) == b"HTTP/1.1 200"


def test_whoever_follows_the_run_stays(made_up, monkeypatch):
    monkeypatch.setattr("shoal.monitor.page.VISIT_SECONDS", 2.0)
    monkeypatch.setattr("shoal.monitor.page.SECONDS_BETWEEN_NEWS", 0.05)
    with serving(made_up.view) as server, following(server) as stream:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            next_event(stream)


def test_stalled_streams_are_closed(made_up, monkeypatch):
    monkeypatch.setattr("shoal.monitor.page.VISIT_SECONDS", 0.5)
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


@contextmanager
def browsing(url: str, *, may_complain: bool = False, **look: Any) -> Iterator[Any]:
    """A browser that shows a page."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=BROWSER_MILLISECONDS)
        page = browser.new_page(**{"viewport": {"width": 1440, "height": 1200}, "color_scheme": "light", **look})
        page.set_default_timeout(BROWSER_MILLISECONDS)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        # Not wait_for_function, which the page forbids: it may evaluate no texts.
        page.locator("html[data-news]:not([data-news='1']):not([data-news='2'])").wait_for(state="attached")
        yield page
        assert may_complain or complaints == []
        browser.close()


def in_a_browser(test: Any) -> Any:
    """Mark of tests that start a browser."""
    is_missing = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
    return pytest.mark.slow(pytest.mark.leaves_something(is_missing(test)))


def shoot(page: Any, name: str, folder: Path) -> None:
    page.screenshot(path=Path(SHOTS or folder) / f"{name}.png", full_page=True)


@in_a_browser
def test_a_browser_shows_the_run(made_up, tmp_path):
    expect = pytest.importorskip("playwright.sync_api").expect
    hostile = MadeUpPeer(made_up.peers[0].rng, 1)
    made_up.peers.append(hostile)
    honest = hostile.report
    hostile.report = lambda *when: msgspec.structs.replace(honest(*when), version="<img src=x>")  # type: ignore[method-assign]
    with serving(made_up.view) as server, feeding(made_up), browsing(server.url) as page:
        assert page.locator("#run").text_content() == "run <b>"
        assert page.locator("#link").text_content() == "live"
        assert page.locator("#charts canvas").count() == 7, "one for the figure that peers report"
        assert page.locator("tr.row").count() == 50
        shoot(page, "light", tmp_path)
        page.locator("#more").click()
        assert page.locator("tr.row").count() == 61
        page.get_by_role("button", name="peer", exact=True).click()
        names = [name[1:] for name in page.locator("tr.row td:first-child span").all_text_contents()]
        ids = sorted(str(peer.peer) for peer in made_up.peers)
        assert names == [each[-8:] for each in ids], "sorted"
        page.locator("#filter").fill("<IMG")
        expect(page.locator("tr.row")).to_have_count(1, timeout=BROWSER_MILLISECONDS)
        assert page.locator("img").count() == 0, "texts of peers are text"
        assert page.locator("#since").text_content().endswith("shoal 0.1.0 (60), <img src=x> (1)")
        page.locator("#filter").fill("")
        page.get_by_role("button", name="1 day").click()
        gone = made_up.peers.pop(0)
        made_up.view.hear_goodbye(gone.peer, made_up.now)
        page.locator("#events .left").wait_for()
        colours = [page.evaluate("getComputedStyle(document.body).backgroundColor")]
        page.emulate_media(color_scheme="dark")
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert colours[0] != colours[1]
        shoot(page, "dark", tmp_path)


@in_a_browser
def test_the_page_comes_back_when_the_monitor_does(rich, monkeypatch):
    """A browser does not do so by itself after an answer that is no stream, such as that of a full server."""
    with serving(rich.view) as server, browsing(server.url, may_complain=True) as page:
        with monkeypatch.context() as patch:
            patch.setattr("shoal.monitor.page.MAX_STREAMS", 0)
            page.reload()
            page.locator("#link.lost").wait_for()
        page.locator("#link.live").wait_for()


@in_a_browser
def test_a_run_without_peers_says_so(tmp_path):
    view = RunView("run")
    view.tick(START)
    with serving(view) as server, browsing(server.url) as page:
        assert page.locator("#nobody").text_content() == "No peer has been seen yet."
        assert page.locator("#figures .value").first.text_content().strip() == "0"
        shoot(page, "empty", tmp_path)


@in_a_browser
def test_on_a_phone_only_the_table_scrolls_sideways(rich, tmp_path):
    look = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    made_up_stages(rich.view, [4.0], [2.0], [3.0] * 60, now=rich.now)
    with serving(rich.view) as server, feeding(rich), browsing(server.url, **look) as page:
        page.locator("figure[data-width='small']").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.locator("tr.row").first.tap()
        details = page.locator("tr.details dl")
        details.wait_for()
        assert details.bounding_box()["width"] <= 390
        shoot(page, "phone", tmp_path)


@in_a_browser
def test_values_follow_the_pointer_in_all_charts(rich, tmp_path):
    with serving(rich.view) as server, browsing(server.url) as page:
        history = rich.view.history.columns()

        def legend(title: str) -> list[str]:
            return page.locator(f"figure[data-title='{title}'] .series span").all_text_contents()

        latest = legend("Peers")
        assert latest == ["12", "1"]
        assert page.locator("figcaption time").all_text_contents() == [""] * 7
        chart = page.locator("figure[data-title='Loss'] .u-over")
        width = chart.bounding_box()["width"]
        chart.hover(position={"x": 1, "y": 50})
        page.locator("#point:not([hidden])").wait_for()
        assert legend("Peers") == ["13", "0"], "at the beginning, before one has left"
        loss = float(legend("Loss")[0])
        assert loss == pytest.approx(history["loss"][0], rel=0.03)
        assert page.locator("#point b").first.text_content() == legend("Loss")[0]
        assert len(set(page.locator("figcaption time").all_text_contents())) == 1, "one moment in all charts"
        shoot(page, "pointer", tmp_path)
        chart.hover(position={"x": width - 2, "y": 50})
        assert float(legend("Loss")[0]) < loss
        page.mouse.move(2, 2)
        assert legend("Peers") == latest


@in_a_browser
def test_an_axis_can_be_logarithmic(rich):
    with serving(rich.view) as server, browsing(server.url) as page:
        button = page.get_by_role("button", name="Loss: logarithmic axis")
        before = page.locator("figure[data-title='Loss'] canvas").screenshot()
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert page.locator("figure[data-title='Loss'] canvas").screenshot() != before
        page.get_by_role("button", name="Peers: logarithmic axis").click()  # with zeros
        button.click()
        assert button.get_attribute("aria-pressed") == "false"


@in_a_browser
def test_opened_row_shows_its_last_failure(rich, tmp_path):
    expect = pytest.importorskip("playwright.sync_api").expect
    peer = rich.peers[1]
    peer.failed = 3
    rich.pass_second()
    with serving(rich.view) as server, browsing(server.url) as page:
        row = page.locator(f"tr.row[data-peer='{peer.peer}']")
        for cell in (page.get_by_role("columnheader", name="last failure"), row.locator("td.failure span")):
            box = cell.bounding_box()
            assert box["x"] + box["width"] <= 1440
        failure = row.locator("td.failure span")
        assert failure.text_content() == "the others have left or continued"
        assert failure.evaluate("e => e.scrollHeight <= e.clientHeight + 1 && e.scrollWidth <= e.clientWidth")
        assert page.locator("#below .scroll").evaluate("e => e.scrollWidth <= e.clientWidth"), "the whole table is seen"
        button = row.get_by_role("button")
        button.focus()
        page.keyboard.press("Enter")
        details = page.locator("tr.details")
        expect(details).to_contain_text("warning: waited in vain")
        expect(details).to_contain_text(str(peer.peer))
        expect(details).to_contain_text("accuracy")
        assert button.get_attribute("aria-expanded") == "true"
        shoot(page, "details", tmp_path)
        page.keyboard.press("Enter")
        expect(details).to_have_count(0)
        assert row.locator("td.peer small").text_content() == "", "it has no name"
        named = page.locator(f"tr.row[data-peer='{rich.peers[0].peer}'] td.peer")
        assert named.locator("span").text_content() == "lab-0"
        assert named.locator("small").text_content() == f"…{str(rich.peers[0].peer)[-8:]}"


@in_a_browser
def test_epochs_do_not_bury_events(rich):
    with serving(rich.view) as server, browsing(server.url) as page:
        assert page.locator("#events li.epoch").count() == 0
        left = page.locator("#events li.left")
        assert left.count() == 1
        page.get_by_role("button", name="Epochs").click()
        assert page.locator("#events li.epoch").count() > 3
        page.get_by_role("button", name="Joins and leaves").click()
        assert left.count() == 0
        page.locator("#events li.failed").first.click()
        page.locator("tr.details").wait_for()


@in_a_browser
def test_headings_explain_themselves(rich):
    with serving(rich.view) as server, browsing(server.url) as page:
        headings = page.locator("h2, dt, th button, figcaption b, #kinds button, .log")
        unexplained = headings.evaluate_all(
            "all => all.filter(e => !e.closest('.details') && !e.dataset.tip).map(e => e.textContent)"
        )
        assert unexplained == []
        tip = page.locator("#tip:not([hidden])")
        page.get_by_text("samples per step").hover()
        assert "target_batch_size" in tip.text_content()
        page.get_by_role("button", name="last failure").focus()
        page.keyboard.press("Shift+Tab")
        assert "How others reach it" in tip.text_content(), "for keyboards, too"


@in_a_browser
def test_the_swarm_in_figures(rich):
    with serving(rich.view) as server, browsing(server.url) as page:
        tiles = dict(
            zip(
                page.locator("#figures dt").all_text_contents(),
                page.locator("#figures .value").all_text_contents(),
                strict=True,
            )
        )
        summary = rich.view.summary
        assert tiles["epoch"] == f"{summary.epoch} of 40"
        assert tiles["samples per step"].strip() == f"{summary.batch:,.0f}"
        assert tiles["samples so far"].strip() == f"{summary.samples:,.0f}"
        assert "min left" in page.locator("#figures .more").first.text_content()
        assert "running for" in page.locator("#since").text_content()
        assert page.locator("#others dt").all_text_contents() == ["accuracy", "held-out loss"]
        series = page.locator("figure[data-title='Loss'] .series").all_text_contents()
        assert [each.rstrip("0123456789.") for each in series] == ["mean", "median", "held-out loss"]


@in_a_browser
def test_the_chain_of_stages_is_a_picture(rich, tmp_path):
    expect = pytest.importorskip("playwright.sync_api").expect
    made_up_stages(rich.view, [4.0] * 5, [2.0, 1.5, 2.5], [3.0] * 6, [8.0, 9.0], now=rich.now)
    with serving(rich.view) as server, browsing(server.url) as page:
        stages = page.locator("#chain li")
        expect(stages).to_have_count(4)
        expect(page.locator("#chain .bottleneck b")).to_have_text("stage 1")
        heights = [band.bounding_box()["height"] for band in page.locator("#chain .band i").all()]
        assert heights[1] < heights[3] < heights[2] < heights[0]
        assert page.locator("#chain .dots i").count() == 16
        expect(page.locator("#stagesTold")).to_have_text("up to 6 microbatches/s")
        stages.nth(1).get_by_role("button").click()
        expect(page.locator("#stagePeers tbody tr")).to_have_count(3)
        expect(page.locator("#stagePeers tbody td").first).to_have_text("card-2")
        shoot(page, "stages", tmp_path)
        rich.view.tick(rich.now + 31)  # no record was renewed
        expect(page.locator("#chain .empty")).to_have_count(4)
