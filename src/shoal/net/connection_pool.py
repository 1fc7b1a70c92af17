"""Connections to other peers: how they are dialled, and how they are kept for the next call.

A :class:`Dialler` tries all known addresses of a peer, each a little later than the one before: direct ones first, then
relays. Relays through which a connection has broken in the last minute come last.

In a :class:`ConnectionPool`, one call at a time uses a connection. A call that finds no idle connection dials a new
one, so a bulk transfer never blocks a small call. Many calls to one peer share a few dials: the call that has waited
longest takes the first connection that becomes free. Direct connections are preferred; relayed ones are closed once
there are direct ones.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

from shoal.base.tasks import TaskSet
from shoal.errors import (
    DialError,
    InterruptedDialError,
    NoRelayError,
    NoReservationError,
    NotAMemberError,
    P2PDaemonError,
    ShoalError,
    kind_of_dial_errors,
)
from shoal.metrics import Metrics
from shoal.net.addresses import AddressBook, Judge
from shoal.net.connection import Connection
from shoal.net.limits import MAX_DIALLED_PER_PEER
from shoal.net.transport import MAY_CONNECT, ON_ANSWER, Stream, Transport, abort_late
from shoal.peers.book import PeerBook
from shoal.peers.identity import PeerID, is_circuit, relay_of
from shoal.peers.multiaddr import Multiaddr

# Seconds until the next address of a peer is tried in parallel with one that has not answered yet; RFC 8305 recommends
# it for the addresses of a host.
DIAL_STAGGER = 0.25
# Chosen, like all that follow. The same once a machine has answered there: a handshake between two busy machines takes
# long, and two handshakes take longer.
HANDSHAKE_STAGGER = 2.0
# The same for the next relay of a peer: each relay needs a few round trips.
CIRCUIT_STAGGER = 1.5
CIRCUIT_SECONDS = 10.0
"""How long connecting through one relay may take."""

BROKEN_RELAY_SECONDS = 60.0  # for this long, a relay that fell silent or ended a connection is tried last

DIRECT_ONLY: ContextVar[bool] = ContextVar("DIRECT_ONLY", default=False)
"""Set while a relay itself is dialled, which must not go through another relay."""


class Dialler:
    """Dials peers at their known addresses; :meth:`close` gives up all dials in progress.

    Args:
        transport: opens the streams.
        addresses: where peers can be dialled.
        book: remembers which relays have fallen silent.
        metrics: counts the dials.
        dial_circuit: dials through a relay; ``None`` = use no relays.
    """

    def __init__(
        self,
        transport: Transport,
        addresses: AddressBook,
        book: PeerBook,
        metrics: Metrics,
        dial_circuit: Callable[[Multiaddr, PeerID], Coroutine[Any, Any, Stream]] | None = None,
    ) -> None:
        self._transport = transport
        self._addresses = addresses
        self._book = book
        self._metrics = metrics
        self.dial_circuit = dial_circuit
        self.tasks = TaskSet()
        """Dials in progress."""
        self._closed = False

    async def dial(self, peer: PeerID) -> Stream:
        """Dial the addresses of a peer, each a little later than the one before; the first success wins.

        Raises:
            DialError: no address is known, or none answers as that peer.
            RefusedDialError: nothing listens at any of them.
            P2PDaemonError: this peer is shut down.
        """
        addresses = [*self.direct_addresses(peer), *self.circuits(peer)]
        if not addresses and (doubtful := set(self._addresses.get(peer)) - set(self._addresses.to_dial(peer))):
            told = ", ".join(sorted(map(str, doubtful)))
            raise DialError(
                f"no address of peer {peer} is known: it says that it is at {told}, but is seen elsewhere. A private "
                "address counts only if it is seen in a private network; let it announce a public one (announce_maddrs)"
            )
        if not addresses:
            raise DialError(f"no address of peer {peer} is known: it may be in client mode, or it has left")
        return await self._dial_first(peer, addresses)

    def direct_addresses(self, peer: PeerID) -> list[Multiaddr]:
        """The addresses of a peer that lead through no relay, in the order to try."""
        direct = [each for each in self._addresses.to_dial(peer) if not is_circuit(each)]
        return self._transport.worth_dialling(direct, have_others=bool(self.circuits(peer)))

    def circuits(self, peer: PeerID) -> list[Multiaddr]:
        """The addresses of a peer at relays that this one can dial, in the order to try."""
        if self.dial_circuit is None or DIRECT_ONLY.get():
            return []
        since = asyncio.get_running_loop().time() - BROKEN_RELAY_SECONDS

        def broken_at(address: Multiaddr) -> float:
            relay = relay_of(address)
            return since if relay is None else max(since, self._book.find(relay[1]).silent_at)

        return sorted(filter(self.supports_circuit, self._addresses.to_dial(peer)), key=broken_at)

    def note_broken(self, relay: PeerID) -> None:
        """Dial other relays first for a while: a connection to this one, or through it, has broken."""
        self._book[relay].silent_at = asyncio.get_running_loop().time()

    def supports_circuit(self, address: Multiaddr) -> bool:
        """Whether an address leads through a relay that this peer can dial."""
        relay = relay_of(address)
        return relay is not None and self._transport.supports(relay[0])

    async def dial_address(self, peer: PeerID, address: Multiaddr, judge: Judge | None = None) -> Stream:
        """Dial one address of a peer; raises what :meth:`dial` raises.

        Args:
            judge: whether an IP address may be connected to.
        """
        return await self._dial_first(peer, [address], judge)

    async def meet(self, address: Multiaddr) -> Stream:
        """Dial an address whose peer is not known; the stream says which peer has proven to be there.

        Raises:
            DialError: no peer answers there.
            P2PDaemonError: this peer is shut down.
        """
        dial = self._start(None, address, set())
        try:
            await asyncio.wait([dial])
        except asyncio.CancelledError:
            dial.add_done_callback(abort_late)
            dial.cancel()
            raise
        if dial.cancelled():
            raise P2PDaemonError("this peer is shut down")
        return dial.result()

    async def _dial_first(self, peer: PeerID, addresses: Sequence[Multiaddr], judge: Judge | None = None) -> Stream:
        dials: dict[asyncio.Task[Stream], Multiaddr] = {}
        errors: list[BaseException] = []
        waiting, answered = list(addresses), set[Multiaddr]()
        try:
            while waiting or dials:
                if waiting:
                    address = waiting.pop(0)
                    dials[self._start(peer, address, answered, judge)] = address
                stagger = CIRCUIT_STAGGER if is_circuit(address) else DIAL_STAGGER
                await asyncio.wait(dials, timeout=stagger if waiting else None, return_when=asyncio.FIRST_COMPLETED)
                if waiting and address in answered and not any(task.done() for task in dials):
                    await asyncio.wait(dials, timeout=HANDSHAKE_STAGGER - stagger, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in dials if task.done()]:
                    address = dials.pop(task)
                    error = asyncio.CancelledError() if task.cancelled() else task.exception()
                    if error is None:
                        self._addresses.prefer(peer, address)
                        self._metrics.dials_direct += not is_circuit(address)
                        return task.result()
                    errors.append(self._addresses.judged(peer, address, error))
                    if isinstance(error, NoReservationError):
                        self._addresses.forget(peer, address)
        finally:
            for task in dials:
                task.add_done_callback(abort_late)
                task.cancel()
        if self._closed:
            raise P2PDaemonError("this peer is shut down")
        refusal = next((error for error in errors if isinstance(error, NotAMemberError)), errors[0])
        if all(isinstance(error, NoRelayError) for error in errors):
            raise NoRelayError(
                f"only relayed addresses of peer {peer} are known, and no relay answers: "
                f"{'; '.join(map(str, errors))}. Wait until it chooses others, or restart that peer"
            )
        if len(errors) == 1 or isinstance(refusal, NotAMemberError):
            raise refusal
        raise kind_of_dial_errors(errors)(f"cannot reach peer {peer}: " + "; ".join(map(str, errors)))

    def _start(
        self, peer: PeerID | None, address: Multiaddr, answered: set[Multiaddr], judge: Judge | None = None
    ) -> asyncio.Task[Stream]:
        if self._closed:
            raise P2PDaemonError("this peer is shut down")
        if peer is not None and is_circuit(address) and self.dial_circuit is not None:
            return self.tasks.start(self.dial_circuit(address, peer))
        if judge is None and peer is not None:
            judge = self._addresses.judge_of(peer, address)
        return self.tasks.start(self._dial_directly(peer, address, answered, judge))

    async def _dial_directly(
        self, peer: PeerID | None, address: Multiaddr, answered: set[Multiaddr], judge: Judge | None
    ) -> Stream:
        MAY_CONNECT.set(judge)
        ON_ANSWER.set(functools.partial(answered.add, address))
        return await self._transport.dial(address, peer)

    async def close(self) -> None:
        """Give up every dial in progress."""
        self._closed = True
        await self.tasks.cancel()


# All chosen. Limits on idle connections: a new connection costs round trips, an idle one costs a socket at both ends.
MAX_IDLE_PER_PEER = 12
MAX_IDLE = 256
# Older connections are replaced, because each new one begins with an exchange of addresses and of the time.
MAX_AGE_SECONDS = 900.0

# Dials to one peer at the same time.
MAX_PARALLEL_DIALS = 2
# For this long after a failed dial, calls wait for a connection that another call gives back.
BARREN_SECONDS = 10.0
SPARE = 4
"""The least number of direct connections to keep to a peer that is dialled through relays only. A round takes two or
more, and other calls run meanwhile. Without a relay no more can be made."""


@dataclass(eq=False)
class PooledPeer:
    """The connections and waiting calls of one peer."""

    peer_id: PeerID
    idle: list[Connection] = field(default_factory=list)
    in_use: dict[Connection, None] = field(default_factory=dict)
    dials: dict[asyncio.Task[Connection], asyncio.Future[Connection]] = field(default_factory=dict)
    """Dials, each with the call it was begun for. The first to connect serves the call that has waited longest."""
    elsewhere: int = 0
    """How many connections are being made elsewhere; waiting calls may have them."""
    waiting: dict[asyncio.Future[Connection], Context] = field(default_factory=dict)
    """Waiting calls in order, each with the context for its dial, such as :data:`DIRECT_ONLY`."""
    barren_until: float = 0.0
    """Dialling is not worth it before this time of the loop."""

    @property
    def dialling(self) -> int:
        return len(self.dials) + self.elsewhere

    @property
    def may_dial(self) -> bool:
        connections = len(self.in_use) + len(self.idle) + self.dialling
        if self.has_arranged_in_use and asyncio.get_running_loop().time() < self.barren_until:
            return False
        return self.dialling < MAX_PARALLEL_DIALS and connections < MAX_DIALLED_PER_PEER

    @property
    def has_arranged_in_use(self) -> bool:
        """Whether a call uses a connection arranged by a relay, which it will give back."""
        return any(each.stream.is_arranged for each in self.in_use)

    @property
    def has_direct(self) -> bool:
        return any(not each.stream.is_relayed for each in (*self.idle, *self.in_use))

    @property
    def is_forgettable(self) -> bool:
        return not (self.idle or self.in_use or self.dialling or self.waiting)

    def next_in_line(self) -> asyncio.Future[Connection] | None:
        while self.waiting:
            turn = next(iter(self.waiting))
            del self.waiting[turn]
            if not turn.done():
                return turn
        return None


class ConnectionPool:
    """Connections by peer.

    Args:
        dial: makes a new connection to a peer.
        idle_timeout: seconds after which an unused connection is closed.
        on_circuit: called with a peer once there is a new connection to it through a relay, or arranged by one.
        on_broken: called with a relay when a connection through it has broken.
    """

    def __init__(
        self,
        dial: Callable[[PeerID], Awaitable[Connection]],
        idle_timeout: float,
        on_circuit: Callable[[PeerID], object] = lambda peer: None,
        on_broken: Callable[[PeerID], object] = lambda relay: None,
    ) -> None:
        self._dial = dial
        self._idle_timeout = idle_timeout
        self._peers: dict[PeerID, PooledPeer] = {}
        self._idle_since: dict[Connection, float] = {}  # idle for longest first
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self.on_circuit, self.on_broken = on_circuit, on_broken

    def __contains__(self, peer: object) -> bool:
        """Whether there are connections to this peer, or soon will be."""
        return peer in self._peers

    @property
    def idle_count(self) -> int:
        return len(self._idle_since)

    @property
    def in_use_count(self) -> int:
        return sum(len(peer.in_use) for peer in self._peers.values())

    def count_of(self, peer_id: PeerID) -> int:
        """Connections to a peer that are idle, or soon will be."""
        peer = self._peers.get(peer_id)
        return 0 if peer is None else len(peer.idle) + peer.dialling

    def streams_to(self, peer_id: PeerID) -> list[Stream]:
        """What the connections to a peer run on, idle or in use."""
        peer = self._peers.get(peer_id)
        return [] if peer is None else [each.stream for each in (*peer.idle, *peer.in_use)]

    @property
    def dialling_count(self) -> int:
        return sum(peer.dialling for peer in self._peers.values())

    @property
    def waiting_count(self) -> int:
        return sum(len(peer.waiting) for peer in self._peers.values())

    # --- taking and giving back ---------------------------------------------------------------------------------------

    async def acquire(self, peer_id: PeerID) -> Connection:
        """A connection for the caller alone, to be given back with :meth:`release`.

        Raises:
            DialError: the peer cannot be reached.
            P2PDaemonError: this peer is shut down.
        """
        while True:
            self._check_open()
            peer = self._peers.setdefault(peer_id, PooledPeer(peer_id))
            connection = self._take_idle(peer) or await self._wait_for_turn(peer)
            if not connection.closed:
                return connection
            # The connection ended between two calls.
            self.release(connection, reusable=False)

    def release(self, connection: Connection, *, reusable: bool) -> None:
        """Give a connection back. If it is not reusable it is cut, which cancels the handler on the other side.

        A relayed connection is cut, too, if there are direct ones to that peer.
        """
        peer = self._peers[connection.remote]
        stream = connection.stream
        if not reusable and connection.closed and stream.via is not None:
            self.on_broken(stream.via)
        oldest = asyncio.get_running_loop().time() - MAX_AGE_SECONDS
        is_old = connection.opened_at < oldest and not stream.is_arranged
        if not reusable or connection.closed or self._closed or is_old:
            connection.abort()
            del peer.in_use[connection]
            self._dial_for_waiting(peer)
            return
        turn = peer.next_in_line()
        if turn is not None:
            turn.set_result(connection)
            return
        del peer.in_use[connection]
        if stream.via is not None and peer.has_direct:
            connection.abort()
        else:
            self._keep(peer, connection)

    async def prepare(self, peer_id: PeerID, count: int) -> None:
        """Dial until ``count`` connections are idle, for calls that will be made soon.

        Raises:
            DialError: the peer cannot be reached.
        """
        self._check_open()
        peer = self._peers.setdefault(peer_id, PooledPeer(peer_id))
        try:
            while len(peer.idle) + peer.dialling < min(count, MAX_IDLE_PER_PEER) and peer.may_dial:
                peer.elsewhere += 1
                try:
                    connection = await self._dial_new(peer)
                finally:
                    peer.elsewhere -= 1
                if connection.closed or connection.stream.via is None:
                    self.release(connection, reusable=True)
                else:  # relayed ones are not kept if there are direct ones
                    del peer.in_use[connection]
                    self._keep(peer, connection)
        finally:
            self._dial_for_waiting(peer)

    def add(self, connection: Connection) -> None:
        """Take over a connection that was made elsewhere and is idle."""
        peer = self._peers.setdefault(connection.remote, PooledPeer(connection.remote))
        turn = None if self._closed else peer.next_in_line()
        if turn is not None:
            peer.in_use[connection] = None
            turn.set_result(connection)
        else:
            self._keep(peer, connection)
        self._tell_of(connection)

    def expect(self, peer_id: PeerID, count: int) -> Callable[[], None]:
        """Let calls wait for ``count`` connections that are made elsewhere and will be added, rather than dial.

        Returns:
            A function that ends this, at any time; calls that still wait may dial then.
        """
        peer = self._peers.setdefault(peer_id, PooledPeer(peer_id))
        peer.elsewhere += count

        def end() -> None:
            nonlocal count
            peer.elsewhere -= count
            count = 0
            self._dial_for_waiting(peer)

        return end

    def _tell_of(self, connection: Connection) -> None:
        if connection.stream.via is not None or connection.stream.is_arranged:
            self.on_circuit(connection.remote)

    def _check_open(self) -> None:
        if self._closed:
            raise P2PDaemonError("this peer is shut down")

    # --- idle connections ---------------------------------------------------------------------------------------------

    def _keep(self, peer: PooledPeer, connection: Connection) -> None:
        if len(peer.idle) >= MAX_IDLE_PER_PEER and connection.stream.via is None:
            self._end_idle(next((each for each in peer.idle if each.stream.via is not None), connection))
        if self._closed or len(peer.idle) >= MAX_IDLE_PER_PEER:
            connection.abort()
            self._forget_if_possible(peer)
            return
        if len(self._idle_since) >= MAX_IDLE:
            self._end_idle(next(iter(self._idle_since)))
        peer.idle.append(connection)
        self._idle_since[connection] = asyncio.get_running_loop().time()
        connection.stream.on_closed(functools.partial(self._end_idle, connection))
        self._schedule_sweep()

    def _take_idle(self, peer: PooledPeer) -> Connection | None:
        if not peer.idle:
            return None
        connection = peer.idle[-1]
        if connection.stream.via is not None:
            connection = next((each for each in reversed(peer.idle) if each.stream.via is None), connection)
        peer.idle.remove(connection)
        del self._idle_since[connection]
        connection.stream.on_closed(None)
        peer.in_use[connection] = None
        return connection

    def _end_idle(self, connection: Connection) -> None:
        """Cut an idle connection. Nothing is in flight on it, so there is nothing to wait for."""
        if self._idle_since.pop(connection, None) is None:
            return
        peer = self._peers[connection.remote]
        peer.idle.remove(connection)
        connection.abort()
        self._forget_if_possible(peer)

    @property
    def peers(self) -> list[PeerID]:
        """The peers that have connections, or soon will."""
        return list(self._peers)

    def cut(self, is_unwanted: Callable[[Stream], bool]) -> None:
        """End the connections that are no longer wanted; calls on them fail."""
        for connection in [each for each in self._idle_since if is_unwanted(each.stream)]:
            self._end_idle(connection)
        for peer in self._peers.values():
            for connection in [each for each in peer.in_use if is_unwanted(each.stream)]:
                connection.stream.abort()

    def drop_via(self, relay: PeerID) -> None:
        """End the connections through a relay that is gone."""
        self.cut(lambda stream: stream.via == relay)

    def end_idle(self, peer_id: PeerID) -> None:
        """Close the idle connections to a peer, because what broke another one may have broken these, too."""
        if peer_id in self._peers:
            for connection in list(self._peers[peer_id].idle):
                self._end_idle(connection)

    def renew(self) -> list[PeerID]:
        """Close idle connections, so that the next call greets again; returns the peers that had connections."""
        peers = [peer.peer_id for peer in self._peers.values() if peer.idle or peer.in_use]
        # Connections arranged by a relay stay: there may be no relay left to arrange others.
        for connection in [each for each in self._idle_since if not each.stream.is_arranged]:
            self._end_idle(connection)
        return peers

    def _forget_if_possible(self, peer: PooledPeer) -> None:
        if peer.is_forgettable:
            self._peers.pop(peer.peer_id, None)

    def _schedule_sweep(self) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._idle_timeout, self._close_idle)

    def _close_idle(self) -> None:
        self._sweep = None
        too_old = asyncio.get_running_loop().time() - self._idle_timeout
        mortal = {c: since for c, since in self._idle_since.items() if not c.stream.is_arranged}
        for connection in [c for c, since in mortal.items() if since <= too_old]:
            self._end_idle(connection)
        if mortal:
            self._schedule_sweep()

    # --- new connections ----------------------------------------------------------------------------------------------

    async def _dial_new(self, peer: PooledPeer) -> Connection:
        """A new connection, which counts as used."""
        connection = await self._dial(peer.peer_id)
        if connection.closed:
            raise InterruptedDialError(
                f"peer {peer.peer_id} ended the connection before it could be used: it may have no room for more; "
                "try again later"
            )
        peer.in_use[connection] = None
        if self._closed:
            self.release(connection, reusable=False)
            self._check_open()
        self._tell_of(connection)
        return connection

    async def _wait_for_turn(self, peer: PooledPeer) -> Connection:
        turn: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        peer.waiting[turn] = copy_context()
        self._dial_for_waiting(peer)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self.release(turn.result(), reusable=True)
            peer.waiting.pop(turn, None)
            # Its dial may be in the backoff of a network gap: a new one for the next call connects sooner.
            for dial, begun_for in peer.dials.items():
                if begun_for is turn or not peer.waiting:
                    dial.cancel()
            self._dial_for_waiting(peer)
            raise

    def _dial_for_waiting(self, peer: PooledPeer) -> None:
        """Dial for each waiting call, as far as that is allowed."""
        while len(peer.waiting) > len(peer.dials) and peer.may_dial and not self._closed:
            turn, context = [*peer.waiting.items()][len(peer.dials)]
            dial = asyncio.get_running_loop().create_task(self._dial_new(peer), context=context)
            peer.dials[dial] = turn
            dial.add_done_callback(functools.partial(self._end_dial, peer))
        self._forget_if_possible(peer)

    def _end_dial(self, peer: PooledPeer, dial: asyncio.Task[Connection]) -> None:
        del peer.dials[dial]
        error = None if dial.cancelled() else dial.exception()
        if isinstance(error, DialError) and peer.has_arranged_in_use:
            # A call that uses an arranged connection will give it back.
            peer.barren_until = asyncio.get_running_loop().time() + BARREN_SECONDS
        elif error is not None:
            # More dials would fail just as slowly, so do not let timeouts queue up.
            are_all_lost = isinstance(error, ShoalError) and not peer.in_use
            self._fail_waiting(peer, error, len(peer.waiting) - len(peer.dials) if are_all_lost else 1)
        elif not dial.cancelled():
            self.release(dial.result(), reusable=True)
        self._dial_for_waiting(peer)

    def _fail_waiting(self, peer: PooledPeer, error: BaseException, count: int) -> None:
        """Fail the calls that have waited longest."""
        for _ in range(count):
            turn = peer.next_in_line()
            if turn is not None:
                turn.set_exception(error)
            error = copy.copy(error)  # each caller gets a traceback of its own

    def close(self) -> None:
        """Cut every connection; calls in progress fail."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        self.cut(lambda stream: True)
        for peer in list(self._peers.values()):
            for dial in peer.dials:
                dial.cancel()
            self._fail_waiting(peer, P2PDaemonError("this peer is shut down"), len(peer.waiting))
