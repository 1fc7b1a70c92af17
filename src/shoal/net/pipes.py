"""Byte pipes inside one process: networks in memory are made from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.errors import StreamClosedError
from shoal.net.transport import Buffer, Stream
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr

# How far a reader may be behind before the writer has to wait.
WINDOW_BYTES = 4 * 2**20

Piece = bytes | memoryview | None
"""What travels on a stream: some bytes, or ``None`` for its end."""


class PipeEnd(Stream):
    """One end of a connection inside this process; subclasses decide how pieces reach the other end."""

    other: PipeEnd

    def __init__(self, remote: PeerID | None, address: Multiaddr | None) -> None:
        if remote is not None:  # otherwise somebody has to prove it first
            self.remote = remote
        self.remote_address = address
        self._loop = asyncio.get_running_loop()
        # A list, because it is never long and an empty deque takes ten times the memory.
        self.inbox: list[memoryview] = []
        # Bytes that the other side has sent and that are not read here yet, including those in flight.
        self._unread = 0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._closed = False
        self._close_callback: Callable[[], object] | None = None

    def send(self, piece: Piece) -> None:
        """Send a piece to :meth:`arrive` at the other end; it never overtakes earlier pieces."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        return self._closed

    async def write(self, *buffers: Buffer) -> None:
        if self._closed:
            raise StreamClosedError("the connection is closed")
        # A copy: the caller may change the buffers afterwards.
        piece = b"".join(buffers)
        other = self.other
        other._unread += len(piece)
        self.send(piece)
        while other._unread > WINDOW_BYTES:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
            if self._closed:
                raise StreamClosedError("the other side closed the connection")

    def write_if_free(self, data: bytes) -> bool:
        if self._closed or self.other._unread > WINDOW_BYTES:
            return False
        self.other._unread += len(data)
        self.send(data)
        return True

    def arrive(self, piece: Piece) -> None:
        """A piece has come from the other end."""
        if piece is None:
            self.end()
        elif not self._closed:
            self.received += len(piece)
            self.inbox.append(memoryview(piece))
            _wake(self._reader)

    @property
    def is_awaited(self) -> bool:
        return self._reader is not None

    async def read_exactly_into(self, buffer: memoryview) -> None:
        while len(buffer):
            if self.inbox:
                buffer = buffer[self._take(buffer) :]
                continue
            if self._closed:
                raise StreamClosedError("the other side closed the connection")
            self._reader = self._loop.create_future()
            try:
                await self._reader
            except asyncio.CancelledError:
                # As over TCP: part of a message is gone, so the stream has lost its place. The reader knows that.
                self.on_closed(None)
                self.abort()
                raise
            finally:
                self._reader = None

    async def read_some(self) -> memoryview | None:
        """The next bytes, as many as have arrived in one piece; ``None`` at the end."""
        while not self.inbox:
            if self._closed:
                return None
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        head = self.inbox.pop(0)
        self._note_read(len(head))
        return head

    def take(self, size: int) -> bytearray | None:
        if not size:
            return bytearray()
        if not self.inbox or len(self.inbox[0]) < size:
            return None
        head = self.inbox[0]
        if len(head) == size:
            del self.inbox[0]
        else:
            self.inbox[0] = head[size:]
        self._note_read(size)
        return bytearray(head[:size])

    def _take(self, room: memoryview) -> int:
        head = self.inbox[0]
        size = min(len(head), len(room))
        room[:size] = head[:size]
        if size < len(head):
            self.inbox[0] = head[size:]
        else:
            del self.inbox[0]
        self._note_read(size)
        return size

    def _note_read(self, size: int) -> None:
        self._unread -= size
        if self.other._writer is not None and self._unread <= WINDOW_BYTES:
            _wake(self.other._writer)

    def on_closed(self, callback: Callable[[], object] | None) -> None:
        self._close_callback = callback
        if self._closed and callback is not None:
            self._loop.call_soon(callback)

    def end(self) -> None:
        """End the connection at this end without telling the other end."""
        if self._closed:
            return
        self._closed = True
        _wake(self._reader)
        _wake(self._writer)
        callback, self._close_callback = self._close_callback, None
        if callback is not None:
            callback()

    def close(self) -> None:
        if not self._closed:
            self.send(None)
            self.end()

    abort = close


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
