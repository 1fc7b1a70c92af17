"""One peer on the network: its identity, where it listens, which peers it can call, and what it serves."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.access.membership import Membership
from shoal.base.tasks import cancel_and_wait
from shoal.errors import BootstrapError, IdentityTakenError
from shoal.metrics import Metrics
from shoal.net.connection import Connection, Hello
from shoal.net.endpoint import Announcement, Endpoint
from shoal.net.limits import DEFAULT_LIMITS, DEFAULT_RELAY_LIMITS, Limits, RelayLimits, have_enough_files
from shoal.net.own_addresses import checked_announcement
from shoal.net.pasted import Target, read_addresses, wants_local
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import Stream, Transport
from shoal.p2p.joining import advise_on_private, reach_first
from shoal.p2p.joining import parse_peer_addresses as parse_peer_addresses
from shoal.p2p.revocation import RevocationExchange
from shoal.peers.identity import Identity, PeerID, checked_name
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.checkup import Checkup
from shoal.reach.connection_upgrade import ConnectionUpgrades
from shoal.reach.manager import Libp2pOptions, ReachabilityManager
from shoal.reach.presence import Presence, check_identity_is_free, compare_clocks
from shoal.reach.punching import Puncher
from shoal.reach.reachability import Reachability
from shoal.reach.relay.circuits import IncomingCircuits, OutgoingCircuits
from shoal.reach.relay.client import RelayClient
from shoal.reach.relay.server import RelayServer

logger = logging.getLogger(__name__)


class P2P(Endpoint):
    """A peer. Made by :meth:`create`; lives in one event loop.

    Connections, ways through routers and membership are put together only here.
    """

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
        super().__init__(transport, rng, metrics, idle_timeout, limits, dials_relays=options.use_relay, name=name)
        self.port_stays = False
        """Whether it listens at a port that the user has chosen."""
        self.members: RevocationExchange | None = None
        """Keeps and spreads the list of expelled peers."""
        self.relay = RelayServer(self, relay, relay_limits)
        """Carries connections of others, if this peer is a relay."""
        self.punching = Puncher(transport, metrics, self.server.accept, lambda: self.outlook.reach)
        """Finds direct ways to peers that are reached through relays."""
        self.circuits = OutgoingCircuits(self, self.relay, self.punching, lambda: self.outlook.public_addresses())
        """Dials through relays."""
        self.upgrades = ConnectionUpgrades(self, self.circuits)
        self.answering = IncomingCircuits(self, self.circuits, limits.answered)
        """Answers peers that dial this one through relays."""
        self.reservations = RelayClient(
            self, self.answering.answer, [*options.trusted_relays], lambda: self.outlook.update()
        )
        """Holds the relays through which others reach this peer, while it needs them."""
        self.outlook = ReachabilityManager(self, options, self.relay, self.reservations, self.circuits)
        """Finds out whether others can call this peer."""
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
            relay: always (``True``) or never (``False``) be a relay for peers that cannot be called; default: while
                others can call this peer from outside.
            relay_limits: what it grants as a relay.
            token: of a private run, see :mod:`shoal.access.tokens`: its text, or the path of a file with it; default:
                the environment variable ``SHOAL_TOKEN``. Only peers with tokens of one run connect to each other.
                Without a token, or with an empty one, the run is open to all.
            name: shown for this peer in the logs of other peers. Peers that connect learn it; in a private run, only
                members do.
            of_a_daemon: how others can call this peer, see :class:`~shoal.reach.manager.Libp2pOptions`. Parameters of
                a libp2p daemon are accepted, so that existing calls work; a warning names those without effect.

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
            if p2p.membership is not None:
                transport.membership = p2p.server.membership = p2p.membership
                p2p.members = RevocationExchange(p2p, p2p.membership, p2p.relay.cut)
                await p2p.members.add_p2p_handlers(p2p)
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
        """Whether another process is online with an identity, as far as the asked peers know.

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
                await reach_first(others, self._reach, limit, self.advise)
        except BootstrapError:
            if all(self.met.get(address) == self.peer_id for address, _ in others):
                return  # as when its own full address is the only one given: it begins a swarm
            raise

    async def _reach(self, address: Multiaddr, peer: PeerID | None) -> None:
        await (self.meet(address) if peer is None else self.connect(peer, address))

    def advise(self, address: Multiaddr) -> str:
        """Advice about an address that cannot be reached; empty if there is none."""
        return advise_on_private(self.transport, self.announced(), address, port_stays=self.port_stays)

    # --- ways through routers -----------------------------------------------------------------------------------------

    @property
    def reachability(self) -> Reachability:
        """Whether, and how, others can call this peer."""
        return self.outlook.state

    @property
    def is_callable(self) -> bool:
        """Whether others can call this peer, directly or through a relay."""
        return self.outlook.state in (Reachability.PUBLIC, Reachability.RELAYED)

    def announce(self, latest: bool = False) -> Announcement:
        return Announcement(self.outlook.announced(latest), self.outlook.reach.value, self.relay.serves)

    def outer_hosts(self) -> set[str]:
        return self.outlook.outer_hosts()

    async def find_way(self, address: Multiaddr, peer: PeerID) -> Stream:
        return await self.circuits.dial_one(address, peer)

    def note_stream(self, stream: Stream) -> None:
        self.outlook.note_stream(stream)

    def note_circuit(self, peer: PeerID) -> None:
        self.upgrades.watch(peer)

    def note_relay(self, peer: PeerID, is_relay: bool) -> None:
        self.reservations.note_greeting(peer, is_relay)

    def note_greeting(self, connection: Connection, hello: Hello) -> None:
        if self.members is not None:
            self.members.note_hello(connection, hello.revocations)

    def replace_arranged(self, peer: PeerID, count: int) -> None:
        """Connections arranged by relays have broken: make new ones at once, for all calls together."""
        self.pool.end_idle(peer)
        self.upgrades.replace(peer, count)

    def note_silence(self, peer: PeerID) -> None:
        """A connection to a peer has fallen silent, so others to it, or to relays, may be broken, too."""
        self.pool.end_idle(peer)
        self.reservations.doubt()

    async def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        """Addresses to give to others, each with ``/p2p/<peer id>``; empty for a peer that nobody can call.

        Args:
            latest: look at this machine's networks again.
        """
        return [address.encapsulate(f"/p2p/{self.peer_id}") for address in self.announced(latest)]

    # --- life ---------------------------------------------------------------------------------------------------------

    def _note_jump(self) -> None:
        """The clock of the machine has jumped."""
        self.metrics.clock_offset = self.clock.offset
        self._compared_at = -math.inf
        self.compare_clocks()

    def compare_clocks(self) -> None:
        """Ask others for the time in the background, because this peer's may be wrong."""
        now = asyncio.get_running_loop().time()
        is_running = self._comparison is not None and not self._comparison.done()
        if self.is_alive and not is_running and now - self._compared_at >= 10.0:
            self._compared_at = now
            self._comparison = asyncio.get_running_loop().create_task(compare_clocks(self))

    async def prepare(self, peer: PeerID, connections: int) -> None:
        """Have connections to a peer ready for calls that will be made soon.

        Raises:
            DialError: the peer cannot be reached.
        """
        await self.circuits.prepare(peer, connections)
        await self.pool.prepare(peer, connections)

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
        await self.tasks.cancel()
        await self.relay.close()
        await self.transport.close()
        self.pool.close()
        await self.dialler.close()
        await self.punching.close()
        await self.server.close()


async def _identity(path: str | os.PathLike[str] | None) -> Identity:
    return Identity.generate() if path is None else await asyncio.to_thread(Identity.load_or_create, path)
