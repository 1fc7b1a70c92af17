"""One TCP connection with TLS as a stream.

Bulk data is received straight into the buffer where it is needed (:class:`asyncio.BufferedProtocol`). It is written as
views of the caller's memory, which TLS encrypts at once: when a write returns, the caller may change that memory.

Sockets belong to the process that opened them. A forked child (a data loader's worker, for example) gets a duplicate of
every socket and gives it up at once. Otherwise, as long as the child lives, the other side would not notice when the
parent closes a connection or dies, and the parent's port would stay taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
import struct
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, cast

from shoal.errors import StreamClosedError
from shoal.net.transport import Buffer, Stream
from shoal.peers.multiaddr import Multiaddr


class OwnSocket(socket.socket):
    """A socket of this process: no forked child keeps it.

    It ignores errors when it is shut down after its connection is over. The Windows loop shuts a socket down before it
    closes it, and an error there would leave it open for good.
    """

    open: ClassVar[weakref.WeakSet[OwnSocket]] = weakref.WeakSet()
    """All open sockets of this kind."""
    accepted: ClassVar[weakref.WeakSet[OwnSocket]] = weakref.WeakSet()
    """Sockets that were opened because another peer connected. Others must not take all files of this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # dup() passes more than the descriptor
        self.open.add(self)

    @classmethod
    def take(cls, connected: socket.socket) -> OwnSocket:
        """Take over a connected socket; it becomes non-blocking."""
        taken = cls(fileno=connected.detach())
        taken.setblocking(False)
        return taken

    def shutdown(self, how: int) -> None:
        with contextlib.suppress(OSError):
            super().shutdown(how)

    def close(self) -> None:
        super().close()
        self._forget()

    def detach(self) -> int:
        # uvloop closes a socket by its descriptor, and takes that away from the socket.
        self._forget()
        return super().detach()

    def _forget(self) -> None:
        self.open.discard(self)
        self.accepted.discard(self)


def _give_up_sockets_of_parent() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for each in OwnSocket.open:
        if each.fileno() >= 0:
            # Not closed: leftovers of the former owner may close the descriptor again, when it may be another file.
            os.dup2(nowhere, each.fileno())
    os.close(nowhere)
    OwnSocket.open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_sockets_of_parent)


# Encrypted bytes that may wait here before a writer has to wait; as many may wait in the kernel. Chosen low, so that
# work shared among several connections goes to those that have sent what they got.
WRITE_HIGH_WATER = 2**17
# Buffer for bytes that arrive while nobody reads. Chosen: enough for most messages, and little to copy before a large
# payload.
RECEIVE_BUFFER_BYTES = 4 * 2**10
# A read of at most this many bytes waits until they are in that buffer, along with the bytes after them. Its own buffer
# would be full at once, and asyncio would read the rest of the message off TLS in another turn of the loop. Chosen.
SMALL_READ_BYTES = 2**10

