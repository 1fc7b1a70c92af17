"""A network inside one process: the same streams as over TCP, without sockets, for tests and simulations.

Bytes arrive in order, after a delay that the network decides, in the time of the running loop. So a loop with virtual
time simulates a slow network in no time. ``shoal.testing`` builds a network with hosts, bandwidth and faults on top.

Streams and sessions are pipes (:class:`PipeEnd`). A relay may join two sessions, so both sides of a handshake tell each
other in-band who they are. Nobody in this process lies about that, so there are no keys and no encryption; the messages
and the round trips are those of :mod:`~.tcp.handshake`::

    dialler ► listener    hello
    listener ► dialler    peer id
    dialler ► listener    go on
    listener ► dialler    badge
    dialler ► listener    peer id, badge
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

from shoal.access.badges import MAX_BADGE_BYTES
from shoal.access.membership import Membership, judge_listener
from shoal.base.tasks import TaskSet
from shoal.errors import (
    DialError,
    IdentityMismatchError,
    InterruptedDialError,
    P2PDaemonError,
    RefusedDialError,
    StreamClosedError,
)
from shoal.net.transport import (
    HANDSHAKE_TIMEOUT,
    ROUND_TRIP,
    Buffer,
    ExpectedSessions,
    OnStream,
    Session,
    Stream,
    Transport,
)
from shoal.peers.identity import MAX_PEER_ID_BYTES, Identity, PeerID
from shoal.peers.multiaddr import Multiaddr

# How far a reader may be behind before the writer has to wait. Chosen: about the socket buffers of a fast connection.
WINDOW_BYTES = 4 * 2**20

Piece = bytes | memoryview | None
"""What travels on a stream: some bytes, or ``None`` for its end."""


class PipeEnd(Stream):
    """One end of a connection inside this process; subclasses decide how pieces reach the other end."""

    other: PipeEnd

    def __init__(self, remote: PeerID | None, address: Multiaddr | None) -> None:
        if remote is not None:  # otherwise the handshake sets it
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
        """A piece has arrived from the other end."""
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
                # As over TCP: part of a message is gone, so the stream is out of step. The reader knows that.
                self.on_closed(None)
                self.abort()
                raise
            finally:
                self._reader = None

    async def read_some(self) -> memoryview:
        """The next bytes, as many as have arrived in one piece; none at the end."""
        while not self.inbox:
            if self._closed:
                return memoryview(b"")
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


# --- sessions ---------------------------------------------------------------------------------------------------------

_LENGTH = struct.Struct(">H")


class MemorySession(Session):
    """One end of a pipe on which neither side has identified itself."""

    def __init__(self, end: PipeEnd, local: Multiaddr, remote: Multiaddr, *, punchable: bool = False) -> None:
        self.local_address, self.remote_address = local, remote
        self.is_punchable = punchable
        end.local_address, end.remote_address = local, remote
        self._end = end
        self._is_taken = False

    async def write(self, data: Buffer) -> None:
        await self._end.write(data)

    async def read_some(self) -> Buffer:
        return await self._end.read_some()

    async def read_exactly(self, size: int) -> bytes:
        data = bytearray(size)
        await self._end.read_exactly_into(memoryview(data))
        return bytes(data)

    def abort(self) -> None:
        if not self._is_taken:
            self._end.abort()

    def take_over(self) -> PipeEnd:
        """The pipe, for its next user."""
        assert not self._is_taken, "a session is taken over once"
        self._is_taken = True
        return self._end


# --- handshake --------------------------------------------------------------------------------------------------------


async def _send(end: PipeEnd, *parts: bytes) -> None:
    await end.write(*(piece for part in parts for piece in (_LENGTH.pack(len(part)), part)))


async def _read(end: PipeEnd, most: int) -> bytes:
    head = bytearray(_LENGTH.size)
    await end.read_exactly_into(memoryview(head))
    (size,) = _LENGTH.unpack(head)
    if size > most:
        raise ValueError(f"{size} bytes where at most {most} are allowed")
    data = bytearray(size)
    await end.read_exactly_into(memoryview(data))
    return bytes(data)


async def prove_on_pipe(
    end: PipeEnd, identity: Identity, expected_peer: PeerID, membership: Membership | None, address: Multiaddr | None
) -> None:
    """The dialler's half of the handshake.

    Raises:
        IdentityMismatchError: another peer answers.
        NotAMemberError: that peer and this one are not of one run.
        DialError: no peer answers, or not in time.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            await _send(end, b"")
            found = PeerID(await _read(end, MAX_PEER_ID_BYTES))
            if found != expected_peer:
                text = f"{address}: wrong identity: peer {found} answers there, not {expected_peer}"
                raise IdentityMismatchError(text)
            await _send(end, b"")
            end.badge = judge_listener(membership, expected_peer, await _read(end, MAX_BADGE_BYTES))
            badge = b"" if membership is None else membership.shown_badge()
            await _send(end, identity.peer_id.to_bytes(), badge)
            end.remote = expected_peer
    except BaseException as e:
        end.abort()
        if isinstance(e, TimeoutError):
            raise DialError(f"{address}: no answer within {HANDSHAKE_TIMEOUT:g} s") from e
        if isinstance(e, StreamClosedError):
            raise InterruptedDialError(f"{address}: the connection was closed during the handshake") from e
        if isinstance(e, ValueError):
            raise DialError(f"{address}: something else answers there: {e}") from e
        raise


