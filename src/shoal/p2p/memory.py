"""A network inside one process: the same streams as over TCP, without sockets, for tests and simulations.

Bytes arrive in order, after a delay that the network decides, in the time of the running loop. So a loop with virtual
time runs a slow network in no time. ``shoal.testing`` builds a network with hosts, bandwidth and faults on top.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from shoal.errors import IdentityMismatchError, P2PDaemonError, RefusedDialError, StreamClosedError
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.membership import judge_listener
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.transport import Buffer, OnStream, Stream, Transport

Delay = Callable[[PeerID, PeerID, int], float]
"""Seconds that a number of bytes takes from one peer to another."""
# How far a reader may be behind before the writer has to wait.
WINDOW_BYTES = 4 * 2**20

Piece = bytes | memoryview | None
"""What travels on a stream: some bytes, or ``None`` for its end."""


class PipeEnd(Stream):
    """One end of a connection inside this process; subclasses decide how pieces reach the other end."""

    other: PipeEnd

    def __init__(self, remote: PeerID, address: Multiaddr | None) -> None:
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
                self.abort()  # as over TCP: part of a message is gone, so the stream has lost its place
                raise
            finally:
                self._reader = None

    def take(self, size: int) -> bytearray | None:
        if size and (not self.inbox or len(self.inbox[0]) < size):
            return None
        taken = bytearray(size)
        if size:
            self._take(memoryview(taken))
        return taken

    def _take(self, room: memoryview) -> int:
        head = self.inbox[0]
        size = min(len(head), len(room))
        room[:size] = head[:size]
        if size < len(head):
            self.inbox[0] = head[size:]
        else:
            del self.inbox[0]
        self._unread -= size
        if self.other._writer is not None and self._unread <= WINDOW_BYTES:
            _wake(self.other._writer)
        return size

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


class MemoryStream(PipeEnd):
    """A connection on a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, local: PeerID, remote: PeerID, address: Multiaddr | None) -> None:
        super().__init__(remote, address)
        self._network, self._local = network, local
        self._under_way: deque[Piece] = deque()
        self._arrival = 0.0  # when the last piece sent from here arrives

    def send(self, piece: Piece) -> None:
        delay = self._network.delay(self._local, self.remote, len(piece or b""))
        self._arrival = max(self._arrival, self._loop.time() + delay)
        self._under_way.append(piece)
        self._loop.call_at(self._arrival, self._deliver)

    def _deliver(self) -> None:
        """Deliver the oldest piece. Timers due at one moment, which lasts long on Windows, may fire in any order."""
        self.other.arrive(self._under_way.popleft())


class MemoryNetwork:
    """Where in-memory peers find each other.

    Args:
        delay: seconds that bytes take between two peers; zero by default.
    """

    def __init__(self, delay: Delay | None = None) -> None:
        self.delay: Delay = delay or (lambda source, target, size: 0.0)
        self.listeners: dict[Multiaddr, tuple[MemoryTransport, OnStream]] = {}
        self._next_address = 1

    def transport(self, identity: Identity | None = None) -> MemoryTransport:
        """A transport for one peer of this network."""
        return MemoryTransport(self, identity or Identity.generate())

    def new_address(self) -> Multiaddr:
        """An unused address."""
        address = Multiaddr(f"/memory/{self._next_address}")
        self._next_address += 1
        return address

    async def connect(self, source: MemoryTransport, address: Multiaddr, expected_peer: PeerID) -> Stream:
        """Connect a peer to the peer that listens at an address."""
        local = source.identity.peer_id
        round_trip = self.delay(local, expected_peer, 0) + self.delay(expected_peer, local, 0)
        await asyncio.sleep(round_trip)
        listener, on_stream = self.find_listener(address, expected_peer)
        near = MemoryStream(self, local, expected_peer, address)
        far = MemoryStream(self, expected_peer, local, None)
        source.show_badges(near, far, listener)
        near.other, far.other = far, near
        asyncio.get_running_loop().call_soon(on_stream, far)
        return near

    def find_listener(self, address: Multiaddr, expected_peer: PeerID) -> tuple[MemoryTransport, OnStream]:
        """The transport of the peer that listens at an address.

        Raises:
            RefusedDialError: nobody listens there.
            IdentityMismatchError: another peer than the expected one listens there.
        """
        found = self.listeners.get(address)
        if found is None:
            raise RefusedDialError(f"{address}: connection refused: nothing listens there")
        peer = found[0].identity.peer_id
        if peer != expected_peer:
            raise IdentityMismatchError(f"{address}: wrong identity: peer {peer} answers there, not {expected_peer}")
        return found


class MemoryTransport(Transport):
    """Reaches the peers of one :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, identity: Identity) -> None:
        self.identity = identity
        self._network = network
        self._listening: list[Multiaddr] = []
        self._told: list[Multiaddr] = []

    def supports(self, address: Multiaddr) -> bool:
        return address.protocols() == ["memory"] or address.protocols() == ["ip4", "tcp"]

    async def listen(self, address: Multiaddr, on_stream: OnStream) -> list[Multiaddr]:
        if "memory" not in address:  # the default: any address will do
            address = self._network.new_address()
        if address in self._network.listeners:
            raise P2PDaemonError(f"cannot listen on {address}: somebody else does")
        self._network.listeners[address] = (self, on_stream)
        self._listening.append(address)
        self._told.append(address)
        return [address]

    def addresses(self, latest: bool = False) -> list[Multiaddr]:
        return list(self._told)

    async def dial(self, address: Multiaddr, expected_peer: PeerID) -> Stream:
        return await self._network.connect(self, address, expected_peer)

    def show_badges(self, near: PipeEnd, far: PipeEnd, listener: MemoryTransport) -> None:
        """What the handshake of :mod:`~.handshake` does, as the one who dials.

        Raises:
            NotAMemberError: the listener and this peer are not of one run.
        """
        shown = b"" if listener.membership is None else listener.membership.shown_badge()
        near.badge = judge_listener(self.membership, near.remote, shown)
        far.shown_badge = b"" if self.membership is None else self.membership.shown_badge()

    async def close(self) -> None:
        for address in self._listening:
            self._network.listeners.pop(address, None)
        self._listening.clear()
