"""A simulated network: hosts, the links between them, routers, and everything that can go wrong.

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
import itertools
import random
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, TypeVar, cast

from shoal.base.tasks import cancel_and_wait
from shoal.errors import DialError, InterruptedDialError, NotAMemberError, SimulationError
from shoal.net.memory import MemoryNetwork, MemorySession, MemoryTransport, PipeEnd, PunchPort
from shoal.net.own_addresses import ROUTED, OwnAddress, OwnAddresses
from shoal.net.transport import COOKIE_BYTES, OnStream, Session, Stream
from shoal.peers.identity import Identity, PeerID
from shoal.peers.multiaddr import Multiaddr
from shoal.testing.links import HostState, Link, Path, SimulatedStream, Station, Trace
from shoal.testing.loop import VirtualTimeLoop
from shoal.testing.nat import Arrived, Endpoint, Internet, Nat, Packet, address_of, endpoint_of

T = TypeVar("T")

# The lowest port that a system chooses by itself, as on Linux.
FIRST_PORT = 32768


class Host(Station):
    """One machine on a :class:`Network`. Made by :meth:`Network.add_host`.

    Attributes:
        index: its number on the network, from 0.
        rng: source of randomness for everything that runs on this host.
        clock_offset: seconds by which its clock is ahead of the true time.
        firewalled: whether a firewall drops all attempts to connect to it.
        nat: the router that it is behind.
        ip: its address; empty on a network without addresses.
    """

    def __init__(
        self,
        network: Network,
        index: int,
        rng: random.Random,
        uplink: float | None,
        downlink: float | None,
        nat: Nat | None = None,
    ) -> None:
        super().__init__(uplink, downlink)
        self.network, self.index, self.rng, self.nat = network, index, rng, nat
        self.ip = "" if network.internet is None else network.internet.add(self, nat)
        self._port_numbers = itertools.count()
        self.firewalled = False
        self._transports: list[HostTransport] = []

    def __repr__(self) -> str:
        return f"<Host {self.index}, {self.state.value}>"

    def new_port(self) -> int:
        """A port that is not in use now."""
        return FIRST_PORT + next(self._port_numbers) % (2**16 - FIRST_PORT)

    # --- running things -----------------------------------------------------------------------------------------------

    def spawn(self, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task on this host; it is cancelled when the host dies.

        Raises:
            SimulationError: the host is down.
        """
        if not self.is_up:
            coro.close()
            raise SimulationError(f"{self} cannot run anything")
        return super().spawn(coro)

    async def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this host and wait for its result.

        Raises:
            SimulationError: the host is down, or died before there was a result.
        """
        task = self.spawn(coro)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.cancelled() and not self.is_up:
            raise SimulationError(f"{self} died while it ran {coro!r}")
        return task.result()

    def transport(self, identity: Identity | None = None) -> HostTransport:
        """The transport that :meth:`P2P.create` needs to work on this host.

        Args:
            identity: of the peer; default: a new one, drawn from the host's ``rng``.
        """
        transport = HostTransport(self, identity or Identity.generate(self.rng))
        self._transports.append(transport)
        self.network.register(transport.identity.peer_id, self)
        return transport

    # --- dying --------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """End its program as SIGKILL does: its connections end at once, and new ones are refused."""
        self._die(HostState.CRASHED)

    def power_off(self) -> None:
        """Make it vanish: it neither answers nor ends its connections."""
        self._die(HostState.OFF)

    def _die(self, state: HostState) -> None:
        if not self.is_up:
            return
        self.thaw()
        self.state = state
        for transport in self._transports:
            transport.stop_listening()
            transport.expectations.close()
        for stream in list(self.streams):
            if state is HostState.CRASHED:
                stream.abort()
            else:
                stream.vanish()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for task in loop.unfinished_tasks(self):
            task.cancel()


class HostTransport(MemoryTransport):
    """How one peer on a host reaches others. Made by :meth:`Host.transport`."""

    _network: Network

    def __init__(self, host: Host, identity: Identity) -> None:
        super().__init__(host.network, identity)
        self.host = host
        self._machine = OwnAddresses(lambda: [OwnAddress(host.ip, ROUTED, 24)] if host.ip else [])
        self._machine.look(0.0)

    def is_inside(self, address: Multiaddr) -> bool:
        ip = address.get("ip4")
        return ip is None or self._machine.is_inside(ip)

    def is_here(self, address: Multiaddr) -> bool:
        ip = address.get("ip4")
        return ip is None or self._machine.is_here(ip)

    def worth_dialling(self, addresses: Sequence[Multiaddr], *, have_others: bool = False) -> list[Multiaddr]:
        usable = super().worth_dialling(addresses)
        return self._machine.in_order_to_dial(usable, have_others=have_others) if self.host.ip else usable

    def new_cookie(self) -> bytes:
        return self.host.rng.randbytes(COOKIE_BYTES)

    async def listen(self, address: Multiaddr, on_stream: OnStream) -> list[Multiaddr]:
        addresses = await super().listen(address, on_stream)
        for each in addresses:
            self._network.open_port(each, self.host, contextvars.copy_context())
        return addresses

    def free_address(self, wanted: Multiaddr) -> Multiaddr:
        if self._network.internet is None:
            return super().free_address(wanted)
        _, port = endpoint_of(wanted)
        return address_of((self.host.ip, port or self.host.new_port()))


# Seconds after which a system repeats an attempt to connect that nobody answers (RFC 6298).
SILENT_SECONDS = 1.0
# The pause after a refused attempt: at least the first number of seconds, at most half a round trip plus the second.
# Both ends draw from this range, so that their attempts soon cross. As in `shoal.net.tcp.punch`.
SHORTEST_PAUSE, EXTRA_PAUSE = 0.005, 0.01
# Round trips for TCP, TLS and the proof of identity, before the dialler may send.
HANDSHAKE_ROUND_TRIPS = 3
# The link between hosts behind one router. Chosen.
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
        self._punch_ports: dict[Endpoint, PunchPort] = {}  # ports from which hosts punch now
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
            nat: the router that it is behind, which it may share with others; default: none.

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
        """Change the link between two hosts, including their existing connections."""
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

        As with TCP, messages across the cut are not lost: they get through when the cut is healed, unless the
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
        """Whether an attempt of one host to connect to another one gets no answer."""
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
        """The route to an address.

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
        """Wait as long as it takes to connect.

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
        """Make a connection between two hosts; the second one sees it after the delay of the path."""
        path, number = self._path(here, there), next(self._connection_numbers)
        near = SimulatedStream(here, path, number, self.rng, self.trace, routers)
        far = SimulatedStream(there, path, number, self.rng, self.trace)
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

    # --- simultaneous opens -------------------------------------------------------------------------------------------
    #
    # An attempt opens the sender's own router for answers of its destination. So it gets through the other router if an
    # attempt of the other side has opened that one before: both attempts must be in flight at the same time. A router
    # that rejects attempts also closes the hole again; then both sides try again soon. Otherwise systems repeat an
    # attempt after a second.

    def punch(
        self, source: MemoryTransport, session: MemorySession, candidates: Sequence[Multiaddr], seconds: float
    ) -> AsyncGenerator[MemorySession, None]:
        assert isinstance(source, HostTransport)
        if self.internet is None:
            return super().punch(source, session, candidates, seconds)
        return self._punch(source.host, self.internet, session, candidates, seconds)

    async def _punch(
        self,
        here: Host,
        internet: Internet[Host],
        session: MemorySession,
        candidates: Sequence[Multiaddr],
        seconds: float,
    ) -> AsyncGenerator[MemorySession, None]:
        address = cast("Multiaddr", session.local_address)
        port = PunchPort(address, candidates)
        self._punch_ports[endpoint_of(address)] = port
        loop = asyncio.get_running_loop()
        knocking = [loop.create_task(self._knock(here, internet, port, each)) for each in dict.fromkeys(candidates)]
        end = loop.time() + seconds
        try:
            while (found := await port.next(end)) is not None:
                yield found
        finally:
            port.close()
            del self._punch_ports[endpoint_of(address)]
            await cancel_and_wait(*knocking)

    async def _knock(self, here: Host, internet: Internet[Host], port: PunchPort, candidate: Multiaddr) -> None:
        """Keep trying to connect to a candidate."""
        to = endpoint_of(candidate)
        while (packet := internet.depart(here, endpoint_of(port.address)[1], to)) is not None:
            delay = self.delay_between(here, internet.host_towards(packet))
            await asyncio.sleep(delay)
            outcome = self._meet(here, internet.arrive(packet), port, candidate, packet)
            if outcome is _Knock.CONNECTED:
                return
            if outcome is _Knock.LOST:
                await asyncio.sleep(SILENT_SECONDS - delay)
            else:
                await asyncio.sleep(delay)
                packet.withdraw()
                await asyncio.sleep(here.rng.uniform(SHORTEST_PAUSE, delay + EXTRA_PAUSE))

    def _meet(
        self, here: Host, arrived: Arrived[Host], port: PunchPort, candidate: Multiaddr, packet: Packet
    ) -> _Knock:
        there = arrived.host
        if there is None:
            return _Knock.REFUSED if arrived.is_rejected else _Knock.LOST
        if self.is_silent(here, there):
            return _Knock.LOST
        other = self._punch_ports.get(arrived.to)
        if other is None or other is port:
            return _Knock.REFUSED
        if port.may_meet(other):
            source = address_of(packet.source)
            near, far = self.link_hosts(here, there, arrived.routers)
            delay = self.delay_between(here, there)
            call_later = asyncio.get_running_loop().call_later
            call_later(delay, port.connected, MemorySession(near, port.address, candidate))
            # A side that only listens waits for the reply to its answer; one that tries, too, is a trip faster.
            away = delay if source in other.candidates else 2 * delay
            call_later(away, other.connected, MemorySession(far, other.address, source))
        return _Knock.CONNECTED


class _Knock(Enum):
    """The outcome of one attempt of a simultaneous open."""

    CONNECTED = "connected"
    REFUSED = "refused"
    LOST = "lost"


@dataclass
class _Route:
    """The route of a connection.

    Attributes:
        host: its destination.
        context: that of the listener there.
        inside: the destination's address as that host knows it.
        local: the port from which it starts, on networks with addresses.
        seen: that port as the destination sees it.
        routers: the routers that it passes.
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
