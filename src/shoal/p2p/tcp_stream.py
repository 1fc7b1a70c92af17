"""One TCP connection with TLS as a stream.

Bulk data is received straight into the buffer where it is needed (:class:`asyncio.BufferedProtocol`), and written as
views of the caller's memory, which TLS encrypts at once: when a write returns, the caller may change them.

Sockets belong to the process that opened them. A forked child (a worker of a data loader, for example) gets a duplicate
of every socket and gives it up at once: otherwise closing one in the parent would not reach the other side, its death
would go unnoticed, and its port would stay taken as long as the child lives.
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
from collections.abc import Callable
from typing import cast

from shoal.errors import StreamClosedError
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.transport import Buffer, Stream

# Open sockets by file descriptor. The system gives a descriptor to the next socket before the loop has told the owner
# of the last one that it is closed.
_owners: dict[int, object] = {}


def own_socket(descriptor: int, owner: object) -> None:
    """Remember an open socket, by its file descriptor."""
    _owners[descriptor] = owner


def disown_socket(descriptor: int, owner: object) -> None:
    """Forget a socket that is closed or about to be."""
    if _owners.get(descriptor) is owner:
        del _owners[descriptor]


def _give_up_sockets_of_parent() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in _owners:
        # os.close would not do: a leftover of its former owner may close it again.
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    _owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_sockets_of_parent)


# Encrypted bytes that may wait here before a writer has to; as many may wait in the kernel. Few, so that work which is
# shared among several connections goes to those that have sent what they got.
WRITE_HIGH_WATER = 2**17
# For what arrives while nobody reads: enough for most messages, and little to copy in front of a large payload.
RECEIVE_BUFFER_BYTES = 4 * 2**10

# Small buffers are joined: each write costs a system call and a record of TLS.
JOIN_BYTES = 2**16
# Seconds for what is still to be sent; then the connection is cut.
CLOSE_TIMEOUT = 2.0
# While nobody reads, the loop does not watch the socket: it is looked at this often whether it is still connected.
PAUSED_CHECK_SECONDS = 0.5
# A ``struct linger``. That of Windows has shorter numbers, and these begin in the same way.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class TcpSocket(socket.socket):
    """A socket that takes no offence at being shut down when its connection is over.

    The loop of Windows shuts a socket down before it closes it: an error there would leave it open for good.
    """

    def shutdown(self, how: int) -> None:
        with contextlib.suppress(OSError):
            super().shutdown(how)


class TcpStream(Stream, asyncio.BufferedProtocol):
    """A connection as a stream: incoming bytes go to the waiting reader's buffer, or to a small one of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._gathers = False
        self._descriptor = -1
        self._own = bytearray(RECEIVE_BUFFER_BYTES)
        self._own_view = memoryview(self._own)
        self._start = self._end = 0  # what has arrived and is unread: _own[_start:_end]
        self._target: memoryview | None = None  # what the reader still waits for
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._write_paused = self._read_paused = False
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
        self._transport = cast("asyncio.Transport", transport)
        if self._closed:  # given up before the handshake was over
            self._transport.abort()
            return
        self._gathers = type(transport).__module__.startswith("uvloop")
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        self._descriptor = transport.get_extra_info("socket").fileno()
        own_socket(self._descriptor, self)
        peer_name = transport.get_extra_info("peername")
        if peer_name:
            self.remote_address = address_of(peer_name[0], peer_name[1])
        own_name = transport.get_extra_info("sockname")
        if own_name:
            self.local_host = own_name[0].partition("%")[0]

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
        # The loop had more at hand when it was asked to pause.
        if len(rest) == len(self._own):
            self._own = rest + bytes(len(rest))
            self._own_view = memoryview(self._own)
        self._own_view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self._target = self._target[nbytes:]
            if not len(self._target):
                self._target = None
                if self._reader is not None and not self._reader.done():
                    self._reader.set_result(None)
            return
        self._end += nbytes
        if self._end - self._start == len(self._own) and not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()
            self._paused_check = self._loop.call_later(PAUSED_CHECK_SECONDS, self._check_while_paused)

    def _check_while_paused(self) -> None:
        """Notice that the other side has broken the connection off, although what it sent before is still unread."""
        if self._transport is None or self._transport.is_closing():
            return
        if _is_broken_off(self._transport.get_extra_info("socket")):
            self._transport.abort()
            self._end_now()
        else:
            self._paused_check = self._loop.call_later(PAUSED_CHECK_SECONDS, self._check_while_paused)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        disown_socket(self._descriptor, self)
        if self._transport is not None:
            self._transport.close()  # else it is taken for forgotten
            # No cycle: what TLS has for buffers must not wait for the garbage collector.
            self._transport = None
        if self._closing is not None:
            self._closing.cancel()
        if exc is not None and not self._closed and not isinstance(exc, ConnectionError):
            self._reason = f"the connection broke: {type(exc).__name__}: {exc}"
        self._end_now()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    # --- Stream -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed or self._closing is not None

    async def read_exactly_into(self, buffer: memoryview) -> None:
        taken = min(len(buffer), self._end - self._start)
        if taken:
            buffer[:taken] = self._own_view[self._start : self._start + taken]
            self._start += taken
        if taken == len(buffer):
            return
        if self._closed:
            raise StreamClosedError(self._reason)
        self._target = buffer[taken:]
        self._reader = self._loop.create_future()
        self._resume_reading()
        try:
            await self._reader
            if self._target is not None:
                raise StreamClosedError(self._reason)
        except asyncio.CancelledError:
            # bytes of a message are already in the caller's buffer: the stream has lost its place and is of no more use
            self.abort()
            raise
        finally:
            self._target = self._reader = None

    def take(self, size: int) -> bytearray | None:
        if self._end - self._start < size:
            return None
        self._start += size
        return self._own[self._start - size : self._start]

    def _resume_reading(self) -> None:
        if self._read_paused and self._transport is not None and not self._closed:
            self._read_paused = False
            if self._paused_check is not None:
                self._paused_check.cancel()
            # None: it is over, connection_lost is on its way.
            if self._transport.get_extra_info("socket") is not None:
                self._transport.resume_reading()

    async def write(self, *buffers: Buffer) -> None:
        if self.closed or self._transport is None:
            raise StreamClosedError(self._reason)
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        elif self._gathers:
            self._transport.writelines(buffers)
        elif sum(map(len, buffers)) < JOIN_BYTES:
            self._transport.write(b"".join(buffers))
        else:  # the standard library would copy all of it into one piece
            for buffer in buffers:
                self._transport.write(buffer)
        while self._write_paused:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
            if self._closed:
                raise StreamClosedError(self._reason)
        if self._is_backlog_limited:
            await self._wait_until_sent()

    async def _wait_until_sent(self) -> None:
        """Wait until the kernel has sent most of what it has been given.

        Between here and the kernel are buffers of TLS and of the transport, which have limits of their own; they are
        empty when the kernel is always given less than it would take.
        """
        if sys.platform == "win32":  # nobody can limit what waits in its kernel
            return
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        while True:
            await asyncio.sleep(0)  # uvloop writes at the end of its turn
            if self._transport is None or self._transport.is_closing() or poller.poll(0):
                return
            # The loop lets nobody else watch the transport's own.
            descriptor = os.dup(self._descriptor)
            own_socket(descriptor, self)
            self._writer = self._loop.create_future()
            try:
                self._loop.add_writer(descriptor, self._wake_writer)
                await self._writer
            finally:
                self._writer = None
                self._loop.remove_writer(descriptor)
                disown_socket(descriptor, self)
                os.close(descriptor)

    def limit_backlog(self, nbytes: int | None) -> None:
        connection = None if self._transport is None else self._transport.get_extra_info("socket")
        if connection is None or self._transport is None:  # it is over already
            return
        limit = WRITE_HIGH_WATER if nbytes is None else nbytes
        self._transport.set_write_buffer_limits(high=limit)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self._is_backlog_limited = nbytes is not None
            # On macOS, if the other side has broken it off.
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
        if self._transport is None or self._closed:
            self.abort()
        elif self._closing is None:
            self._reason = "this side closed the connection"
            self._closing = self._loop.call_later(CLOSE_TIMEOUT, self._transport.abort)
            self._transport.close()  # else it is taken for forgotten

    def abort(self) -> None:
        if not self._closed:
            self._reason = "this side closed the connection"
        if self._transport is not None and not self._closed:
            self._reset_connection(self._transport)
        self._end_now()

    def _reset_connection(self, transport: asyncio.Transport) -> None:
        """End it in a way that overtakes what is still under way, which may be held up where nobody reads."""
        connection: socket.socket | None = transport.get_extra_info("socket")
        if connection is not None and not transport.is_closing():
            with contextlib.suppress(OSError):  # on macOS, if the other side was faster
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()

    # --- facts for the handshake --------------------------------------------------------------------------------------

    def ssl_object(self) -> ssl.SSLObject:
        """What TLS has found out about the other side.

        Raises:
            StreamClosedError: the connection is over already.
        """
        if self._transport is None or self._closed:
            raise StreamClosedError(self._reason)
        return cast("ssl.SSLObject", self._transport.get_extra_info("ssl_object"))


def _is_broken_off(connection: socket.socket | None) -> bool:
    """Whether the other side has reset a connection from which nobody reads.

    Such a connection has no other side any more. Windows does not say so, but drops what was unread; looking at that
    tells. A connection that was closed in order is not over as long as something is unread.
    """
    if connection is None:
        return True
    try:
        connection.getpeername()
    except OSError:
        return True
    if sys.platform == "win32":
        try:
            with connection.dup() as twin:  # the transport lets nobody read
                twin.setblocking(False)
                twin.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True
        except OSError:  # nothing has come, or there are no sockets left
            return False
    return False


def address_of(host: str, port: int) -> Multiaddr:
    """The multiaddr of a socket address."""
    host = host.partition("%")[0]  # IPv6 scope
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")
