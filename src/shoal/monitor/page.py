"""The page: a small web server that shows a run, live.

All of its addresses are read-only: the page and its files; ``/history`` with the figures over time; ``/peer`` with
everything known about one peer; ``/peers.csv``, ``/stages.csv``, ``/history.csv`` and ``/events.csv`` for other
programs; and ``/events``, a stream (server-sent events) that begins with the whole state of the run, followed by the
changes of each second. Changes are encoded once for all browsers.
"""

from __future__ import annotations

import asyncio
import csv
import io
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import astuple
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.base.clock import get_dht_time
from shoal.base.local_names import why_not_answered
from shoal.monitor.run import COLUMNS, RunView, details_of
from shoal.p2p import PeerID

STATIC = Path(__file__).parent / "static"
FILES = {
    "page.js": "text/javascript",
    "page.css": "text/css",
    "uPlot.iife.min.js": "text/javascript",
    "uPlot.min.css": "text/css",
}
LOOPBACK = "127.0.0.1"
# The most browsers that may follow a run at the same time. Chosen, like the numbers below.
MAX_STREAMS = 64
SECONDS_BETWEEN_NEWS = 1.0
# The lifetime of a connection that does not follow the run, and the most connections of that kind.
VISIT_SECONDS, MOST_VISITORS = 60.0, 256
# Nothing from elsewhere is loaded, nothing is sent elsewhere, and no other page can frame this one.
SECURITY = {
    b"content-security-policy": b"default-src 'self'; img-src data:; style-src 'self' 'unsafe-inline'; "
    b"frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}

_encode = msgspec.json.Encoder().encode


class _Secured:
    """Adds the headers of :data:`SECURITY` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *SECURITY.items()]
            await send(message)

        await self._app(scope, receive, send_secured)


class _ForThisMachine:
    """Refuses requests to the names of web sites, see :mod:`shoal.base.local_names`."""

    def __init__(self, app: ASGIApp, bound: str, chosen: str) -> None:
        self._app, self._bound, self._chosen = app, bound, chosen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = why_not_answered(self._bound, Headers(scope=scope).get("host"), self._chosen)
        answer = self._app if refusal is None else PlainTextResponse(refusal, status_code=400)
        await answer(scope, receive, send)


class Page:
    """The content of the page.

    Args:
        view: the run; the caller keeps it up to date.
        bound: the IP address at which its server listens.
        chosen: where the user told it to listen.
    """

    def __init__(self, view: RunView, bound: str, chosen: str) -> None:
        self._view = view
        self._streams = 0
        self._news: tuple[tuple[int, int, int], bytes] = ((-1, -1, -1), b"")
        self.closing = False
        self.app = Starlette(
            routes=[
                Route("/", self._index),
                Route("/events", self._events),
                Route("/history", self._history),
                Route("/peer", self._peer),
                Route("/peers.csv", self._peers_csv),
                Route("/history.csv", self._history_csv),
                Route("/events.csv", self._events_csv),
                Route("/stages.csv", self._stages_csv),
                Route("/{name}", self._file),
            ],
            middleware=[Middleware(_Secured), Middleware(_ForThisMachine, bound=bound, chosen=chosen)],
        )

    async def _index(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FILES:
            return PlainTextResponse("there is no such page", status_code=404)
        return FileResponse(STATIC / name, media_type=FILES[name])

    def _columns_of(self, request: Request) -> dict[str, list[float | None]] | Response:
        """The requested history, or the answer that there is none."""
        level = request.query_params.get("level", "0")
        if level not in [str(number) for number in range(len(self._view.history.spans))]:
            return PlainTextResponse(f"there is no level {level[:20]!r}", status_code=404)
        with self._view.lock:
            return self._view.history.columns(int(level))

    async def _history(self, request: Request) -> Response:
        columns = self._columns_of(request)
        return columns if isinstance(columns, Response) else Response(_encode(columns), media_type="application/json")

    async def _history_csv(self, request: Request) -> Response:
        columns = self._columns_of(request)
        if isinstance(columns, Response):
            return columns
        rows = zip(map(_in_words, columns.pop("time")), *columns.values(), strict=True)
        return _csv("history", ["time", *columns], rows)

    async def _peer(self, request: Request) -> Response:
        wanted = request.query_params.get("id", "")
        with self._view.lock, suppress(ValueError, KeyError):
            view = self._view.peers[PeerID.from_base58(wanted)]
            return Response(_encode(details_of(view, get_dht_time())), media_type="application/json")
        return PlainTextResponse(f"there is no peer {wanted[:80]!r}", status_code=404)

    async def _peers_csv(self, request: Request) -> Response:
        with self._view.lock:
            rows = self._view.rows_since(0)
        return _csv("peers", COLUMNS, rows)

    async def _events_csv(self, request: Request) -> Response:
        with self._view.lock:
            events = self._view.events.since()
        rows = ([_in_words(event.time), event.kind, event.peer, event.text] for event in events)
        return _csv("events", ["time", "kind", "peer", "text"], rows)

    async def _stages_csv(self, request: Request) -> Response:
        with self._view.lock:
            stages = self._view.stages.rows
        head = ("stage", "peer", "name", "state", "microbatches/s", "queue", "room", "epoch")
        rows = [[stage.stage, *astuple(peer)] for stage in stages for peer in stage.peers]
        return _csv("stages", head, rows)

    async def _events(self, request: Request) -> Response:
        if self._streams >= MAX_STREAMS:
            return PlainTextResponse(f"{MAX_STREAMS} browsers follow this run already", status_code=503)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        if self._streams >= MAX_STREAMS:  # many browsers came at once: this one gets an empty stream, and tries again
            return
        self._streams += 1
        stay()
        try:
            with self._view.lock:
                change, number = self._view.change, self._view.events.count
                told = self._message(self._everything())
            yield told
            while not self.closing:
                await asyncio.sleep(SECONDS_BETWEEN_NEWS)
                stay()
                with self._view.lock:
                    told = self._news_since(change, number)
                    change, number = self._view.change, self._view.events.count
                yield told
        finally:
            self._streams -= 1

    @staticmethod
    def _message(content: dict[str, Any]) -> bytes:
        return b"data: " + _encode(content) + b"\n\n"

    def _everything(self) -> dict[str, Any]:
        view = self._view
        return {
            "run": view.run,
            "columns": COLUMNS,
            "spans": view.history.spans,
            "rows": view.rows_since(0),
            "events": view.events.latest(200),
            "stages": view.stages.rows,
            "summary": view.summary,
            "point": None if view.summary is None else view.summary.values(),
        }

    def _news_since(self, change: int, number: int) -> bytes:
        view = self._view
        key = change, number, view.change
        if self._news[0] != key:
            content = {
                "rows": view.rows_since(change),
                "gone": [peer for when, peer in view.removed if when >= change],
                "events": view.events.since(number),
                "stages": view.stages.rows if view.stages.change >= change else None,
                "summary": view.summary,
                "point": None if view.summary is None else view.summary.values(),
            }
            self._news = key, self._message(content)
        return self._news[1]


def _in_words(time: float | None) -> str:
    return "" if time is None else datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")


def _csv(name: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Response:
    """A table for other programs. Peers choose texts, so texts that a spreadsheet would evaluate are quoted."""

    def cell(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value

    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(map(cell, head))
    writer.writerows([cell(value) for value in row] for row in rows)
    headers = {"content-disposition": f'attachment; filename="{name}.csv"'}
    return Response(file.getvalue(), media_type="text/csv", headers=headers)


# --- connections ------------------------------------------------------------------------------------------------------
#
# Anybody who can reach the page may connect to it, and requests cost a visitor nothing. So a connection ends a minute
# after it began, whatever was requested; browsers make another one when they need it. Only a connection that follows
# the run stays open, as long as its browser reads what it is sent. When there are too many others, the oldest closes.

_visitor: ContextVar[Visitor] = ContextVar("visitor")


class Visitor(H11Protocol):
    """A connection.

    Args:
        waiting: the connections of this server that do not follow the run, the oldest first.
        options: uvicorn's options for its connections.
    """

    def __init__(self, waiting: dict[Visitor, None], **options: Any) -> None:
        super().__init__(**options)
        self._waiting = waiting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = self.loop.call_later(VISIT_SECONDS, transport.abort)
        self._waiting[self] = None
        if len(self._waiting) > MOST_VISITORS:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        _visitor.set(self)  # the tasks that answer start in this call
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        self._waiting.pop(self, None)
        super().connection_lost(exc)

    def stay(self) -> None:
        """Stay for one more period, if the browser keeps up with what it is sent."""
        self._waiting.pop(self, None)
        if not self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self._end.cancel()
            self._end = self.loop.call_later(VISIT_SECONDS, self.transport.abort)


def stay() -> None:
    """Keep the connection whose request is being answered. Call this again before its time is up."""
    _visitor.get().stay()


# --- the server -------------------------------------------------------------------------------------------------------


class PageServer:
    """Serves the page in a thread of its own.

    Args:
        view: the run.
        port: 0 = any free one.
        host: the address to listen on. By default only programs on this machine can see the page. On a loopback address
            it answers only to names of this machine.

    Raises:
        OSError: the port is taken, or the address is not one of this machine.
    """

    def __init__(self, view: RunView, port: int = 0, host: str = LOOPBACK) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        try:
            if os.name == "posix":  # on Windows this option would let another program take the port
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen()  # from now on, browsers wait until the thread has begun
        except BaseException:
            self._socket.close()
            raise
        self._page = Page(view, self._socket.getsockname()[0], host)
        shown = f"[{host}]" if family is socket.AF_INET6 else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}/"
        """The URL of the page."""
        config = uvicorn.Config(
            self._page.app,
            http=partial(Visitor, {}),  # type: ignore[arg-type]
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            loop="asyncio",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="monitor page", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._page.closing = self._server.should_exit = True
        self._thread.join(5.0)
        self._socket.close()