async def meet_dialler(end: PipeEnd, identity: Identity, membership: Membership | None) -> bool:
    """The listener's half of the handshake; returns whether the dialler identified itself. If not, the pipe ends."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            await _read(end, 0)
            await _send(end, identity.peer_id.to_bytes())
            await _read(end, 0)
            await _send(end, b"" if membership is None else membership.shown_badge())
            end.remote = PeerID(await _read(end, MAX_PEER_ID_BYTES))
            end.shown_badge = await _read(end, MAX_BADGE_BYTES)
    except (TimeoutError, StreamClosedError, ValueError):
        end.abort()
        return False
    except BaseException:
        end.abort()
        raise
    return True


# --- punching ---------------------------------------------------------------------------------------------------------


class PunchPort:
    """The local port of a session, while its owner tries to connect from there and listens there.

    Args:
        address: the port.
        candidates: the addresses to which the owner tries to connect.
    """

    def __init__(self, address: Multiaddr, candidates: Sequence[Multiaddr]) -> None:
        self.address, self.candidates = address, tuple(candidates)
        self._met: set[Multiaddr] = set()
        self._found: list[MemorySession] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    def may_meet(self, other: PunchPort) -> bool:
        """Note that two ports meet; ``False`` if they have met before: between two ports there is one connection."""
        if other is self or other.address in self._met:
            return False
        self._met.add(other.address)
        other._met.add(self.address)
        return True

    def connected(self, session: MemorySession) -> None:
        """A connection from or to this port was made."""
        if self._is_closed:
            session.abort()
            return
        self._found.append(session)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, end: float) -> MemorySession | None:
        """The next connection; ``None`` if none comes before ``end``, a time of the loop."""
        loop = asyncio.get_running_loop()
        while not self._found:
            left = end - loop.time()
            if left <= 0:
                return None
            self._waiter = loop.create_future()
            await asyncio.wait([self._waiter], timeout=left)
        return self._found.pop(0)

    def close(self) -> None:
        """Drop connections that nobody has taken, and all later ones."""
        self._is_closed = True
        for session in self._found:
            session.abort()


# --- the network ------------------------------------------------------------------------------------------------------

Delay = Callable[[PeerID, PeerID, int], float]
"""Seconds that a number of bytes takes from one peer to another."""


class MemoryStream(PipeEnd):
    """A connection on a :class:`MemoryNetwork`.

    Args:
        local, far: the peers between which the bytes travel.
        remote: the peer that is known to be at the other side.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        local: PeerID,
        far: PeerID,
        address: Multiaddr | None,
        remote: PeerID | None = None,
    ) -> None:
        super().__init__(remote, address)
        self._network, self._local, self._far = network, local, far
        self._under_way: deque[Piece] = deque()
        self._arrival = 0.0  # when the last piece sent from here arrives

    def send(self, piece: Piece) -> None:
        delay = self._network.delay(self._local, self._far, len(piece or b""))
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
        self._punching: dict[Multiaddr, tuple[PunchPort, PeerID]] = {}
        self._next_address = 1

    def transport(self, identity: Identity | None = None) -> MemoryTransport:
        """A transport for one peer of this network."""
        return MemoryTransport(self, identity or Identity.generate())

    def new_address(self) -> Multiaddr:
        """An unused address."""
        address = Multiaddr(f"/memory/{self._next_address}")
        self._next_address += 1
        return address

    async def connect(self, source: MemoryTransport, address: Multiaddr, expected_peer: PeerID | None) -> Stream:
        """Connect a peer to the peer that listens at an address."""
        local = source.identity.peer_id
        there = self.find_listener(address, None)[0].identity.peer_id if expected_peer is None else expected_peer
        round_trip = self.delay(local, there, 0) + self.delay(there, local, 0)
        await asyncio.sleep(round_trip)
        listener, on_stream = self.find_listener(address, there)
        listener.arrivals += 1
        near = MemoryStream(self, local, there, address, there)
        far = MemoryStream(self, there, local, None, local)
        source.show_badges(near, far, listener)
        near.other, far.other = far, near
        asyncio.get_running_loop().call_soon(on_stream, far)
        return near

    def find_listener(self, address: Multiaddr, expected_peer: PeerID | None) -> tuple[MemoryTransport, OnStream]:
        """The transport of the peer that listens at an address.

        Raises:
            RefusedDialError: nobody listens there.
            IdentityMismatchError: another peer than the expected one listens there.
        """
        found = self.listeners.get(address)
        if found is None:
            raise RefusedDialError(f"{address}: connection refused: nothing listens there")
        peer = found[0].identity.peer_id
        if expected_peer not in (None, peer):
            raise IdentityMismatchError(f"{address}: wrong identity: peer {peer} answers there, not {expected_peer}")
        return found

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def open_session(
        self, source: MemoryTransport, address: Multiaddr, cookie: bytes, *, punchable: bool, beside: Session | None
    ) -> MemorySession:
        """Connect a peer to a listening port, where it shows a cookie."""
        found = self.listeners.get(address)
        if found is None:
            raise RefusedDialError(f"{address}: connection refused: nothing listens there")
        here, there = source.identity.peer_id, found[0].identity.peer_id
        await asyncio.sleep(self.delay(here, there, 0) + self.delay(there, here, 0))
        local = (beside and beside.local_address) or self.new_address()
        near, far = self.make_pipe(here, there)
        arrived = MemorySession(far, address, local)
        asyncio.get_running_loop().call_later(self.delay(here, there, 0), found[0].expectations.meet, cookie, arrived)
        return MemorySession(near, local, address, punchable=punchable)

    def make_pipe(self, here: PeerID, there: PeerID) -> tuple[PipeEnd, PipeEnd]:
        """A connection between two peers on which neither side has identified itself."""
        near, far = MemoryStream(self, here, there, None), MemoryStream(self, there, here, None)
        near.other, far.other = far, near
        return near, far

    async def punch(
        self, source: MemoryTransport, session: MemorySession, candidates: Sequence[Multiaddr], seconds: float
    ) -> AsyncGenerator[MemorySession, None]:
        """Connect the port of a session to those candidates that punch too; this network has no routers in between."""
        address = cast("Multiaddr", session.local_address)
        port, owner = PunchPort(address, candidates), source.identity.peer_id
        self._punching[address] = (port, owner)
        try:
            for other, peer in list(self._punching.values()):
                if (address in other.candidates or other.address in candidates) and port.may_meet(other):
                    self._connect_ports(port, owner, other, peer)
            end = asyncio.get_running_loop().time() + seconds
            while (found := await port.next(end)) is not None:
                yield found
        finally:
            port.close()
            del self._punching[address]

    def _connect_ports(self, port: PunchPort, owner: PeerID, other: PunchPort, peer: PeerID) -> None:
        loop = asyncio.get_running_loop()
        near, far = self.make_pipe(owner, peer)
        first, second = (
            MemorySession(near, port.address, other.address),
            MemorySession(far, other.address, port.address),
        )
        loop.call_later(self.delay(peer, owner, 0), port.connected, first)
        loop.call_later(self.delay(owner, peer, 0), other.connected, second)


