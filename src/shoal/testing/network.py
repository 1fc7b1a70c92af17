"""A simulated network: hosts, the links between them, and everything that can go wrong.

A :class:`Trace` hashes everything that arrives: two runs with the same hash did the same.

All randomness comes from one seeded generator, so the same seed gives the same run::

    async def main() -> None:
        network = Network(Link(delay=(0.01, 0.075), jitter=0.005, dial_failure=0.01))
        nodes = await start_dht_nodes(network, 50)
        network.host_of(nodes[7].peer_id).power_off()
        ...

    shoal.testing.run(main(), seed=1)
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import itertools
import random
import struct
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shoal.errors import DialError, InterruptedDialError, NotAMemberError, SimulationError
from shoal.net.memory import MemoryNetwork, MemorySession, MemoryTransport, PipeEnd
from shoal.net.transport import Session, Stream
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr
from shoal.testing.host import Host, HostTransport, Link, Path, SimulatedStream
from shoal.testing.loop import VirtualTimeLoop
from shoal.testing.nat import Internet, Nat, address_of, endpoint_of
from shoal.testing.punches import Punches

_MOMENT = struct.Struct("<dq")


class Trace:
    """Records everything that reaches a host, with its time and its bytes.

    Args:
        keep_lines: keep one readable line per event, to find where two runs diverge.
    """

    def __init__(self, *, keep_lines: bool = False) -> None:
        self.events = 0
        self.lines: list[str] = []
        self._keep_lines = keep_lines
        self._hash = hashlib.blake2b(digest_size=16)

    def record(self, moment: float, connection: int, event: bytes, data: bytes | memoryview = b"") -> None:
        """Record an event.

        Args:
            moment: its time, in seconds of the loop.
            connection: number of the connection.
            event: what happened, in one word.
            data: the bytes that arrived.
        """
        self.events += 1
        self._hash.update(_MOMENT.pack(moment, connection))
        self._hash.update(event)
        self._hash.update(data)
        if self._keep_lines:
            self.lines.append(f"{moment:.9f} #{connection} {event.decode()} {bytes(data).hex()}")

    def digest(self) -> str:
        """The hash of all events so far, in hexadecimal."""
        return self._hash.hexdigest()


# Round trips for TCP, TLS and the proof of identity, before the dialler may send.
HANDSHAKE_ROUND_TRIPS = 3
# Between hosts behind one router.
LAN = Link(delay=0.0005)
# Seconds after which an attempt to connect to a silent address fails, as over TCP.
DIAL_TIMEOUT = 5.0


class Network(MemoryNetwork):
    """A network of simulated hosts. Make it inside :func:`shoal.testing.run`.

    Args:
        link: the default link between any two hosts; :meth:`set_link` changes it for a pair.
        uplink: bytes per second that a host can send, ``None`` = no limit; :attr:`Host.uplink` changes it for one host.
        downlink: bytes per second that a host can receive.
        rng: source of all randomness; default: that of the loop, which ``run`` has seeded.
        trace: records everything that arrives.
        internet: give every host an IPv4 address, so that it can be behind a :class:`~shoal.testing.Nat`. Otherwise
            addresses are just numbers.

    Raises:
        SimulationError: the running loop is not one with virtual time.
    """

    def __init__(
        self,
        link: Link | None = None,
        *,
        uplink: float | None = None,
        downlink: float | None = None,
        rng: random.Random | None = None,
        trace: Trace | None = None,
        internet: bool = False,
    ) -> None:
        super().__init__(lambda source, target, size: self.delay_between(self.host_of(source), self.host_of(target)))
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualTimeLoop):
            raise SimulationError("a simulated network needs virtual time: run it with shoal.testing.run(main())")
        self._loop = loop
        self.rng = rng or loop.rng
        self.trace = trace
        self.hosts: list[Host] = []
        """All hosts, by index."""
        self.internet: Internet[Host] | None = Internet(self.rng) if internet else None
        """Its addresses and routes."""
        self._punches = Punches(self, self.internet) if self.internet is not None else None
        self._link = link or Link()
        self._uplink, self._downlink = uplink, downlink
        self._paths: dict[tuple[int, int], Path] = {}
        self._ports: dict[Multiaddr, tuple[Host, contextvars.Context]] = {}
        self._host_of: dict[PeerID, Host] = {}
        self._sides: dict[Host, int] = {}
        self._connection_numbers = itertools.count()

    # --- building -----------------------------------------------------------------------------------------------------

    def add_host(self, nat: Nat | None = None) -> Host:
        """Add a host to the network.

        Args:
            nat: the router that it is behind, perhaps with others; default: none.

        Raises:
            SimulationError: the network has no addresses, so there is nothing to translate.
        """
        if nat is not None and self.internet is None:
            raise SimulationError("hosts behind routers need addresses: make the Network with internet=True")
        rng = random.Random(self.rng.getrandbits(64))
        host = Host(self, len(self.hosts), rng, self._uplink, self._downlink, nat)
        self.hosts.append(host)
        return host

    def host_of(self, peer: PeerID) -> Host:
        """The host on which a peer runs.

        Raises:
            KeyError: it runs on no host.
        """
        return self._host_of[peer]

    def set_link(self, first: Host, second: Host, link: Link) -> None:
        """Change the link between two hosts, also for their existing connections."""
        self._path(first, second).change(link, self._draw_delay(link))

    def delay_between(self, first: Host, second: Host) -> float:
        """Seconds that a message takes one way, without jitter."""
        return self._path(first, second).delay

    def _path(self, first: Host, second: Host) -> Path:
        key = (min(first.index, second.index), max(first.index, second.index))
        path = self._paths.get(key)
        if path is None:
            local = self._link
            if first is second:
                local = Link()
            elif first.nat is not None and first.nat is second.nat:
                local = LAN
            path = self._paths[key] = Path(local, self._draw_delay(local), self._are_apart(first, second))
        return path

    def _draw_delay(self, link: Link) -> float:
        return self.rng.uniform(*link.delay) if isinstance(link.delay, tuple) else link.delay

    # --- partitions ---------------------------------------------------------------------------------------------------

    def partition(self, *groups: Iterable[Host]) -> None:
        """Cut the network between groups of hosts; a host in no group still reaches everybody.

        As with TCP, messages across the cut are not lost: they come through when the cut is healed, unless the
        connection was given up before. Replaces an earlier partition.
        """
        self._sides = {host: side for side, group in enumerate(groups) for host in group}
        for (first, second), path in self._paths.items():
            path.is_cut = self._are_apart(self.hosts[first], self.hosts[second])
            if path.held and not path.is_cut:
                self._loop.call_later(path.delay, path.release_held)

    def break_connections(self, first: Host, second: Host) -> None:
        """End all connections between two hosts on both sides; the hosts may connect again at once."""
        for stream in list(first.streams):
            if stream.other.host is second:
                _break(stream, stream.other)

    def heal(self) -> None:
        """End the partition."""
        self.partition()

    def _are_apart(self, first: Host, second: Host) -> bool:
        return first in self._sides and second in self._sides and self._sides[first] != self._sides[second]

    # --- for hosts and their transports -------------------------------------------------------------------------------

    def register(self, peer: PeerID, host: Host) -> None:
        """Note that a peer runs on this host."""
        self._host_of[peer] = host

    def open_port(self, address: Multiaddr, host: Host, context: contextvars.Context) -> None:
        """Assign an address to a host; connections to it are accepted in this context."""
        self._ports[address] = (host, context)

    def is_silent(self, here: Host, there: Host) -> bool:
        """Whether an attempt of one host to connect to another one remains without an answer."""
        return there.is_off or there.firewalled or self._path(here, there).is_cut

    async def connect(self, source: MemoryTransport, address: Multiaddr, expected_peer: PeerID | None) -> Stream:
        assert isinstance(source, HostTransport)
        here = source.host
        route = await self._find(here, address)
        there = route.host
        await self._reach(here, route, address, HANDSHAKE_ROUND_TRIPS)
        listener, on_stream = self.find_listener(route.inside, expected_peer)
        listener.arrivals += 1
        near, far = self.link_hosts(here, there, route.routers)
        near.remote, near.remote_address, near.local_address = listener.identity.peer_id, address, route.local
        far.remote, far.remote_address, far.local_address = source.identity.peer_id, route.seen, route.inside
        try:
            source.show_badges(near, far, listener)
        except NotAMemberError:
            near.vanish()
            far.vanish()
            raise
        self._loop.call_later(self.delay_between(here, there), on_stream, far, context=route.context)
        return near

    async def _find(self, here: Host, address: Multiaddr, port: int | None = None) -> _Route:
        """The way to an address.

        Raises:
            DialError: there is none.
        """
        if not here.is_up:
            raise DialError(f"{address}: this host is down")
        if self.internet is None:
            if address not in self._ports:
                raise DialError(f"{address}: no route: there is no such address")
            return _Route(*self._ports[address], inside=address)
        if address.protocols() != ["ip4", "tcp"]:
            raise DialError(f"{address}: no route: addresses here are /ip4/<address>/tcp/<port>")
        local = (here.ip, port or here.new_port())
        packet = self.internet.depart(here, local[1], endpoint_of(address))
        arrived = None if packet is None else self.internet.arrive(packet)
        if packet is None or arrived is None or arrived.host is None:
            if packet is not None and arrived is not None and arrived.is_rejected:
                await asyncio.sleep(2 * self.delay_between(here, self.internet.host_towards(packet)))
                raise DialError(f"{address}: connection refused: nothing listens there, or a firewall rejects it")
            await self._hear_nothing(address, DIAL_TIMEOUT)
        assert packet is not None
        assert arrived is not None
        assert arrived.host is not None
        inside = address_of(arrived.to)
        _, context = self._ports.get(inside, (arrived.host, contextvars.copy_context()))
        seen = address_of(packet.source)
        return _Route(arrived.host, context, inside, address_of(local), seen, arrived.routers)

    async def _hear_nothing(self, address: Multiaddr, seconds: float) -> NoReturn:
        await asyncio.sleep(max(0.0, seconds))
        raise DialError(f"{address}: no answer within {DIAL_TIMEOUT:g} s: nothing is there, or a firewall drops it")

    async def _reach(self, here: Host, route: _Route, address: Multiaddr, round_trips: int) -> None:
        """Wait for the time that it takes to connect.

        Raises:
            DialError: it has failed.
        """
        there = route.host
        path = self._path(here, there)
        round_trip = 2 * path.delay
        if path.jitter:
            round_trip += 2 * path.jitter * self.rng.random()
        needed = round_trip  # enough for a refusal by the operating system
        if route.inside in self.listeners:
            needed *= round_trips
        await asyncio.sleep(min(needed, DIAL_TIMEOUT))
        if self.is_silent(here, there) or needed > DIAL_TIMEOUT:
            await self._hear_nothing(address, DIAL_TIMEOUT - needed)
        if not here.is_up:
            raise DialError(f"{address}: this host is down")
        if path.link.dial_failure and self.rng.random() < path.link.dial_failure:
            raise InterruptedDialError(f"{address}: the connection was closed during the handshake")

    def link_hosts(
        self, here: Host, there: Host, routers: Sequence[Nat] = ()
    ) -> tuple[SimulatedStream, SimulatedStream]:
        """A connection between two hosts, which the second one will see after the delay of the path."""
        path, number = self._path(here, there), next(self._connection_numbers)
        near = SimulatedStream(here, path, number, None, None, routers)
        far = SimulatedStream(there, path, number, None, None)
        near.other, far.other = far, near
        near.opens_after(path.delay)
        if path.link.break_rate:
            near.break_timer = self._loop.call_later(self.rng.expovariate(path.link.break_rate), _break, near, far)
        return near, far

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def open_session(
        self, source: MemoryTransport, address: Multiaddr, cookie: bytes, *, punchable: bool, beside: Session | None
    ) -> MemorySession:
        assert isinstance(source, HostTransport)
        here = source.host
        local = None if beside is None else beside.local_address
        route = await self._find(here, address, None if local is None else int(local["tcp"] or 0))
        await self._reach(here, route, address, 1)
        found = self.listeners.get(route.inside)
        if found is None:
            raise DialError(f"{address}: connection refused: nothing listens there")
        local = route.local or self.new_address()
        near, far = self.link_hosts(here, route.host, route.routers)
        arrived = MemorySession(far, route.inside, route.seen or local)
        self._loop.call_later(self.delay_between(here, route.host), found[0].expectations.meet, cookie, arrived)
        return MemorySession(near, local, address, punchable=punchable)

    def make_pipe(self, here: PeerID, there: PeerID) -> tuple[PipeEnd, PipeEnd]:
        return self.link_hosts(self.host_of(here), self.host_of(there))

    def punch(
        self, source: MemoryTransport, session: MemorySession, candidates: Sequence[Multiaddr], seconds: float
    ) -> AsyncGenerator[MemorySession, None]:
        assert isinstance(source, HostTransport)
        if self._punches is None:
            return super().punch(source, session, candidates, seconds)
        return self._punches.punch(source.host, session, candidates, seconds)


@dataclass
class _Route:
    """The way of a connection.

    Attributes:
        host: its destination.
        context: of whoever listens there.
        inside: the destination's address as that host knows it.
        local: the port from where it starts, on networks with addresses.
        seen: that port as the destination sees it.
        routers: all that it passes.
    """

    host: Host
    context: contextvars.Context
    inside: Multiaddr
    local: Multiaddr | None = None
    seen: Multiaddr | None = None
    routers: Sequence[Nat] = ()


def _break(near: SimulatedStream, far: SimulatedStream) -> None:
    near.abort()
    far.abort()
