"""Raw sessions over TCP: connections that begin with a cookie instead of a handshake, and pairs of them.

On a listening port, the first byte tells a session from TLS, and a cookie of 32 bytes follows it. The cookie is the
only thing that says what the session is for, so the side that gave it away gets the session, once.

Sockets of sessions stay in our hands: exactly as many bytes are read as somebody asks for, because what follows may be
the beginning of a TLS handshake.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from enum import IntFlag
from typing import Any, TypeVar, cast

from shoal.errors import StreamClosedError
from shoal.net.tcp.stream import (
    CLOSE_TIMEOUT,
    WRITE_HIGH_WATER,
    address_of,
    is_broken_off,
    reset_connection,
)
from shoal.net.transport import COOKIE_BYTES, COOKIE_SECONDS, Session, Throttle
from shoal.peers.multiaddr import Multiaddr

logger = logging.getLogger(__name__)

SESSION_BYTE = b"\x05"
"""The first byte of a session; that of TLS is 0x16."""

# How often a pair is looked at: whether it is idle, and whether a side has gone that is not read from at present.
LOOK_SECONDS = 1.0

T = TypeVar("T")


class TcpSession(Session):
    """A connected socket.

    Args:
        connected: non-blocking, and used by nobody else any more.
        live: the session is in this set as long as it has the socket.
        punchable: its local port may be used by other sockets as well.

    Raises:
        OSError: the connection is over already.
    """

    local_address: Multiaddr
    remote_address: Multiaddr

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
        """Whether it has ended, or has been taken over."""
        return self._socket is None

    def use_within(self, seconds: float) -> None:
        """End unless somebody uses it soon: the side that expected it may have given up as it came."""
        self._patience = self._loop.call_later(seconds, self._end, "nobody has used this session in time")

    async def write(self, data: bytes) -> None:
        await self._do(self._loop.sock_sendall(self._open_socket(), data))

    async def read_exactly(self, size: int) -> bytes:
        arrived = b""
        while len(arrived) < size:
            piece = await self._do(self._loop.sock_recv(self._open_socket(), size - len(arrived)))
            if not piece:
                self._end("the other side closed the connection")
                raise StreamClosedError(self._reason)
            arrived += piece
        return arrived

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
            self.abort()  # half of something may have been sent or read: nothing sensible can follow
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
        """Take the socket over. The caller then has to close it, or to pass it on.

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
    """Tell asyncio that somebody has looked at the error of a task, even if nobody waits for it any more."""
    if not operation.cancelled():
        operation.exception()


