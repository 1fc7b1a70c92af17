"""One end of connections: what a peer is on the network, as far as it knows the addresses of others.

An :class:`Endpoint` has an identity, connections to others, and handlers that they call. It knows nothing of routers
and relays: its abstract methods say what it needs from them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol

from shoal.access.badges import Roles
from shoal.access.membership import Membership
from shoal.base.clock import get_clock
from shoal.base.logs import note_name
from shoal.base.tasks import TaskSet
from shoal.errors import DialError, NoReservationError, NotAMemberError, P2PDaemonError, ProtocolError
from shoal.metrics import Metrics
from shoal.net.addresses import (
    AddressBook,
    Judge,
    UnreachablePeers,
    host_of,
    ip_text_of,
    is_name,
    is_private,
    may_be_dialled_for,
)
from shoal.net.connection import Call, Connection, Hello
from shoal.net.connection_pool import ConnectionPool, Dialler
from shoal.net.limits import HeaderMemory, Limits
from shoal.net.pasted import short_form
from shoal.net.server import CallServer
from shoal.net.service import Handler
from shoal.net.transport import H, Header, Stream, Transport
from shoal.peers.book import PeerBook
from shoal.peers.identity import PeerID, PeerInfo, relay_of
from shoal.peers.multiaddr import Multiaddr
from shoal.peers.scores import PeerScores

logger = logging.getLogger(__name__)

AGENT = "shoal"


class Directory(Protocol):
    """Knows peers that this one has not met; the DHT is one."""

    async def find_addresses(self, peer: PeerID) -> None:
        """Look up where a peer can be dialled, and add what is found to the endpoint's addresses."""

    def dialable_peers(self) -> Sequence[PeerID]:
        """Some peers that others can dial. Nearly all of them are relays."""

    def note_reachability(self) -> None:
        """The way in which others can call this peer has changed."""


class Announcement(NamedTuple):
    """How others can call a peer."""

    addresses: list[Multiaddr]
    """Where they should dial it, the best first."""
    reach: int
    """See :class:`~shoal.reach.reachability.Reach`."""
    is_relay: bool