# Smaller buffers are joined, because each write costs a system call and a TLS record. Chosen.
JOIN_BYTES = 2**16
# Chosen: seconds that a closing connection has to send the rest before it is cut.
CLOSE_TIMEOUT = 2.0
# While nobody reads, the loop does not watch the socket, so we check this often whether it is still connected. Chosen.
PAUSED_CHECK_SECONDS = 0.5
# A ``struct linger``. The one of Windows has shorter numbers, but its bytes begin in the same way.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class TcpStream(Stream, asyncio.BufferedProtocol):
    """A connection as a stream: incoming bytes go to the waiting reader's buffer, or to a small one of its own.

    Its many attributes are the state of both directions of one socket. Every message passes here, so they are kept in
    one object, which saves calls between parts.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        """The connection itself, between the handshake and its end."""
        self._gathers = False
        self._descriptor = -1
        self._own = bytearray(RECEIVE_BUFFER_BYTES)
        self._own_view = memoryview(self._own)
        self._start = self._end = 0  # bytes that have arrived and are unread: _own[_start:_end]
        self._target: memoryview | None = None  # the part of the reader's buffer that is still to be filled
        self._awaited = 0  # or as many bytes the reader waits for
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self.write_paused = self.read_paused = False
        """The latest pause or resume requested from the loop."""
        self._is_backlog_limited = False
        self._closed = False
        self._reason = "the other side closed the connection"
        self._close_callback: Callable[[], object] | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._paused_check: asyncio.TimerHandle | None = None
        self.remote_address: Multiaddr | None = None
        self.local_host = ""
        """The IP address of this machine to which the connection is bound."""

    # --- asyncio.BufferedProtocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self._closed:  # given up before the handshake was over
            self.transport.abort()
            return
        self._gathers = type(transport).__module__.startswith("uvloop")
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        self._descriptor = transport.get_extra_info("socket").fileno()
        peer_name = transport.get_extra_info("peername")
        if peer_name:
            self.remote_address = address_of(peer_name[0], peer_name[1])
        own_name = transport.get_extra_info("sockname")
        if own_name:
            self.local_host = own_name[0].partition("%")[0]
            self.local_address = address_of(own_name[0], own_name[1])

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None:
            return self._target
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._own):
            self._make_room()
        return self._own_view[self._end :]

    def _make_room(self) -> None:
        rest = self._own[self._start : self._end]
        # Still full: the loop already had more bytes in hand when it was asked to pause.
        if len(rest) == len(self._own):
            self._own = rest + bytes(len(rest))
            self._own_view = memoryview(self._own)
        self._own_view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        if self._target is not None:
            self._target = self._target[nbytes:]
            if not len(self._target):
                self._target = None
                if self._reader is not None and not self._reader.done():
                    self._reader.set_result(None)
            return
        self._end += nbytes
        if 0 < self._awaited <= self._end - self._start:
            self._awaited = 0
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(None)
        if self._end - self._start == len(self._own) and not self.read_paused and self.transport is not None:
            self.read_paused = True
            self.transport.pause_reading()
            self._paused_check = self._loop.call_later(PAUSED_CHECK_SECONDS, self._check_while_paused)

    def _check_while_paused(self) -> None:
        """Notice a reset by the other side even while earlier bytes are unread."""
        if self.transport is None or self.transport.is_closing():
            return
        if is_broken_off(self.transport.get_extra_info("socket")):
            self.transport.abort()
            self._end_now()
        else:
            self._paused_check = self._loop.call_later(PAUSED_CHECK_SECONDS, self._check_while_paused)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is not None:
            self.transport.close()  # otherwise asyncio warns of an unclosed transport
            # Break the cycle: the buffers of TLS must not wait for the garbage collector.
            self.transport = None
        if self._closing is not None:
            self._closing.cancel()
        if exc is not None and not self._closed and not isinstance(exc, ConnectionError):
            self._reason = f"the connection broke: {type(exc).__name__}: {exc}"
        self._end_now()

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    # --- Stream -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed or self._closing is not None

    @property
    def is_awaited(self) -> bool:
        return self._reader is not None

    @property
    def is_held_up(self) -> bool:
        """Whether a writer waits until more has been sent."""
        return self._writer is not None

    async def read_exactly_into(self, buffer: memoryview) -> None:
        size, unread = len(buffer), self._end - self._start
        if unread < size:
            if self._closed:
                raise StreamClosedError(self._reason)
            is_small = size <= SMALL_READ_BYTES
            if is_small:
                self._awaited = size
            else:
                buffer[:unread] = self._own_view[self._start : self._end]
                self._start = self._end
                self._target = buffer[unread:]
            self._reader = self._loop.create_future()
            if self.read_paused:
                self._resume_reading()
            try:
                await self._reader
                if self._target is not None or self._awaited:
                    raise StreamClosedError(self._reason)
            except asyncio.CancelledError:
                # Part of a message may be in the caller's buffer, so the stream is out of step and useless. The reader
                # knows that. If it were also told of the end, its time limit would look like a broken connection.
                self.on_closed(None)
                self.abort()
                raise
            finally:
                self._target = self._reader = None
                self._awaited = 0
            if not is_small:
                return
        buffer[:] = self._own_view[self._start : self._start + size]
        self._start += size

    def take(self, size: int) -> bytearray | None:
        if self._end - self._start < size:
            return None
        self._start += size
        return self._own[self._start - size : self._start]

    def _resume_reading(self) -> None:
        if self.transport is not None and not self._closed:
            self.read_paused = False
            if self._paused_check is not None:
                self._paused_check.cancel()
            # None: the connection is over, and connection_lost is on its way.
            if self.transport.get_extra_info("socket") is not None:
                self.transport.resume_reading()

    async def write(self, *buffers: Buffer) -> None:
        if self.closed or self.transport is None:
            raise StreamClosedError(self._reason)
        if len(buffers) == 1:
            self.transport.write(buffers[0])
        elif self._gathers:
            self.transport.writelines(buffers)
        elif sum(map(len, buffers)) < JOIN_BYTES:
            self.transport.write(b"".join(buffers))
        else:  # writelines of the standard library would copy everything into one piece
            for buffer in buffers:
                self.transport.write(buffer)
        while self.write_paused:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
            if self._closed:
                raise StreamClosedError(self._reason)
        if self._is_backlog_limited:
            await self._wait_until_sent()

    def write_if_free(self, data: bytes) -> bool:
        if self.closed or self.transport is None or self.write_paused:
            return False
        self.transport.write(data)
        return True

    async def _wait_until_sent(self) -> None:
        """Wait until the kernel has sent most of what it was given.

        The buffers of TLS and of the transport, between here and the kernel, have their own limits. They stay empty as
        long as the kernel gets less than it would take.
        """
        if sys.platform == "win32":  # its kernel has no limit for unsent bytes
            return
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        while True:
            await asyncio.sleep(0)  # uvloop writes at the end of its turn
            if self.transport is None or self.transport.is_closing() or poller.poll(0):
                return
            self._writer = self._loop.create_future()
            # A duplicate, because the loop lets nobody else watch the transport's own descriptor.
            with OwnSocket(fileno=os.dup(self._descriptor)) as twin:
                try:
                    self._loop.add_writer(twin.fileno(), self._wake_writer)
                    await self._writer
                finally:
                    self._writer = None
                    self._loop.remove_writer(twin.fileno())

    def limit_backlog(self, nbytes: int | None) -> None:
        connection = None if self.transport is None else self.transport.get_extra_info("socket")
        if connection is None or self.transport is None:  # the connection is over already
            return
        limit = WRITE_HIGH_WATER if nbytes is None else nbytes
        self.transport.set_write_buffer_limits(high=limit)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self._is_backlog_limited = nbytes is not None
            # macOS fails here if the other side has reset the connection.
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, limit)

    def on_closed(self, callback: Callable[[], object] | None) -> None:
        self._close_callback = callback
        if self._closed and callback is not None:
            self._loop.call_soon(self._call_back)

    def _call_back(self) -> None:
        callback, self._close_callback = self._close_callback, None
        if callback is not None:
            callback()

    def _end_now(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._paused_check is not None:
            self._paused_check.cancel()
        for waiting in (self._reader, self._writer):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        self._call_back()

    def close(self) -> None:
        if self.transport is None or self._closed:
            self.abort()
        elif self._closing is None:
            self._reason = "this side closed the connection"
            self._closing = self._loop.call_later(CLOSE_TIMEOUT, self.transport.abort)
            self.transport.close()

    def abort(self) -> None:
        if not self._closed:
            self._reason = "this side closed the connection"
        if self.transport is not None and not self._closed:
            reset_connection(self.transport)
        self._end_now()

    # --- facts for the handshake --------------------------------------------------------------------------------------

    def ssl_object(self) -> ssl.SSLObject:
        """The TLS object of the connection, which knows the other side's certificate.

        Raises:
            StreamClosedError: the connection is over already.
        """
        if self.transport is None or self._closed:
            raise StreamClosedError(self._reason)
        return cast("ssl.SSLObject", self.transport.get_extra_info("ssl_object"))


def reset_connection(transport: asyncio.Transport) -> None:
    """End a connection with a reset. It overtakes bytes in flight, which may be stuck because nobody reads."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is not None and not transport.is_closing():
        with contextlib.suppress(OSError):  # macOS fails here if the other side was faster
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()


def is_broken_off(connection: socket.socket | None) -> bool:
    """Whether the other side has reset a connection from which nobody reads.

    A reset connection has no peer name any more. Windows still gives one, but it drops the unread bytes, so peeking at
    them fails. A connection that was closed in order is not over as long as bytes are unread.
    """
    if connection is None:
        return True
    try:
        connection.getpeername()
    except OSError:
        return True
    if sys.platform == "win32":
        try:
            with connection.dup() as twin:  # the transport lets nobody read from its own socket
                twin.setblocking(False)
                twin.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True
        except OSError:  # nothing has arrived, or the process has no sockets left
            return False
    return False


def address_of(host: str, port: int) -> Multiaddr:
    """The multiaddr of a socket address."""
    host = host.partition("%")[0]  # IPv6 scope
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")
