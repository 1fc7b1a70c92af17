"""A network inside one process: the same streams as over TCP, without sockets, for tests and simulations.

Bytes arrive in order, after a delay that the network decides, in the time of the running loop. So a loop with virtual
time runs a slow network in no time. ``shoal.testing`` builds a network with hosts, bandwidth and faults on top.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

from shoal.access.membership import judge_listener
from shoal.base.tasks import cancel_and_wait
from shoal.errors import IdentityMismatchError, P2PDaemonError, RefusedDialError
from shoal.net.memory_sessions import (
    Expectations,
    MemorySession,
    MemorySplice,
    PunchPort,
    meet_dialler,
    prove_on_pipe,
)
from shoal.net.pipes import Piece, PipeEnd
from shoal.net.transport import ROUND_TRIP, OnStream, Session, Stream, Throttle, Transport
from shoal.peers.identity import Identity, PeerID
from shoal.peers.multiaddr import Multiaddr

Delay = Callable[[PeerID, PeerID, int], float]
"""Seconds that a number of bytes takes from one peer to another."""


class MemoryStream(PipeEnd):
    """A connection on a :class:`MemoryNetwork`.

    Args:
        local, far: the peers between which the bytes travel.
        remote: who is known to be at the other side.
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
        """A connection between two peers on which nobody has said who it is."""
        near, far = MemoryStream(self, here, there, None), MemoryStream(self, there, here, None)
        near.other, far.other = far, near
        return near, far

    async def punch(
        self, source: MemoryTransport, session: MemorySession, candidates: Sequence[Multiaddr], seconds: float
    ) -> AsyncGenerator[MemorySession, None]:
        """Connect the port of a session to those candidates that punch too: here is nothing between any two peers."""
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
        self.expectations = Expectations()
        """The sessions that others are to open."""
        self._work: set[asyncio.Task[None]] = set()

    def supports(self, address: Multiaddr) -> bool:
        return address.protocols() == ["memory"] or address.protocols() == ["ip4", "tcp"]

    async def listen(self, address: Multiaddr, on_stream: OnStream) -> list[Multiaddr]:
        if "memory" not in address:  # the default: any address will do
            address = self.free_address(address)
        if address in self._network.listeners:
            raise P2PDaemonError(f"cannot listen on {address}: somebody else does")
        self._network.listeners[address] = (self, on_stream)
        self._listening.append(address)
        self._told.append(address)
        return [address]

    def free_address(self, wanted: Multiaddr) -> Multiaddr:
        """The address to listen on if this one is asked for."""
        return self._network.new_address()

    def addresses(self, latest: bool = False) -> list[Multiaddr]:
        return list(self._told)

    async def dial(self, address: Multiaddr, expected_peer: PeerID | None) -> Stream:
        return await self._network.connect(self, address, expected_peer)

    def show_badges(self, near: PipeEnd, far: PipeEnd, listener: MemoryTransport) -> None:
        """What the handshake of :mod:`~.tcp.handshake` does, as the one who dials.

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

    async def join(self, first: Session, second: Session, throttle: Throttle, idle_seconds: float) -> None:
        await MemorySplice(_end_of(first), _end_of(second), throttle, idle_seconds).run()

    async def authenticate(self, session: Session, expected_peer: PeerID) -> Stream:
        end = _end_of(session)
        await prove_on_pipe(end, self.identity, expected_peer, self.membership, session.remote_address)
        return end

    def receive(self, session: Session, on_stream: OnStream) -> None:
        task = asyncio.get_running_loop().create_task(self._receive(_end_of(session), on_stream))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

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
        self.expectations.clear()
        await cancel_and_wait(*self._work)


def _end_of(session: Session) -> PipeEnd:
    assert isinstance(session, MemorySession)
    return session.take_over()