class ExpectedSessions:
    """Cookies that this peer has given away, and who waits for their sessions."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, asyncio.Future[Session]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, cookie: bytes) -> asyncio.Future[Session]:
        """A future for the session with this cookie; it is cancelled when the time is up."""
        if len(cookie) != COOKIE_BYTES:
            raise ValueError(f"a cookie has {COOKIE_BYTES} bytes, not {len(cookie)}: take os.urandom({COOKIE_BYTES})")
        if cookie in self._waiting:
            raise ValueError("this cookie is in use already: make a new one for each session")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Session] = loop.create_future()
        self._waiting[cookie] = future
        expiry = loop.call_later(COOKIE_SECONDS, future.cancel)

        def forget(_: asyncio.Future[Session]) -> None:
            expiry.cancel()
            if self._waiting.get(cookie) is future:
                del self._waiting[cookie]

        future.add_done_callback(forget)
        return future

    def take(self, cookie: bytes) -> asyncio.Future[Session] | None:
        """Who waits for this cookie; ``None`` if nobody does. A cookie is taken once."""
        future = self._waiting.pop(cookie, None)
        return None if future is None or future.done() else future

    def close(self) -> None:
        """Wait for nothing any more."""
        for future in [*self._waiting.values()]:
            future.cancel()


class Pause(IntFlag):
    """Why one side of a pair is not read from."""

    NONE = 0
    UNPAIRED = 1  # the other side is not connected yet
    HELD_UP = 2  # the other side has not taken enough of what came before
    THROTTLED = 4


class Half(asyncio.Protocol):
    """One side of a pair: what arrives here is sent by the other one.

    Args:
        connected: the socket.
        throttle: how fast bytes may arrive here.
    """

    other: Half

    def __init__(self, connected: socket.socket, throttle: Throttle) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self._throttle = throttle
        self._is_given_to_loop = False
        self._timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None
        """The connection, as long as it lasts."""
        self._early: list[bytes] = []
        self.pause = Pause.NONE
        self.lost: asyncio.Future[None] = self._loop.create_future()
        """Done when the loop has closed the connection."""
        self.has_ended = False
        """Nothing that arrives here is sent on any more."""
        self.moved = 0
        """Bytes that have arrived here."""

    async def start(self) -> None:
        """Give the socket to the loop.

        Raises:
            OSError: the connection is over already.
        """
        self._is_given_to_loop = True
        try:
            await self._loop.connect_accepted_socket(lambda: self, self._socket)
        except BaseException as e:
            # A loop that is stopped here closes the socket itself; uvloop does not even call connection_lost.
            self.transport, self.has_ended = None, True
            if isinstance(e, OSError):
                self._socket.close()
            raise

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        if self.has_ended:  # given up while it was handed over
            reset_connection(self.transport)

    def data_received(self, data: bytes) -> None:
        self.moved += len(data)
        if self.has_ended:
            return
        target = self.other.transport
        if target is None:
            self._early.append(data)
            self.stop_reading(Pause.UNPAIRED)
            return
        target.write(data)
        seconds = self._throttle.take(len(data))
        if seconds > 0:
            self.stop_reading(Pause.THROTTLED)
            self._timer = self._loop.call_later(seconds, self.read_on, Pause.THROTTLED)

    def pause_writing(self) -> None:
        self.other.stop_reading(Pause.HELD_UP)

    def resume_writing(self) -> None:
        self.other.read_on(Pause.HELD_UP)

    def eof_received(self) -> bool:
        self.end()
        self.other.end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.transport is not None:
            self.transport.close()  # otherwise asyncio warns of an unclosed transport
            self.transport = None
        self.has_ended = True
        if exc is None:
            self.other.end()
        else:
            self.other.reset()
        self.lost.set_result(None)

    # --- the pair -----------------------------------------------------------------------------------------------------

    def pair(self) -> None:
        """The other side is connected, too: send it what came before."""
        early, self._early = self._early, []
        self.moved -= sum(map(len, early))
        for data in early:
            self.data_received(data)
        self.read_on(Pause.UNPAIRED)

    def stop_reading(self, reason: Pause) -> None:
        if not self.pause and self.transport is not None:
            self.transport.pause_reading()
        self.pause |= reason

    def read_on(self, reason: Pause) -> None:
        """Take one reason away; read if there is none left."""
        was_paused, self.pause = bool(self.pause), self.pause & ~reason
        if was_paused and not self.pause and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def look(self) -> None:
        """Notice that this side has broken off, although the loop does not watch it while it is paused."""
        if self.pause and self.transport is not None and is_broken_off(self.transport.get_extra_info("socket")):
            self.reset()

    def end(self) -> None:
        """End when everything has been sent, but soon: nobody may keep a pair by not reading."""
        if self.has_ended:
            return
        self.has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self.transport is not None:
            self.transport.close()
            self._timer = self._loop.call_later(CLOSE_TIMEOUT, self.transport.abort)

    def reset(self) -> None:
        """End now."""
        self.has_ended = True
        if self.transport is not None:
            reset_connection(self.transport)
        elif not self._is_given_to_loop:
            self._is_given_to_loop = True
            self._socket.close()


class Splice:
    """Two connections, each of which sends what arrives on the other one.

    Bytes are neither looked at nor kept: while one side does not take them, the other one is not read from. An end of
    either side ends both.
    """

    def __init__(self, first: socket.socket, second: socket.socket, throttle: Throttle) -> None:
        one, two = (Half(connected, throttle) for connected in (first, second))
        one.other, two.other = two, one
        self._halves = (one, two)

    async def run(self, idle_seconds: float) -> None:
        """Copy until one side has ended, or neither has moved for so long."""
        loop = asyncio.get_running_loop()
        try:
            for half in self._halves:
                await half.start()
            for half in self._halves:
                half.pair()
            moved, since = 0, loop.time()
            running = {half.lost for half in self._halves}
            while running:
                _, running = await asyncio.wait(running, timeout=min(LOOK_SECONDS, idle_seconds / 2))
                now = sum(half.moved for half in self._halves)
                if now != moved:
                    moved, since = now, loop.time()
                elif loop.time() - since >= idle_seconds:
                    return
                for half in self._halves:
                    half.look()
        except OSError as e:
            logger.debug("two sessions could not be joined: %s", e)
        finally:
            for half in self._halves:
                half.reset()
