"""One peer on the network: its identity, where it listens, which peers it can call, and what it serves."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.access.membership import Membership
from shoal.base.clock import get_clock
from shoal.base.logs import note_name
from shoal.base.tasks import cancel_and_wait
from shoal.errors import BootstrapError, DialError, IdentityTakenError, NoReservationError, P2PDaemonError
from shoal.metrics import Metrics
from shoal.net.addresses import (
    AddressBook,
    Judge,
    Notes,
    UnreachablePeers,
    host_of,
    ip_text_of,
    may_be_dialled_for,
)
from shoal.net.calling import Caller
from shoal.net.connection import Connection, Hello
from shoal.net.connection_pool import ConnectionPool
from shoal.net.dialler import Dialler
from shoal.net.limits import DEFAULT_LIMITS, DEFAULT_RELAY_LIMITS, HeaderMemory, Limits, RelayLimits, have_enough_files
from shoal.net.own_addresses import checked_announcement
from shoal.net.pasted import Target, read_addresses, short_form, wants_local
from shoal.net.server import Server
from shoal.net.service import Gate, Handler
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import Stream, Transport
from shoal.p2p.joining import advise_on_private, reach_first
from shoal.p2p.joining import parse_peer_addresses as parse_peer_addresses
from shoal.p2p.revocation import RevocationExchange
from shoal.peers.identity import Identity, PeerID, PeerInfo, relay_of
from shoal.peers.multiaddr import Multiaddr
from shoal.peers.names import checked_name
from shoal.peers.scores import PeerScores
from shoal.reach.checkup import Checkup
from shoal.reach.connection_upgrade import ConnectionUpgrades
from shoal.reach.libp2p_options import Libp2pOptions
from shoal.reach.manager import ReachabilityManager
from shoal.reach.presence import Presence, check_identity_is_free, compare_clocks
from shoal.reach.punching import Puncher
from shoal.reach.reachability import Reachability
from shoal.reach.relay.client import RelayClient
from shoal.reach.relay.incoming import IncomingCircuits
from shoal.reach.relay.outgoing import OutgoingCircuits
from shoal.reach.relay.server import RelayServer

logger = logging.getLogger(__name__)

AGENT = "shoal"
INSTANCE_BYTES = 16
# Seconds between two comparisons of the clock with those of others, unless it has jumped.
COMPARE_AGAIN_SECONDS = 10.0


class P2P(Caller):
    """A peer. Made by :meth:`create`; lives in one event loop."""

    def __init__(
        self,
        transport: Transport,
        rng: random.Random,
        metrics: Metrics,
        idle_timeout: float,
        limits: Limits,
        relay: bool | None,
        relay_limits: RelayLimits,
        options: Libp2pOptions,
        name: str = "",
    ) -> None:
        self.name = name
        """What this peer calls itself."""
        self.identity = transport.identity
        self.peer_id = transport.identity.peer_id
        self.transport = transport
        self.rng = rng
        self.metrics = metrics
        self.client_mode = False
        self.port_stays = False
        """It listens at a port that the user has chosen."""
        self.is_alive = True
        self.instance = rng.randbytes(INSTANCE_BYTES)
        """Tells this process from another one with the same identity."""
        self.find_addresses: Callable[[PeerID], Awaitable[None]] | None = None
        """Looks up a peer without a known address before it is dialled; set by the DHT node."""
        self.address_book = AddressBook(self._supports)
        """Where others can be dialled."""
        self.header_memory = HeaderMemory(limits)
        """What large headers on their way in take."""
        self.dialler = Dialler(transport, self.address_book, metrics)
        """Opens connections to others."""
        self.late_answers = {}
        self.pool = ConnectionPool(self.dial, idle_timeout)
        """Those connections."""
        self.pool.on_broken = self.dialler.note_broken
        self.behaviour = PeerScores(metrics, asyncio.get_running_loop().time)
        """What this peer has seen others do."""
        self.membership = None
        self.members: RevocationExchange | None = None
        """Keeps who is expelled from that run."""
        self.server = Server(self.peer_id, metrics, limits, self.greet, self._trains_with, self.behaviour)
        """Answers on connections that others have opened."""
        self.outlook = ReachabilityManager(self, options)
        """Finds out whether others can call this peer."""
        self.departed: Notes[float] = Notes()
        """When peers have said goodbye, in DHT time; ``-inf`` if they have come back since."""
        self.met: dict[Multiaddr, PeerID] = {}
        """Which peer has answered at an address that says nothing of its peer, by the address."""
        self.reaches: Notes[int] = Notes()
        """How others are called, as they say: see :class:`~shoal.reach.reachability.Reach`."""
        self.relay = RelayServer(self, relay, relay_limits)
        """Joins connections of others, if this peer is a relay."""
        self.circuits = OutgoingCircuits(self)
        """Dials through relays."""
        self.dialler.dial_circuit = self.circuits.dial_one if options.use_relay else None
        self.punching = Puncher(transport, metrics, self.server.accept, lambda: self.outlook.reach)
        """Finds direct ways where others lead through relays."""
        self.circuits.punching = self.punching
        self.outlook.on_upheaval.update({self.punching.policy.clear: None, self.circuits.reversals.forget: None})
        self.upgrades = ConnectionUpgrades(self)
        self.answering = IncomingCircuits(self, limits.answered)
        """Answers those who dial this peer through relays."""
        self.reservations = RelayClient(self, self.answering.answer)
        """The relays through which others reach this peer, while that is wanted."""
        self.reservations.trusted = [*options.trusted_relays]
        self._round_trips: Notes[float] = Notes()
        self._unreachable = UnreachablePeers()
        self.clock = get_clock()  # the DHT time of this peer
        self.clock.add_own(self.peer_id)
        self._comparison: asyncio.Task[None] | None = None
        self._compared_at = -math.inf
        loop = asyncio.get_running_loop()
        self.clock.on_jump[self.peer_id] = lambda: loop.is_closed() or loop.call_soon_threadsafe(self._note_jump)

    @classmethod
    async def create(
        cls,
        initial_peers: Sequence[Multiaddr | str] | str | None = None,
        *,
        announce_maddrs: Sequence[Multiaddr | str] | None = None,
        host_maddrs: Sequence[Multiaddr | str] | None = None,
        identity_path: str | os.PathLike[str] | None = None,
        idle_timeout: float = 30,
        startup_timeout: float = 15,
        check_if_identity_free: bool = True,
        no_listen: bool = False,
        client_mode: bool = False,
        transport: Transport | None = None,
        rng: random.Random | None = None,
        limits: Limits = DEFAULT_LIMITS,
        relay: bool | None = None,
        relay_limits: RelayLimits = DEFAULT_RELAY_LIMITS,
        token: str | os.PathLike[str] | None = None,
        name: str = "",
        **of_a_daemon: Any,
    ) -> P2P:
        """Start a peer.

        Args:
            initial_peers: addresses that end with ``/p2p/<peer id>``, or ``HOST:PORT``, where any peer may answer; at
                least one of them must answer.
            announce_maddrs: addresses to announce instead of those where this peer listens, such as the public side of
                a forwarded port.
            host_maddrs: where to listen, such as ``["/ip4/127.0.0.1/tcp/0"]`` for this machine alone; default,
                also if empty: the environment variable ``SHOAL_HOST_MADDRS``, or else all networks of this
                machine, on a free port.
            identity_path: file with this peer's key; made if missing. Without it every start is a new peer.
            check_if_identity_free: with ``identity_path``, ask the initial peers whether another process has it.
            idle_timeout: seconds after which an unused connection is closed.
            startup_timeout: seconds for reaching the first initial peer.
            no_listen: accept no connections. Others call this peer through relays, unless ``use_auto_relay=False``.
            client_mode: only call others, never be called.
            transport: a way to reach peers other than TLS over TCP; it brings the identity.
            rng: source of every random choice, for reproducible simulations.
            limits: what this peer grants to others.
            relay: always (``True``) or never be a relay for peers that cannot be called; default: while others can
                call this peer from outside.
            relay_limits: what it grants as a relay.
            token: of a private run, see :mod:`shoal.access.tokens`: its text, or the path of a file with it; default:
                the environment variable ``SHOAL_TOKEN``. Only peers with tokens of one run connect to each other.
                Without
                a token, or with an empty one, the run is open to all.
            name: tells people in the logs of other peers which peer this is. Peers that connect learn it, in a private
                run only if they are members.
            of_a_daemon: how others shall be able to call this peer, see
                :class:`~shoal.reach.libp2p_options.Libp2pOptions`. Parameters of a libp2p daemon are accepted, so that
                existing calls work; a warning names those without effect.

        Raises:
            BootstrapError: no initial peer could be reached; it says why for each address.
            IdentityTakenError: another process is online with the identity of the file.
            P2PDaemonError: cannot listen, or the identity file or the token is unusable.
            ValueError, TypeError: an address is malformed, or there is no such parameter.
        """
        options, name = Libp2pOptions.chosen(of_a_daemon), checked_name(name)
        assert not (initial_peers and of_a_daemon.get("use_ipfs")), "initial_peers and use_ipfs exclude each other"
        given = () if initial_peers is None else initial_peers
        targets = parse_peer_addresses(given)
        if wants_local(given):
            raise ValueError("initial_peers has 'local', which a DHT or a DHTNode understands, and a P2P does not")
        announced = list(map(checked_announcement, read_addresses(announce_maddrs or (), "announce_maddrs")))
        metrics = Metrics()
        if transport is None:
            have_enough_files()
            limits, relay_limits = limits.that_fit(), relay_limits.that_fit()
            transport = TcpTransport(await _identity(identity_path), metrics, limits)
        client_mode = client_mode or (no_listen and not options.use_auto_relay)
        if no_listen:
            options = replace(options, force_reachability="private")
        relay = False if options.relay_hop_limit == 0 or no_listen else relay
        rng = rng or random.Random()
        p2p = cls(transport, rng, metrics, idle_timeout, limits, relay, relay_limits, options, name)
        p2p.client_mode = client_mode
        try:
            p2p.membership = await Membership.chosen(token, p2p.identity, p2p.clock, metrics)
            p2p.members = await RevocationExchange.of(p2p)
            await Presence(p2p).add_p2p_handlers(p2p)
            await Checkup(p2p).add_p2p_handlers(p2p)
            await p2p.relay.add_p2p_handlers(p2p)
            if no_listen and not client_mode:
                p2p.outlook.begin()
            elif not client_mode:
                hosts = host_maddrs or transport.listens_by_default()
                places = read_addresses(hosts, "host_maddrs")
                p2p.port_stays = bool(announced) or all(place.get("tcp") != "0" for place in places)
                await p2p.outlook.listen(places, announced)
            if targets:
                await p2p._join(targets, startup_timeout)
            if identity_path is not None and check_if_identity_free:
                known = [(address, peer) for address, named in targets if (peer := named or p2p.met.get(address))]
                await check_identity_is_free(p2p, list(dict.fromkeys(peer for _, peer in known)), known)
        except BaseException:
            await p2p.shutdown()
            raise
        return p2p

    @staticmethod
    def generate_identity(identity_path: str | os.PathLike[str]) -> None:
        """Make a new identity and save it in a file, for ``identity_path`` of :meth:`create`.

        Raises:
            FileExistsError: the file exists already; delete it to get another identity.
            FileNotFoundError: the directory does not exist.
        """
        Identity.create(identity_path)

    @classmethod
    async def is_identity_taken(
        cls,
        identity_path: str | os.PathLike[str],
        *,
        initial_peers: Sequence[Multiaddr | str] | str | None,
        **of_a_daemon: Any,
    ) -> bool:
        """Whether another process is online with an identity, as far as some peers know.

        Args:
            identity_path: file with the identity.
            initial_peers: peers to ask, as for :meth:`create`; if there are none, the answer is no.
            of_a_daemon: as in :meth:`create`.

        Raises:
            FileNotFoundError: there is no such file.
            BootstrapError: none of these peers could be reached.
        """
        if not await asyncio.to_thread(os.path.exists, identity_path):
            raise FileNotFoundError(f"there is no identity in {identity_path}: make one with P2P.generate_identity")
        try:
            p2p = await cls.create(initial_peers, identity_path=identity_path, client_mode=True, **of_a_daemon)
        except IdentityTakenError:
            return True
        await p2p.shutdown()
        return False

    async def _join(self, targets: list[Target], limit: float) -> None:
        """Return as soon as one of the peers is connected; the others are reached when they are needed."""
        own = self.transport.addresses()
        others = [each for each in targets if each[1] != self.peer_id and (each[1] is not None or each[0] not in own)]
        for address, peer in others:
            if peer is not None:
                self.add_addresses(peer, [address])
        try:
            if others:
                await reach_first(others, self._reach, limit, functools.partial(advise_on_private, self))
        except BootstrapError:
            if all(self.met.get(address) == self.peer_id for address, _ in others):
                return  # like one whose own full address is the only one: it begins a swarm
            raise

    async def _reach(self, address: Multiaddr, peer: PeerID | None) -> None:
        await (self.meet(address) if peer is None else self.connect(peer, address))

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
            raise DialError(f"{address}: this peer itself answers there")
        self.add_addresses(peer, [address])
        self.address_book.prefer(peer, address)
        self.pool.add(self.greet(stream))
        if peer != known:
            full = address.encapsulate(f"/p2p/{peer}")
            shown = short_form(address) or address
            logger.info("peer %s answers at %s, its identity was not checked; to pin it: %s", peer, shown, full)
        return peer

    async def connect(self, peer: PeerID, address: Multiaddr) -> None:
        """Connect to a peer at a certain address; the next call uses this connection.

        Raises:
            DialError: the peer cannot be reached there.
        """
        self.pool.add(self.greet(await self.dialler.dial_address(peer, address)))

    # --- addresses ----------------------------------------------------------------------------------------------------

    @property
    def reachability(self) -> Reachability:
        """What this peer is to others."""
        return self.outlook.state

    @property
    def is_callable(self) -> bool:
        """Whether others can call this peer, directly or through a relay."""
        return self.outlook.state in (Reachability.PUBLIC, Reachability.RELAYED)

    def _supports(self, address: Multiaddr) -> bool:
        return self.transport.supports(address) or self.dialler.supports_circuit(address)

    def add_addresses(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """Remember where a peer can be dialled, as told by a third party."""
        self.address_book.add(peer, addresses)

    def is_reachable(self, peer: PeerID) -> bool:
        """Whether an address of the peer is known."""
        return bool(self.outlook.announced()) if peer == self.peer_id else peer in self.address_book

    def get_addresses(self, peer: PeerID) -> list[Multiaddr]:
        """Where a peer can be dialled, as far as known, without ``/p2p``."""
        return self.outlook.announced() if peer == self.peer_id else self.address_book.get(peer)

    def seen_of(self, peer: PeerID) -> Multiaddr | None:
        """Where a peer is seen that has connected to this one; through a relay only if it has no other connection."""
        direct = self.server.addresses_of(peer)
        streams = [connection.stream for connection in self.connections_from(peer)]
        return direct[0] if direct else next((stream.remote_address for stream in reversed(streams)), None)

    def judge_for(self, seen_at: Multiaddr | None) -> Judge:
        """Says whether to dial an address at the word of somebody who is seen at another one."""
        return functools.partial(self._may_be_dialled_for, seen_at)

    def _may_be_dialled_for(self, seen_at: Multiaddr | None, address: Multiaddr) -> bool:
        through = None if seen_at is None else relay_of(seen_at)
        relay = relay_of(address)
        if relay is not None and (relay == through or self._dials_relay_at(*relay)):
            return True
        if through is not None:
            seen_at = None  # who comes through a relay may be anywhere
        transport, outer = self.transport, self.outlook.outer_hosts()
        return may_be_dialled_for(
            address if relay is None else relay[0],
            seen_at,
            is_inside=lambda seen: transport.is_inside(seen) or ip_text_of(seen) in outer,
            is_here=transport.is_here,
        )

    def _dials_relay_at(self, place: Multiaddr, relay: PeerID) -> bool:
        """Whether this peer dials a relay at a place without having been told of a circuit there."""
        judge = self.address_book.judge_of(relay, place)
        is_known = place in self.address_book.peek(relay) and (judge is None or judge(place))
        return relay == self.peer_id or is_known

    def host_of(self, peer: PeerID) -> PeerID | str:
        """What a peer has in common with others of its host, see :mod:`shoal.net.addresses`; from any thread."""
        return self.address_book.host_of(peer)

    def host_seen_of(self, peer: PeerID) -> PeerID | str:
        """Like :meth:`host_of`, but by the addresses from which the peer has connected, whatever it announces."""
        return host_of(peer, self.server.addresses_of(peer))

    @property
    def address_changes(self) -> int:
        """How often the addresses of any peer have changed: caches of derived data compare it."""
        return self.address_book.changes

    async def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        """Addresses to give to others, each with ``/p2p/<peer id>``; empty for a peer that nobody can call.

        Args:
            latest: look at this machine's networks again.
        """
        return [address.encapsulate(f"/p2p/{self.peer_id}") for address in self.outlook.announced(latest)]

    async def list_peers(self) -> list[PeerInfo]:
        """Peers with known addresses, and peers connected to this one, whose addresses may be unknown."""
        connected: dict[PeerID, list[Multiaddr]] = {peer: [] for peer in self.server.peers if peer != self.peer_id}
        return [
            PeerInfo(peer, addresses) for peer, addresses in {**connected, **dict(self.address_book.items())}.items()
        ]

    async def wait_for_at_least_n_peers(self, n_peers: int, attempts: int = 3, delay: float = 1) -> None:
        """Wait until a number of peers are known.

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

    def _trains_with(self, peer: PeerID) -> bool:
        return peer in self.pool or self.behaviour.has_delivered(peer)

    def greet(self, stream: Stream) -> Connection:
        """Speak on a stream, its own greeting first."""
        self.outlook.note_stream(stream)
        return Connection(stream, self.metrics, self.hello, self.on_hello, self.header_memory)

    def hello(self) -> Hello:
        """What this peer tells first on each connection."""
        told, clock = [str(address) for address in self.outlook.announced()], self.clock
        serial = 0 if self.membership is None else self.membership.serial
        return Hello(
            told,
            AGENT,
            clock.time(),
            clock.offset,
            revocations=serial,
            reach=self.outlook.reach.value,
            instance=self.instance,
            relay=self.relay.serves,
            name=self.name,
        )

    def on_hello(self, connection: Connection, hello: Hello) -> None:
        """Learn from what another peer tells first."""
        if hello.addresses and connection.remote != self.peer_id:
            judge = self.judge_for(connection.stream.remote_address)
            self.address_book.replace(connection.remote, hello.addresses, judge)
        if hello.agent:  # otherwise it tells nothing of itself
            if hello.name:
                note_name(str(connection.remote), hello.name)
            self.reaches.note(connection.remote, hello.reach)
            self.reservations.note_greeting(connection.remote, hello.relay)
        self.clock.meet()
        if connection.round_trip is not None:
            shortest = min(connection.round_trip, self._round_trips.get(connection.remote, math.inf))
            self._round_trips.note(connection.remote, shortest)
            is_mate = self.behaviour.has_delivered(connection.remote)
            later = self.clock.hear(
                connection.remote, hello.time, hello.clock_offset, connection.round_trip, is_mate=is_mate
            )
            self.behaviour.note_time(connection.remote, later)
            self.metrics.clock_offset = self.clock.offset
        if self.members is not None:
            self.members.note_hello(connection, hello.revocations)

    def _note_jump(self) -> None:
        """The clock of the machine has jumped."""
        self.metrics.clock_offset = self.clock.offset
        self._compared_at = -math.inf
        self.compare_clocks()

    def compare_clocks(self) -> None:
        """Ask others for the time, in the background: there is a sign that this peer has it wrong."""
        now = asyncio.get_running_loop().time()
        is_running = self._comparison is not None and not self._comparison.done()
        if self.is_alive and not is_running and now - self._compared_at >= COMPARE_AGAIN_SECONDS:
            self._compared_at = now
            self._comparison = asyncio.get_running_loop().create_task(compare_clocks(self))

    def round_trip_to(self, peer: PeerID) -> float:
        """The shortest measured round trip to a peer, in seconds; 0 if there is none."""
        return self._round_trips.get(peer, 0.0)

    async def prepare(self, peer: PeerID, connections: int) -> None:
        """Have connections to a peer ready for calls that will be made soon.

        Raises:
            DialError: the peer cannot be reached.
        """
        await self.circuits.prepare(peer, connections)
        await self.pool.prepare(peer, connections)

    async def dial(self, peer: PeerID) -> Connection:
        """A new connection, which the caller has to close; raises what :meth:`Dialler.dial` raises."""
        if not self.is_alive:
            raise P2PDaemonError("this peer is shut down")
        if peer == self.peer_id:
            raise P2PDaemonError("a peer cannot call itself over the network")
        if self.find_addresses is not None and not self.is_reachable(peer):
            await self.find_addresses(peer)
        try:
            stream = await self.dialler.dial(peer)
        except NoReservationError:
            # It may have other relays by now. Where it is no more, the dialler has forgotten.
            if self.find_addresses is None or self.is_reachable(peer):
                raise
            await self.find_addresses(peer)
            if not self.is_reachable(peer):
                raise
            stream = await self.dialler.dial(peer)
        self._unreachable.note_connection(peer)
        return self.greet(stream)

    def note_uncalled(self, peer: PeerID, error: BaseException, *, company: str, sign_of_life: float) -> None:
        """A call to a peer that should be online has failed. If that goes on, the user is told once.

        Args:
            error: how it failed.
            company: what both peers take part in, such as the name of a run.
            sign_of_life: of that peer, such as the time of a record that it has published; it must grow with each sign.
        """
        addresses = self.address_book.get(peer)
        self._unreachable.note_failure(peer, error, addresses, company=company, sign_of_life=sign_of_life)

    async def dial_without_greeting(
        self, peer: PeerID, address: Multiaddr | None = None, judge: Judge | None = None
    ) -> Connection:
        """A connection on which this peer does not announce its addresses; the caller has to close it.

        Args:
            address: where; default: at all addresses that are known.
            judge: whether the IP addresses of that one may be connected to.

        Raises:
            DialError: the peer cannot be reached, or not at this address.
        """
        dial = self.dialler.dial(peer) if address is None else self.dialler.dial_address(peer, address, judge)
        stream = await dial
        return Connection(
            stream, self.metrics, lambda: Hello(instance=self.instance), self.on_hello, self.header_memory
        )

    def connections_from(self, peer: PeerID) -> list[Connection]:
        """Connections that a peer has opened to this one."""
        return self.server.connections_of(peer)

    def address_seen_of(self, peer: PeerID) -> str:
        """The address from which a peer has connected to this one, or empty if the transport does not know it."""
        return next(map(str, self.server.addresses_of(peer)), "")

    # --- serving ------------------------------------------------------------------------------------------------------

    def close_to_strangers(self, gate: Gate) -> None:
        """From now on, only members may call what the gate guards here, and this peer calls it at members only."""
        self.server.gate = gate

    def add_handlers(self, handlers: Mapping[str, Handler]) -> None:
        """Serve handlers by name.

        Raises:
            P2PDaemonError: one of the names is taken.
        """
        self.server.add_handlers(handlers)

    def remove_handlers(self, names: Iterable[str]) -> None:
        """Stop serving these handlers; calls in progress go on."""
        self.server.remove_handlers(names)

    async def shutdown(self) -> None:
        """Leave the network: stop listening, cut connections, cancel handlers. Idempotent."""
        self.is_alive = False
        self.clock.remove_own(self.peer_id)
        if self._comparison is not None:
            await cancel_and_wait(self._comparison)
        await self.outlook.close()
        if self.members is not None:
            await self.members.close()
        await self.reservations.close()
        await self.answering.close()
        await self.upgrades.close()
        await self.relay.close()
        await self.transport.close()
        self.pool.close()
        await cancel_and_wait(*self.late_answers)
        await self.dialler.close()
        await self.punching.close()
        await self.server.close()


async def _identity(path: str | os.PathLike[str] | None) -> Identity:
    return Identity.generate() if path is None else await asyncio.to_thread(Identity.load_or_create, path)
