"""One peer on the network: its identity, where it listens, whom it can call and what it serves."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from shoal.clock import get_clock
from shoal.errors import IdentityTakenError, P2PDaemonError, ProtocolError
from shoal.metrics import Metrics
from shoal.p2p.addresses import AddressBook, UnreachablePeers, host_of
from shoal.p2p.connection import Call, Connection, Hello
from shoal.p2p.connection_pool import ConnectionPool, Dialler
from shoal.p2p.identity import Identity, PeerID, PeerInfo
from shoal.p2p.joining import Checkup, Presence, Target, check_identity_is_free, greet_anew, reach_first
from shoal.p2p.joining import parse_peer_addresses as parse_peer_addresses
from shoal.p2p.limits import DEFAULT_LIMITS, HeaderMemory, Limits, have_enough_files
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.server import Server
from shoal.p2p.service import Gate, Handler
from shoal.p2p.tcp import TcpTransport
from shoal.p2p.transport import Header, Stream, Transport
from shoal.tasks import cancel_and_wait

logger = logging.getLogger(__name__)
H = TypeVar("H", bound=Header)

AGENT = "shoal"
# Measured times of that many peers are remembered.
MAX_ROUND_TRIPS = 4096
INSTANCE_BYTES = 16
# Parameters without effect here, and what everybody may ask for.
_OF_A_DAEMON: dict[str, Any] = {
    "auto_nat": True,
    "conn_manager": True,
    "dht_mode": "server",
    "force_reachability": None,
    "nat_port_map": True,
    "relay_hop_limit": 0,
    "tls": True,
    "use_auto_relay": False,
    "use_ipfs": False,
    "use_relay": True,
    "persistent_conn_max_msg_size": 4 * 2**20,
    "quic": None,
    "use_relay_hop": None,
    "use_relay_discovery": None,
    "trusted_relays": None,
}


class P2P:
    """A peer. Made by :meth:`create`; lives in one event loop."""

    def __init__(
        self, transport: Transport, rng: random.Random, metrics: Metrics, idle_timeout: float, limits: Limits
    ) -> None:
        self.identity = transport.identity
        self.peer_id = transport.identity.peer_id
        self.transport = transport
        self.rng = rng
        self.metrics = metrics
        self.client_mode = False
        self.is_alive = True
        self.instance = rng.randbytes(INSTANCE_BYTES)
        """Tells this process from another one with the same identity."""
        self.find_addresses: Callable[[PeerID], Awaitable[None]] | None = None
        """Looks for a peer of which no address is known before it is dialled; set by the node of the table."""
        self._announcement: list[Multiaddr] = []
        self._addresses = AddressBook()
        self._header_memory = HeaderMemory(limits)
        self._dialler = Dialler(transport, self._addresses)
        self._pool = ConnectionPool(self._connect, idle_timeout)
        transport.on_addresses_changed = self._announce_anew
        self._announcing: asyncio.Task[None] | None = None
        self._server = Server(self.peer_id, metrics, limits, self._greet, self._pool.__contains__)
        self._handlers = self._server.handlers
        self._round_trips: dict[PeerID, float] = {}
        self._unreachable = UnreachablePeers()
        self.clock = get_clock()
        """The time by which this peer lives."""
        self.clock.add_own(self.peer_id)

    @classmethod
    async def create(
        cls,
        initial_peers: Sequence[Multiaddr | str] | None = None,
        *,
        announce_maddrs: Sequence[Multiaddr | str] | None = None,
        host_maddrs: Sequence[Multiaddr | str] | None = None,
        identity_path: str | os.PathLike[str] | None = None,
        idle_timeout: float = 30,
        startup_timeout: float = 15,
        check_if_identity_free: bool = True,
        no_listen: bool = False,
        transport: Transport | None = None,
        rng: random.Random | None = None,
        limits: Limits = DEFAULT_LIMITS,
        **of_a_daemon: Any,
    ) -> P2P:
        """Start a peer.

        Args:
            initial_peers: addresses that end with ``/p2p/<peer id>``; at least one of them must answer.
            announce_maddrs: what others are told instead of the addresses where this peer listens, such as the public
                side of a forwarded port.
            host_maddrs: where to listen, such as ``["/ip4/127.0.0.1/tcp/0"]`` for this machine alone; default: what the
                environment variable ``SHOAL_HOST_MADDRS`` says, or all networks of this machine, on a free port.
            identity_path: file that keeps this peer's key; made if missing. Without it every start is a new peer.
            check_if_identity_free: with ``identity_path``, ask the initial peers whether somebody has it already.
            idle_timeout: seconds after which an unused connection is closed.
            startup_timeout: seconds for reaching the first initial peer.
            no_listen: only call others, never be called.
            transport: another way to reach peers than TLS over TCP; it brings the identity.
            rng: source of every random choice, for reproducible simulations.
            limits: what this peer grants to others.
            of_a_daemon: parameters of transports that need a libp2p daemon, such as ``use_relay``. They are accepted so
                that existing calls work, and a warning says when one of them asks for something that does not happen.

        Raises:
            BootstrapError: no initial peer could be reached; it says why for each address.
            IdentityTakenError: another process is online with the identity of the file.
            P2PDaemonError: cannot listen, or the identity file is unusable.
            ValueError, TypeError: an address is malformed, or there is no such parameter.
        """
        _warn_without_effect(of_a_daemon)
        assert not (initial_peers and of_a_daemon.get("use_ipfs")), "initial_peers and use_ipfs exclude each other"
        targets = parse_peer_addresses(initial_peers or ())
        announced = [_checked_announcement(Multiaddr(address)) for address in announce_maddrs or ()]
        metrics = Metrics()
        if transport is None:
            have_enough_files()
            limits = limits.that_fit()
            transport = TcpTransport(await _identity(identity_path), metrics, limits)
        p2p = cls(transport, rng or random.Random(), metrics, idle_timeout, limits)
        p2p.client_mode = no_listen
        try:
            await Presence(p2p).add_p2p_handlers(p2p)
            await Checkup(p2p).add_p2p_handlers(p2p)
            if not no_listen:
                hosts = transport.listens_by_default() if host_maddrs is None else host_maddrs
                await p2p._listen([Multiaddr(address) for address in hosts], announced)
            if targets:
                await p2p._join(targets, startup_timeout)
            if identity_path is not None and check_if_identity_free:
                await check_identity_is_free(p2p, list(dict.fromkeys(peer for _, peer in targets)), targets)
        except BaseException:
            await p2p.shutdown()
            raise
        return p2p

    @staticmethod
    def generate_identity(identity_path: str | os.PathLike[str]) -> None:
        """Make a new identity and keep it in a file, for ``identity_path`` of :meth:`create`.

        Raises:
            FileExistsError: there is such a file already; whoever wants another identity has to delete it.
            FileNotFoundError: the directory does not exist.
        """
        Identity.create(identity_path)

    @classmethod
    async def is_identity_taken(
        cls,
        identity_path: str | os.PathLike[str],
        *,
        initial_peers: Sequence[Multiaddr | str] | None,
        **of_a_daemon: Any,
    ) -> bool:
        """Whether another process is online with an identity, as far as some peers know.

        Args:
            identity_path: file that keeps the identity.
            initial_peers: whom to ask, as for :meth:`create`; without anybody to ask, the answer is no.
            of_a_daemon: without effect, as in :meth:`create`.

        Raises:
            FileNotFoundError: there is no such file.
            BootstrapError: none of these peers could be reached.
        """
        if not await asyncio.to_thread(os.path.exists, identity_path):
            raise FileNotFoundError(f"there is no identity in {identity_path}: make one with P2P.generate_identity")
        try:
            p2p = await cls.create(initial_peers, identity_path=identity_path, no_listen=True, **of_a_daemon)
        except IdentityTakenError:
            return True
        await p2p.shutdown()
        return False

    async def _listen(self, hosts: Sequence[Multiaddr], announced: list[Multiaddr]) -> None:
        usable = [address for address in hosts if self.transport.supports(address)]
        for address in hosts:
            if address not in usable:
                logger.info("there is no transport for %s yet, other addresses are used to listen", address)
        if not usable:
            raise P2PDaemonError(
                f"no usable address to listen on in {[str(a) for a in hosts]}: give /ip4/0.0.0.0/tcp/0"
            )
        for address in usable:
            await self.transport.listen(address, self._server.accept)
        self._announcement = announced

    async def _join(self, targets: list[Target], limit: float) -> None:
        """Return as soon as one of the peers is connected; the others are reached when they are needed."""
        others = [(address, peer) for address, peer in targets if peer != self.peer_id]
        for address, peer in others:
            self.add_addresses(peer, [address])
        if others:
            await reach_first(others, self.connect, limit)

    async def connect(self, peer: PeerID, address: Multiaddr) -> None:
        """Connect to a peer at a certain address; the next call uses this connection.

        Raises:
            DialError: that is not possible.
        """
        self._pool.add(self._greet(await self._dialler.dial_address(peer, address)))

    # --- addresses ----------------------------------------------------------------------------------------------------

    def _announce_anew(self) -> None:
        if not self.is_alive:
            return
        if self._announcing is not None:
            self._announcing.cancel()
        peers = self._pool.renew()
        self._announcing = asyncio.get_running_loop().create_task(greet_anew(self, peers))

    @property
    def _announced(self) -> list[Multiaddr]:
        """What others are told; it changes as this machine moves from one network to another."""
        return self._announcement or self.transport.addresses()

    def add_addresses(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """Remember where a peer can be dialled, as told by a third party."""
        self._addresses.add(peer, addresses)

    def is_reachable(self, peer: PeerID) -> bool:
        """Whether an address of the peer is known."""
        return bool(self._announced) if peer == self.peer_id else peer in self._addresses

    def get_addresses(self, peer: PeerID) -> list[Multiaddr]:
        """Where a peer can be dialled, as far as known, without ``/p2p``."""
        return list(self._announced) if peer == self.peer_id else self._addresses.get(peer)

    def host_of(self, peer: PeerID) -> PeerID | str:
        """In any thread: what a peer has in common with others of its host, see :mod:`shoal.p2p.addresses`."""
        return host_of(peer, self._addresses.peek(peer))

    @property
    def address_changes(self) -> int:
        """How often the addresses of any peer have changed: who keeps what follows from them looks here."""
        return self._addresses.changes

    async def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        """Addresses to give to others, each with ``/p2p/<peer id>``; none for a peer that does not listen.

        Args:
            latest: look at this machine's networks again.
        """
        addresses = self._announcement or self.transport.addresses(latest)
        return [address.encapsulate(f"/p2p/{self.peer_id}") for address in addresses]

    async def list_peers(self) -> list[PeerInfo]:
        """Peers whose addresses are known, and those that are connected to this one, perhaps without an address."""
        connected: dict[PeerID, list[Multiaddr]] = {peer: [] for peer in self._server.peers if peer != self.peer_id}
        return [PeerInfo(peer, addresses) for peer, addresses in {**connected, **dict(self._addresses.items())}.items()]

    async def wait_for_at_least_n_peers(self, n_peers: int, attempts: int = 3, delay: float = 1) -> None:
        """Wait until so many peers are known.

        Args:
            n_peers: how many.
            attempts: how often to look.
            delay: seconds between two looks.

        Raises:
            P2PDaemonError: there are fewer in the end.
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

    def _greet(self, stream: Stream) -> Connection:
        return Connection(stream, self.metrics, self._hello, self._on_hello, self._header_memory)

    def _hello(self) -> Hello:
        addresses = [str(address) for address in self._announced]
        return Hello(
            addresses=addresses,
            agent=AGENT,
            time=self.clock.time(),
            clock_offset=self.clock.offset,
            instance=self.instance,
        )

    def _on_hello(self, connection: Connection, hello: Hello) -> None:
        if hello.addresses and connection.remote != self.peer_id:
            self._addresses.replace(connection.remote, hello.addresses)
        if connection.round_trip is not None:
            self._note_round_trip(connection.remote, connection.round_trip)
            self.clock.hear(connection.remote, hello.time, hello.clock_offset, connection.round_trip)
            self.metrics.clock_offset = self.clock.offset

    def _note_round_trip(self, peer: PeerID, seconds: float) -> None:
        self._round_trips[peer] = min(seconds, self._round_trips.pop(peer, math.inf))
        while len(self._round_trips) > MAX_ROUND_TRIPS:
            del self._round_trips[next(iter(self._round_trips))]

    def round_trip_to(self, peer: PeerID) -> float:
        """Seconds to a peer and back, the shortest time that was seen; 0 if none was."""
        return self._round_trips.get(peer, 0.0)

    async def prepare(self, peer: PeerID, connections: int) -> None:
        """Have connections to a peer ready for calls that are going to be made.

        Raises:
            DialError: it cannot be reached.
        """
        await self._pool.prepare(peer, connections)

    async def _connect(self, peer: PeerID) -> Connection:
        if not self.is_alive:
            raise P2PDaemonError("this peer is shut down")
        if peer == self.peer_id:
            raise P2PDaemonError("a peer cannot call itself over the network")
        if self.find_addresses is not None and not self.is_reachable(peer):
            await self.find_addresses(peer)
        stream = await self._dialler.dial(peer)
        self._unreachable.note_connection(peer)
        return self._greet(stream)

    def note_uncalled(self, peer: PeerID, error: BaseException, *, company: str, sign_of_life: float) -> None:
        """A call to a peer that should be there has failed. If that goes on, the user is told, once.

        Args:
            error: how it failed.
            company: what both take part in, such as the name of a run.
            sign_of_life: of that peer, such as the time of a record that it has published; it must grow with each.
        """
        addresses = self._addresses.get(peer)
        self._unreachable.note_failure(peer, error, addresses, company=company, sign_of_life=sign_of_life)

    async def dial_without_greeting(self, peer: PeerID, address: Multiaddr | None = None) -> Connection:
        """A connection on which this peer does not tell its addresses; the caller has to close it.

        Raises:
            DialError: the peer cannot be reached, or not at this address.
        """
        dial = self._dialler.dial(peer) if address is None else self._dialler.dial_address(peer, address)
        stream = await dial
        return Connection(
            stream, self.metrics, lambda: Hello(instance=self.instance), self._on_hello, self._header_memory
        )

    def connections_from(self, peer: PeerID) -> list[Connection]:
        """Connections that a peer has opened to this one."""
        return self._server.connections_of(peer)

    def address_seen_of(self, peer: PeerID) -> str:
        """Where a peer that has connected to this one comes from, as far as the transport knows."""
        seen = (connection.stream.remote_address for connection in self.connections_from(peer))
        return next((str(address) for address in seen if address is not None), "")

    # --- calling ------------------------------------------------------------------------------------------------------

    async def call(
        self, peer: PeerID, handle: str, request: Header, response_type: type[H], timeout: float | None = None
    ) -> H:
        """Call a unary handler at another peer.

        Args:
            timeout: seconds for everything, dialling included; ``None`` = as long as the connection lives.

        Raises:
            P2PHandlerError: the handler raised.
            P2PDaemonError: the peer cannot be reached, the connection broke, or it has no such handler.
            TimeoutError: no answer in time.
        """
        async with asyncio.timeout(timeout):
            call = await self._begin_call(peer, handle)
            try:
                return await call.ask(request, response_type)
            except BaseException as e:
                self._note_failure(call, e)
                raise
            finally:
                self._pool.release(call.connection, reusable=call.clean)

    @asynccontextmanager
    async def open_call(self, peer: PeerID, handle: str) -> AsyncIterator[Call]:
        """Call a handler that takes and sends any number of messages.

        Leaving the block before both sides have ended cuts the connection, which cancels the handler.
        """
        call = await self._begin_call(peer, handle)
        try:
            yield call
        except BaseException as e:
            self._note_failure(call, e)
            raise
        finally:
            self._pool.release(call.connection, reusable=call.clean)

    async def _begin_call(self, peer: PeerID, handle: str) -> Call:
        connection = await self._pool.acquire(peer)
        gate = self._server.gate
        if gate is not None and self._server.needs_proof(connection, handle):
            try:
                await gate.enter(connection)
            except BaseException:
                self._pool.release(connection, reusable=False)
                raise
        self.metrics.calls_made += 1
        return connection.open_call(handle)

    def _note_failure(self, call: Call, error: BaseException) -> None:
        self.metrics.calls_failed += 1
        if isinstance(error, ProtocolError):
            self.metrics.connections_dropped["broke the protocol"] += 1
            call.connection.abort()

    # --- serving ------------------------------------------------------------------------------------------------------

    def close_to_strangers(self, gate: Gate) -> None:
        """From now on, those who are no members cannot call this peer, and this peer does not call them."""
        self._server.gate = gate

    def add_handlers(self, handlers: Mapping[str, Handler]) -> None:
        """Serve handlers by name.

        Raises:
            P2PDaemonError: one of the names is taken.
        """
        self._server.add_handlers(handlers)

    def remove_handlers(self, names: Iterable[str]) -> None:
        """Stop serving these handlers; calls in progress go on."""
        self._server.remove_handlers(names)

    @property
    def _serving(self) -> list[asyncio.Task[None]]:
        return self._server.tasks()

    async def shutdown(self) -> None:
        """Leave the network: stop listening, cut connections, cancel handlers. Idempotent."""
        self.is_alive = False
        self.clock.remove_own(self.peer_id)
        if self._announcing is not None:
            await cancel_and_wait(self._announcing)
        await self.transport.close()
        self._pool.close()
        await self._dialler.close()
        await self._server.close()


async def _identity(path: str | os.PathLike[str] | None) -> Identity:
    return Identity.generate() if path is None else await asyncio.to_thread(Identity.load_or_create, path)


def _checked_announcement(address: Multiaddr) -> Multiaddr:
    if "0" in (address.get("tcp"), address.get("udp")):
        raise ValueError(f"cannot announce {address}: others need a real port, not 0; fix the port in host_maddrs too")
    unknown = next((protocol for protocol in address.protocols() if protocol.code is None), None)
    if unknown is not None:
        raise ValueError(f"cannot announce {address}: no peer knows the protocol {unknown!r}; announce /ip4/…/tcp/…")
    return address


def _warn_without_effect(arguments: Mapping[str, Any]) -> None:
    unknown = arguments.keys() - _OF_A_DAEMON.keys()
    if unknown:
        raise TypeError(f"P2P has no parameter {', '.join(sorted(unknown))}")
    asked = [name for name, value in arguments.items() if value != _OF_A_DAEMON[name]]
    if asked:
        logger.warning("%s: no effect here, there is no libp2p daemon underneath", ", ".join(asked))
