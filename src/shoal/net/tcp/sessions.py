"""Raw sessions over TCP: connections that begin with a cookie instead of a handshake.

On a listening port, the first byte tells a session from TLS, and a cookie of 32 bytes follows it. Only the cookie says
what the session is for: the side that gave it out gets the session, once.

Sockets of sessions are not handed to the event loop: exactly the requested bytes are read, because a TLS handshake may
follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.errors import StreamClosedError
from shoal.net.tcp.stream import (
    address_of,
    is_broken_off,
)
from shoal.net.transport import Buffer, Session
from shoal.peers.multiaddr import Multiaddr

logger = logging.getLogger(__name__)

SESSION_BYTE = b"\x05"
"""The first byte of a session. Chosen; that of TLS is 0x16."""

T = TypeVar("T")

# Chosen: more bytes at once save few calls, and each way of each circuit holds as many.
MOST_AT_ONCE = 2**16


class TcpSession(Session):
    """A connected socket.

    Args:
        connected: non-blocking, and no longer used by anything else.
        live: the session is in this set as long as it has the socket.
        punchable: whether other sockets may share its local port.

    Raises:
        OSError: the connection is over already.
    """

    local_address: Multiaddr
    remote_address: Multiaddr
    look_seconds = 1.0

    def __init__(self, connected: socket.socket, live: set[TcpSession], *, punchable: bool = False) -> None:
        self.local_address = address_of(*connected.getsockname()[:2])
        self.remote_host, port = connected.getpeername()[:2]
        """The IP address at the other end, which may be that of a proxy."""
        self.remote_address = address_of(self.remote_host, port)
        self.is_punchable = punchable
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = connected
        self._operations: set[asyncio.Task[Any]] = set()
        self._live = live
        self._patience: asyncio.TimerHandle | None = None
        self._reason = "this side closed the connection"
        live.add(self)

    @property
    def closed(self) -> bool:
        """Whether it has ended or was taken over."""
        return self._socket is None

    def use_within(self, seconds: float) -> None:
        """End unless it is used soon: the side that expected it may have given up just as it came."""
        self._patience = self._loop.call_later(seconds, self._end, "nobody has used this session in time")

    async def write(self, data: Buffer) -> None:
        await self._do(self._loop.sock_sendall(self._open_socket(), data))

    def write_some(self, data: Buffer) -> int:
        connected = self._open_socket()
        with contextlib.suppress(OSError):  # it takes nothing now, or what is wrong shows later
            return connected.send(data)
        return 0

    async def read_exactly(self, size: int) -> bytes:
        arrived = b""
        while len(arrived) < size:
            piece = await self._do(self._loop.sock_recv(self._open_socket(), size - len(arrived)))
            if not piece:
                self._end("the other side closed the connection")
                raise StreamClosedError(self._reason)
            arrived += piece
        return arrived

    async def read_some(self) -> bytes:
        await asyncio.sleep(0)  # data may never run out, and other tasks want their turn
        connected = self._open_socket()
        with contextlib.suppress(OSError):  # nothing has arrived, or what is wrong shows below
            return connected.recv(MOST_AT_ONCE)
        return await self._do(self._loop.sock_recv(connected, MOST_AT_ONCE))

    def is_broken_off(self) -> bool:
        return self._socket is not None and is_broken_off(self._socket)

    def _open_socket(self) -> socket.socket:
        """The socket, for the present user of the session."""
        self._stop_patience()
        if self._socket is None:
            raise StreamClosedError(self._reason)
        return self._socket

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    async def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something with the socket, in a task that :meth:`abort` can end before it closes the socket."""
        operation = self._loop.create_task(work)
        operation.add_done_callback(_look_at_error)
        self._operations.add(operation)
        try:
            await asyncio.wait([operation])
        except asyncio.CancelledError:
            self.abort()  # a message may be half sent or half read, so nothing can follow
            raise
        finally:
            self._operations.discard(operation)
        if operation.cancelled():
            raise StreamClosedError(self._reason)
        error = operation.exception()
        if isinstance(error, OSError):
            self._end(f"the connection broke: {error.strerror or error}")
            raise StreamClosedError(self._reason) from error
        return operation.result()

    def detach(self) -> socket.socket:
        """Take the socket over. The caller then has to close it or pass it on.

        Raises:
            StreamClosedError: the session has ended, or was taken over before.
        """
        connected = self._open_socket()
        if self._operations:
            raise RuntimeError("somebody still reads or writes on this session: let that end first")
        self._reason = "the session has been taken over"
        self._socket = None
        self._live.discard(self)
        return connected

    def abort(self) -> None:
        self._end(self._reason)

    def _end(self, reason: str) -> None:
        connected, self._socket = self._socket, None
        if connected is None:
            return
        self._reason = reason
        self._stop_patience()
        self._live.discard(self)
        running = [operation for operation in self._operations if not operation.done()]
        if not running:
            connected.close()
            return
        # The loop still watches the socket.
        asyncio.gather(*running, return_exceptions=True).add_done_callback(lambda _: connected.close())
        for operation in running:
            operation.cancel()


def _look_at_error(operation: asyncio.Task[Any]) -> None:
    """Mark the error of a task as retrieved, so that asyncio does not log it if nobody waits any more."""
    if not operation.cancelled():
        operation.exception()