class Endpoint(ABC):
    """Calls other peers, and answers them.

    It has many attributes, because the parts of this package meet here: each attribute is one part.

    Args:
        transport: opens streams; it brings the identity.
        rng: source of every random choice.
        idle_timeout: seconds after which an unused connection is closed.
        limits: what others are granted.
        dials_relays: whether to dial others through relays if there is no other way.
        name: what this peer calls itself.
    """

    def __init__(
        self,
        transport: Transport,
        rng: random.Random,
        metrics: Metrics,
        idle_timeout: float,
        limits: Limits,
        *,
        dials_relays: bool,
        name: str,
    ) -> None:
        self.name = name
        """The name of this peer, for people to read."""
        self.identity = transport.identity
        self.peer_id = transport.identity.peer_id
        self.transport = transport
        self.rng = rng
        self.metrics = metrics
        self.client_mode = False
        self.is_alive = True
        self.instance = rng.randbytes(16)
        """Tells this process from another one with the same identity."""
        self.directory: Directory | None = None
        """Looks up peers without a known address; the DHT node of this peer."""
        self.book = PeerBook(on_forget=lambda peer: metrics.peers.pop(str(peer), None))
        """What this peer knows of others."""
        self.address_book = AddressBook(self._supports, self.book)
        """Where others can be dialled."""
        self.met: dict[Multiaddr, PeerID] = {}
        """By address without a peer id: the peer that has answered there."""
        self.behaviour = PeerScores(metrics, asyncio.get_running_loop().time, self.book)
        """What this peer has seen others do."""
        self.membership: Membership | None = None
        """This peer's place in a private run; ``None`` in an open one."""
        self.clock = get_clock()  # the DHT time of this peer
        self.dialler = Dialler(
            transport, self.address_book, self.book, metrics, self.find_way if dials_relays else None
        )
        """Opens connections to others."""
        self.pool = ConnectionPool(
            self.dial, idle_timeout, on_circuit=self.note_circuit, on_broken=self.dialler.note_broken
        )
        """Those connections."""
        self.server = CallServer(self.peer_id, metrics, limits, self.greet, self._trains_with, self.behaviour)
        """Answers on connections that others have opened."""
        self.header_memory = HeaderMemory(limits)
        """Accounts for the memory of large incoming headers."""
        self.tasks = TaskSet()
        """Background work until this peer shuts down."""
        self._unreachable = UnreachablePeers(self.book)

    # --- what routers and relays have to do with it -------------------------------------------------------------------

    @abstractmethod
    def announce(self, latest: bool = False) -> Announcement:
        """What to tell others about how to call this peer.

        Args:
            latest: look at this machine's networks again.
        """

    @abstractmethod
    def outer_hosts(self) -> set[str]:
        """The hosts in front of this machine, such as its router; other peers behind them are neighbours."""

    @abstractmethod
    async def find_way(self, address: Multiaddr, peer: PeerID) -> Stream:
        """Connect to a peer through a relay, or with its help.

        Raises:
            DialError: that did not work.
        """

    @abstractmethod
    def note_stream(self, stream: Stream) -> None:
        """A connection with another peer was made."""

    @abstractmethod
    def note_circuit(self, peer: PeerID) -> None:
        """A connection to a peer was made through a relay, or arranged by one."""

    @abstractmethod
    def note_relay(self, peer: PeerID, is_relay: bool) -> None:
        """A peer says whether it is a relay."""

    @abstractmethod
    def note_greeting(self, connection: Connection, hello: Hello) -> None:
        """A peer has greeted this one, and its greeting was processed."""

    # --- addresses ----------------------------------------------------------------------------------------------------

    def announced(self, latest: bool = False) -> list[Multiaddr]:
        """The addresses at which others should dial this peer; ``latest`` as for :meth:`announce`."""
        return self.announce(latest).addresses

    def _supports(self, address: Multiaddr) -> bool:
        return self.transport.supports(address) or self.dialler.supports_circuit(address)

    def add_addresses(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """Remember where a peer can be dialled, as told by a third party."""
        self.address_book.add(peer, addresses)

    def is_reachable(self, peer: PeerID) -> bool:
        """Whether an address of the peer is known."""
        return bool(self.announced()) if peer == self.peer_id else peer in self.address_book

    def get_addresses(self, peer: PeerID) -> list[Multiaddr]:
        """Where a peer can be dialled, as far as known, without ``/p2p``."""
        return self.announced() if peer == self.peer_id else self.address_book.get(peer)

    def seen_of(self, peer: PeerID) -> Multiaddr | None:
        """Where a peer that has connected to this one is seen; through a relay only if it has no other connection."""
        streams = [connection.stream for connection in self.server.connections_of(peer)]
        return next(self.server.addresses_of(peer), streams[-1].remote_address if streams else None)

    def judge_for(self, seen_at: Multiaddr | None) -> Judge:
        """The judge of addresses claimed by a peer that is seen at ``seen_at``."""
        return functools.partial(self._may_be_dialled_for, seen_at)

    def _may_be_dialled_for(self, seen_at: Multiaddr | None, address: Multiaddr) -> bool:
        through = None if seen_at is None else relay_of(seen_at)
        relay = relay_of(address)
        if relay is not None and (relay == through or self._dials_relay_at(*relay)):
            return True
        if through is not None:
            seen_at = None  # a peer behind a relay may be anywhere
        transport, outer = self.transport, self.outer_hosts()
        return may_be_dialled_for(
            address if relay is None else relay[0],
            seen_at,
            is_inside=lambda seen: transport.is_inside(seen) or ip_text_of(seen) in outer,
            is_here=transport.is_here,
        )

    def _dials_relay_at(self, place: Multiaddr, relay: PeerID) -> bool:
        """Whether this peer dials a relay at an address even without a circuit through it."""
        judge = self.address_book.judge_of(relay, place)
        is_known = place in self.address_book.peek(relay) and (judge is None or judge(place))
        return relay == self.peer_id or is_known

    def far_host_of(self, peer: PeerID) -> str:
        """The IP address on the internet from which another peer has connected; empty if it is in a network nearby."""
        address = next(self.server.addresses_of(peer), None)
        if address is None or is_private(address) or self.transport.is_inside(address):
            return ""
        return address.values()[0] or ""

    def is_hopeless(self, peer: PeerID) -> bool:
        """Whether another peer cannot be dialled from here: it is far away, and all its addresses are private.

        It ignores the networks of this machine: the other peer could learn them from how soon the answer comes.
        """
        addresses = self.address_book.peek(peer)
        judge = self.judge_for(self.seen_of(peer))
        return bool(addresses) and not any(is_name(each) or judge(each) for each in addresses)

    def host_of(self, peer: PeerID) -> PeerID | str:
        """The host of a peer, see :mod:`shoal.net.addresses`; from any thread."""
        return self.address_book.host_of(peer)

    def host_seen_of(self, peer: PeerID) -> PeerID | str:
        """Like :meth:`host_of`, but by the addresses from which the peer has connected, whatever it announces."""
        return host_of(peer, self.server.addresses_of(peer))

    async def list_peers(self) -> list[PeerInfo]:
        """Peers with known addresses, and peers connected to this one, whose addresses may be unknown."""
        connected: dict[PeerID, list[Multiaddr]] = {peer: [] for peer in self.server.peers if peer != self.peer_id}
        return [
            PeerInfo(peer, addresses) for peer, addresses in {**connected, **dict(self.address_book.items())}.items()
        ]

    async def wait_for_at_least_n_peers(self, n_peers: int, attempts: int = 3, delay: float = 1) -> None:
        """Wait until ``n_peers`` peers are known.

        Args:
            n_peers: the number of other peers.
            attempts: how often to look.
            delay: seconds between two looks.

        Raises:
            P2PDaemonError: fewer are known after the last look.
        """
        known = 0
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(delay)
            known = len(await self.list_peers())
            if known >= n_peers:
                return
        raise P2PDaemonError(f"other peers known: {known}, not {n_peers}")

    # --- connections --------------------------------------------------------------------------------------------------

    async def connect(self, peer: PeerID, address: Multiaddr) -> None:
        """Connect to a peer at a certain address; the next call uses this connection.

        Raises:
            DialError: the peer cannot be reached there.
        """
        self.pool.add(self.greet(await self.dialler.dial_address(peer, address)))

    async def meet(self, address: Multiaddr) -> PeerID:
        """Connect to whatever peer answers at an address, and remember that it is there.

        Raises:
            DialError: none answers, or it is this peer itself.
        """
        stream = await self.dialler.meet(address)
        peer, known = stream.remote, self.met.get(address)
        self.met[address] = peer
        if peer == self.peer_id:
            stream.abort()
            raise DialError(f"{address}: this is the address of this peer itself")
        self.add_addresses(peer, [address])
        self.address_book.prefer(peer, address)
        self.pool.add(self.greet(stream))
        if peer != known:
            full = address.encapsulate(f"/p2p/{peer}")
            shown = short_form(address) or address
            logger.info("peer %s answers at %s; its identity was not checked; to pin it: %s", peer, shown, full)
        return peer

    def _trains_with(self, peer: PeerID) -> bool:
        return peer in self.pool or self.behaviour.has_delivered(peer)

    def greet(self, stream: Stream) -> Connection:
        """Wrap a stream in a connection that sends this peer's greeting first."""
        self.note_stream(stream)
        return Connection(stream, self.metrics, self.hello, self.on_hello, self.header_memory)

    def hello(self) -> Hello:
        """The greeting that this peer sends first on each connection."""
        addresses, reach, is_relay = self.announce()
        return Hello(
            [str(address) for address in addresses],
            AGENT,
            self.clock.time(),
            self.clock.offset,
            revocations=0 if self.membership is None else self.membership.serial,
            reach=reach,
            instance=self.instance,
            relay=is_relay,
            name=self.name,
        )

    def on_hello(self, connection: Connection, hello: Hello) -> None:
        """Learn from another peer's greeting."""
        if hello.addresses and connection.remote != self.peer_id:
            judge = self.judge_for(connection.stream.remote_address)
            self.address_book.replace(connection.remote, hello.addresses, judge)
        if hello.agent:  # otherwise it tells nothing of itself
            if hello.name:
                note_name(str(connection.remote), hello.name)
            self.book[connection.remote].reach = hello.reach
            self.note_relay(connection.remote, hello.relay)
        self.clock.meet()
        if connection.round_trip is not None:
            record = self.book[connection.remote]
            record.round_trip = min(connection.round_trip, record.round_trip)
            is_mate = self.behaviour.has_delivered(connection.remote)
            self.clock.hear(connection.remote, hello.time, hello.clock_offset, connection.round_trip, is_mate=is_mate)
            self.metrics.clock_offset = self.clock.offset
        self.note_greeting(connection, hello)

    def drop_idle(self, peer: PeerID) -> None:
        """Let the next call to a peer be made over a new connection: idle ones may have broken without a sign."""
        self.pool.end_idle(peer)

    def round_trip_to(self, peer: PeerID) -> float:
        """The shortest measured round trip to a peer, in seconds; 0 if there is none."""
        shortest = self.book.find(peer).round_trip
        return 0.0 if math.isinf(shortest) else shortest

    async def dial(self, peer: PeerID) -> Connection:
        """Make a new connection, which the caller has to close; raises what :meth:`Dialler.dial` raises."""
        if not self.is_alive:
            raise P2PDaemonError("this peer is shut down")
        if peer == self.peer_id:
            raise P2PDaemonError("a peer cannot call itself over the network")
        await self._look_up(peer)
        try:
            stream = await self.dialler.dial(peer)
        except NoReservationError:
            # It may have other relays by now. The dialler has already forgotten the addresses that it has left.
            if not await self._look_up(peer):
                raise
            stream = await self.dialler.dial(peer)
        self._unreachable.note_connection(peer)
        return self.greet(stream)

    async def _look_up(self, peer: PeerID) -> bool:
        """Look up a peer without a known address; returns whether there are new ones."""
        if self.directory is None or self.is_reachable(peer):
            return False
        await self.directory.find_addresses(peer)
        return self.is_reachable(peer)

    def note_uncalled(self, peer: PeerID, error: BaseException, *, company: str, sign_of_life: float) -> None:
        """A call to a peer that should be online has failed. The user is told once, after a few failures.

        Args:
            error: how it failed.
            company: what both peers take part in, such as the name of a run.
            sign_of_life: grows with each sign of life of that peer, such as the time of a record that it has published.
        """
        addresses = self.address_book.get(peer)
        self._unreachable.note_failure(peer, error, addresses, company=company, sign_of_life=sign_of_life)

    async def dial_without_greeting(
        self, peer: PeerID, address: Multiaddr | None = None, judge: Judge | None = None
    ) -> Connection:
        """Make a connection on which this peer does not announce its addresses; the caller has to close it.

        Args:
            address: where to dial; default: at all known addresses.
            judge: whether to connect to the IP addresses of ``address``.

        Raises:
            DialError: the peer cannot be reached, or not at this address.
        """
        dial = self.dialler.dial(peer) if address is None else self.dialler.dial_address(peer, address, judge)
        stream = await dial
        return Connection(
            stream, self.metrics, lambda: Hello(instance=self.instance), self.on_hello, self.header_memory
        )

    def address_seen_of(self, peer: PeerID) -> str:
        """The address from which a peer has connected to this one, or empty if the transport does not know it."""
        return next(map(str, self.server.addresses_of(peer)), "")

    # --- serving ------------------------------------------------------------------------------------------------------

    def add_handlers(self, handlers: Mapping[str, Handler]) -> None:
        """Serve handlers by name.

        Raises:
            P2PDaemonError: one of the names is taken.
        """
        self.server.add_handlers(handlers)

    def remove_handlers(self, names: Iterable[str]) -> None:
        """Stop serving these handlers; calls in progress continue."""
        self.server.remove_handlers(names)

    # --- calling ------------------------------------------------------------------------------------------------------

    async def call(
        self,
        peer: PeerID,
        handle: str,
        request: Header,
        response_type: type[H],
        timeout: float | None = None,
        *,
        roles: Roles = Roles.TRAIN,
    ) -> H:
        """Call a unary handler at another peer.

        Args:
            timeout: seconds in total, dialling included; ``None`` = as long as the connection lives.
            roles: in a private run, both sides need one of these.

        Raises:
            P2PHandlerError: the handler raised.
            NotAMemberError: one of the sides may not take part in this call.
            P2PDaemonError: the peer cannot be reached, the connection broke, or the peer has no such handler.
            TimeoutError: no answer in time.
        """
        async with asyncio.timeout(timeout):
            call = await self._begin_call(peer, handle, roles)
            if not call.connection.stream.is_arranged:
                return await self._ask(call, request, response_type)
            asking = asyncio.ensure_future(self._ask(call, request, response_type))
            try:
                return await asyncio.shield(asking)
            except asyncio.CancelledError:
                self.tasks.start(_await_late(asking))
                raise

    async def _ask(self, call: Call, request: Header, response_type: type[H]) -> H:
        try:
            return await call.ask(request, response_type)
        except BaseException as e:
            self._note_failure(call, e)
            raise
        finally:
            self.pool.release(call.connection, reusable=call.clean)

    @asynccontextmanager
    async def open_call(self, peer: PeerID, handle: str, *, roles: Roles = Roles.TRAIN) -> AsyncIterator[Call]:
        """Call a handler that receives and sends any number of messages; ``roles`` as for :meth:`call`.

        Leaving the block before both sides have ended cuts the connection, which cancels the handler.
        """
        call = await self._begin_call(peer, handle, roles)
        try:
            yield call
        except BaseException as e:
            self._note_failure(call, e)
            raise
        finally:
            self.pool.release(call.connection, reusable=call.clean)

    async def _begin_call(self, peer: PeerID, handle: str, roles: Roles) -> Call:
        if self.membership is not None:
            self.membership.check_own(roles)
        connection = await self.pool.acquire(peer)
        gate = self.server.gate
        try:
            if self.membership is not None:
                self.membership.check(connection.stream.badge, roles, dialled=True)
            if gate is not None and self.server.needs_proof(connection, handle):
                await gate.enter(connection)
        except BaseException as e:
            # Other calls may be allowed on it.
            self.pool.release(connection, reusable=isinstance(e, NotAMemberError) and e.reason == "wrong role")
            raise
        self.metrics.calls_made += 1
        return connection.open_call(handle)

    def _note_failure(self, call: Call, error: BaseException) -> None:
        self.metrics.calls_failed += 1
        if isinstance(error, ProtocolError):
            self.metrics.connections_dropped["broke the protocol"] += 1
            call.connection.abort()
        elif isinstance(error, NotAMemberError) and self.membership is not None:
            self.membership.note_refused(call.remote, error)


async def _await_late(asking: asyncio.Future[Any]) -> None:
    """Wait for an answer that nobody wants any more, to save a connection that could not be made again."""
    try:
        async with asyncio.timeout(30.0):  # longer than most calls may take
            await asking
    except Exception as e:
        logger.debug("a late answer: %r", e)
