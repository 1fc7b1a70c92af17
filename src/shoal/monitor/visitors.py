"""Connections to the page: few at a time, and none that lasts without use.

Whoever can reach the page may connect to it, and what a visitor begins to ask costs him nothing. So a connection ends a
minute after it began, whatever was asked by then; browsers make another one when they need it. Only one that follows
the run stays, as long as its browser takes what it is sent. Where too many others are there, the oldest makes room.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 60.0
MOST_WAITING = 256

_visitor: ContextVar[Visitor] = ContextVar("visitor")


class Visitor(H11Protocol):
    """A connection.

    Args:
        waiting: the connections of this server that follow nothing, the oldest first.
        options: what uvicorn gives to its connections.
    """

    def __init__(self, waiting: dict[Visitor, None], **options: Any) -> None:
        super().__init__(**options)
        self._waiting = waiting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = self.loop.call_later(SECONDS, transport.abort)
        self._waiting[self] = None
        if len(self._waiting) > MOST_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        _visitor.set(self)  # tasks that answer begin in here
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        self._waiting.pop(self, None)
        super().connection_lost(exc)

    def stay(self) -> None:
        """Go on for as long again, if all that was sent is on its way."""
        self._waiting.pop(self, None)
        if not self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self._end.cancel()
            self._end = self.loop.call_later(SECONDS, self.transport.abort)


def stay() -> None:
    """The visitor whose request is being answered follows the run. To be called again and again."""
    _visitor.get().stay()