class MemoryTransport(Transport):
    """Reaches the peers of one :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, identity: Identity) -> None:
        self.identity = identity
        self._network = network
        self._listening: list[Multiaddr] = []
        self._told: list[Multiaddr] = []
        self.expectations = ExpectedSessions()
        """Sessions that others are expected to open."""
        self._work = TaskSet()

    def supports(self, address: Multiaddr) -> bool:
        return address.protocols() == ["memory"] or address.protocols() == ["ip4", "tcp"]

    async def listen(self, address: Multiaddr, on_stream: OnStream) -> list[Multiaddr]:
        if "memory" not in address:  # the default: any address will do
            address = self.free_address(address)
        if address in self._network.listeners:
            raise P2PDaemonError(f"cannot listen on {address}: another peer listens there")
        self._network.listeners[address] = (self, on_stream)
        self._listening.append(address)
        self._told.append(address)
        return [address]

    def free_address(self, wanted: Multiaddr) -> Multiaddr:
        """The address to listen on when ``wanted`` was asked for."""
        return self._network.new_address()

    def addresses(self, latest: bool = False) -> list[Multiaddr]:
        return list(self._told)

    async def dial(self, address: Multiaddr, expected_peer: PeerID | None) -> Stream:
        return await self._network.connect(self, address, expected_peer)

    def show_badges(self, near: PipeEnd, far: PipeEnd, listener: MemoryTransport) -> None:
        """Exchange badges as the handshake of :mod:`~.tcp.handshake` does; this side is the dialler.

        Raises:
            NotAMemberError: the listener and this peer are not of one run.
        """
        shown = b"" if listener.membership is None else listener.membership.shown_badge()
        near.badge = judge_listener(self.membership, near.remote, shown)
        far.shown_badge = b"" if self.membership is None else self.membership.shown_badge()

    # --- sessions -----------------------------------------------------------------------------------------------------

    def expect_session(self, cookie: bytes) -> asyncio.Future[Session]:
        return self.expectations.expect(cookie)

    async def open_session(
        self, address: Multiaddr, cookie: bytes, *, punchable: bool = False, beside: Session | None = None
    ) -> Session:
        return await self._network.open_session(self, address, cookie, punchable=punchable, beside=beside)

    async def authenticate(self, session: Session, expected_peer: PeerID) -> Stream:
        end = _end_of(session)
        await prove_on_pipe(end, self.identity, expected_peer, self.membership, session.remote_address)
        return end

    def receive(self, session: Session, on_stream: OnStream) -> None:
        self._work.start(self._receive(_end_of(session), on_stream))

    async def _receive(self, end: PipeEnd, on_stream: OnStream) -> None:
        if await meet_dialler(end, self.identity, self.membership):
            on_stream(end)

    def punch(
        self, session: Session, candidates: Sequence[Multiaddr], seconds: float, round_trip: float = ROUND_TRIP
    ) -> AsyncGenerator[Session, None]:
        assert isinstance(session, MemorySession)
        assert session.is_punchable, "open it with punchable=True"
        return self._network.punch(self, session, candidates, seconds)

    def stop_listening(self) -> None:
        """Refuse new connections from now on."""
        for address in self._listening:
            self._network.listeners.pop(address, None)
        self._listening.clear()

    async def close(self) -> None:
        self.stop_listening()
        self.expectations.close()
        await self._work.cancel()


def _end_of(session: Session) -> PipeEnd:
    assert isinstance(session, MemorySession)
    return session.take_over()
