"""Simulated routers: who gets in, which ports are seen, what punches come to, and what a restart of a router does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from shoal.errors import DialError, SimulationError
from shoal.net.transport import Session, Splice, Throttle
from shoal.peers.multiaddr import Multiaddr
from shoal.testing import Host, Link, Nat, Network, run
from shoal.testing.links import SimulatedStream
from shoal.testing.nat import endpoint_of
from shoal.testing.network import HostTransport
from tests.testing.pipes import Listener, now, read

ONE_WAY = 0.03
PUNCH_SECONDS = 2.5


class Unlimited(Throttle):
    def take(self, nbytes: int) -> float:
        return 0.0


def simulated(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test_it() -> None:
        run(test())

    test_it.__name__, test_it.__doc__ = test.__name__, test.__doc__
    return test_it


def internet(**options: Any) -> Network:
    return Network(Link(delay=ONE_WAY), internet=True, **options)


def ip_of(address: Multiaddr | None) -> str:
    assert address is not None
    return endpoint_of(address)[0]


async def rings(listener: Listener, host: Host, address: Multiaddr | None = None) -> SimulatedStream:
    """The dialler's end of a connection to a listener."""
    transport = host.transport()
    return await host.run(transport.dial(address or listener.address, listener.transport.identity.peer_id))


# --- dials ------------------------------------------------------------------------------------------------------------


@simulated
async def test_host_behind_a_router_cannot_be_called() -> None:
    network = internet()
    public, private = network.add_host(), network.add_host(nat=Nat())
    server, client = await Listener(public).start(), await Listener(private).start()
    assert server.address.value_for_protocol("ip4") == public.ip
    near = await rings(server, private)
    far = await server.accepted.get()
    assert private.nat is not None
    assert ip_of(far.remote_address) == private.nat.ip != private.ip
    assert near.remote_address == server.address
    await far.write(b"in by the connection")
    assert await read(near, 20) == b"in by the connection"
    for address in (client.address, Multiaddr(f"/ip4/{private.nat.ip}/tcp/{endpoint_of(client.address)[1]}")):
        with pytest.raises(DialError, match="no answer within"):
            await rings(client, public, address)


@simulated
async def test_forwarded_ports_and_open_routers_let_everybody_in() -> None:
    network = internet()
    public = network.add_host()
    forwards, opens = Nat(), Nat(filtering="open")
    for nat in (forwards, opens):
        client = await Listener(network.add_host(nat=nat)).start()
        port = endpoint_of(client.address)[1]
        if nat is forwards:
            nat.forward(port, client.host)
        near = await rings(client, public, Multiaddr(f"/ip4/{nat.ip}/tcp/{port}"))
        far = await client.accepted.get()
        assert ip_of(far.remote_address) == public.ip
        await near.write(b"come in")
        assert await read(far, 7) == b"come in"


@simulated
async def test_a_router_that_rejects_says_so_at_once() -> None:
    network = internet()
    public, private = network.add_host(), network.add_host(nat=Nat(rejects=True))
    client = await Listener(private).start()
    assert private.nat is not None
    began = now()
    with pytest.raises(DialError, match="refused"):
        await rings(client, public, Multiaddr(f"/ip4/{private.nat.ip}/tcp/1"))
    assert now() - began == pytest.approx(2 * ONE_WAY)


@simulated
async def test_neighbours_need_a_hairpin_for_outer_addresses() -> None:
    for hairpin in (False, True):
        network = internet()
        home = Nat(hairpin=hairpin)
        first, second = network.add_host(nat=home), network.add_host(nat=home)
        listener = await Listener(second).start()
        began = now()
        await rings(listener, first)
        assert now() - began < 0.01
        assert ip_of((await listener.accepted.get()).remote_address) == first.ip
        port = endpoint_of(listener.address)[1]
        home.forward(port, second)
        outside = Multiaddr(f"/ip4/{home.ip}/tcp/{port}")
        if hairpin:
            await rings(listener, first, outside)
            assert ip_of((await listener.accepted.get()).remote_address) == home.ip
        else:
            with pytest.raises(DialError, match="no answer"):
                await rings(listener, first, outside)


@simulated
async def test_two_routers_in_a_row_and_plain_firewalls() -> None:
    network = internet()
    server = await Listener(network.add_host()).start()
    carrier = Nat(hairpin=True)
    inner = [network.add_host(nat=Nat(behind=carrier)) for _ in range(2)]
    guarded = network.add_host(nat=Nat(mapping="none"))
    seen = []
    for host in (*inner, guarded):
        await rings(server, host)
        seen.append(ip_of((await server.accepted.get()).remote_address))
    assert seen == [carrier.ip, carrier.ip, guarded.ip]
    assert carrier.ip not in {host.nat.ip for host in inner if host.nat is not None}
    listener = await Listener(guarded).start()
    with pytest.raises(DialError, match="no answer"):
        await rings(listener, server.host)


@simulated
async def test_only_easy_routers_reuse_ports() -> None:
    network = internet()
    places = [("101.0.0.1", 80), ("101.0.1.1", 80)]
    for mapping in ("easy", "hard"):
        host = network.add_host(nat=Nat(mapping=mapping))
        assert host.nat is not None
        outer = [host.nat.outward((host.ip, 40000), place) for place in places]
        again = [host.nat.outward((host.ip, 40000), place) for place in places]
        assert outer == again
        assert (outer[0] == outer[1] == (host.nat.ip, 40000)) is (mapping == "easy")
        assert (outer[0] != outer[1]) is (mapping == "hard")


@simulated
async def test_restarted_router_silences_old_connections() -> None:
    network = internet()
    server = await Listener(network.add_host()).start()
    private = network.add_host(nat=Nat())
    near, far = await rings(server, private), await server.accepted.get()
    assert private.nat is not None
    before = private.nat.ip
    private.nat.rebind(new_address=True)
    await near.write(b"hello?")
    await far.write(b"hello?")
    await asyncio.sleep(60)
    assert near.received == far.received == 0
    assert not near.closed
    assert not far.closed
    await rings(server, private)
    assert ip_of((await server.accepted.get()).remote_address) == private.nat.ip != before
    await asyncio.sleep(1000)
    assert near.closed
    assert far.closed


@simulated
async def test_routers_need_a_network_with_addresses() -> None:
    with pytest.raises(SimulationError, match="internet=True"):
        Network().add_host(nat=Nat())
    home = Nat()
    internet().add_host(nat=home)
    with pytest.raises(SimulationError, match="another network"):
        internet().add_host(nat=home)


# --- sessions and punches ---------------------------------------------------------------------------------------------


class Circuit:
    """Two hosts with sessions to a public one, each from a port that can punch."""

    def __init__(self, network: Network, *hosts: Host) -> None:
        self.relay = network.add_host()
        self.transports = [host.transport() for host in hosts]
        self.sessions: list[Session] = []
        self.inner: list[Session] = []

    async def open(self) -> Circuit:
        listener = await Listener(self.relay).start()
        for number, transport in enumerate(self.transports):
            cookie = bytes([number]) * 32
            expected = listener.transport.expect_session(cookie)
            opening = transport.open_session(listener.address, cookie, punchable=True)
            self.sessions.append(await transport.host.run(opening))
            self.inner.append(await expected)
        return self

    async def punch(self, late: float = 0.0) -> list[list[Session]]:
        """What each end finds if the second one begins so much later."""
        seen = [session.remote_address for session in self.inner]
        return await asyncio.gather(
            *(
                transport.host.run(self._find(transport, session, [other], pause))
                for transport, session, other, pause in zip(
                    self.transports, self.sessions, reversed(seen), (0.0, late), strict=True
                )
                if other is not None
            )
        )

    async def _find(
        self, transport: HostTransport, session: Session, candidates: list[Multiaddr], pause: float
    ) -> list[Session]:
        await asyncio.sleep(pause)
        async with aclosing(transport.punch(session, candidates, PUNCH_SECONDS)) as found:
            return [each async for each in found]


def full_cone() -> Nat:
    return Nat(filtering="none")


def restricted() -> Nat:
    return Nat(filtering="address")


def port_restricted() -> Nat:
    return Nat(filtering="port")


def rejecting() -> Nat:
    return Nat(filtering="port", rejects=True)


def carrier() -> Nat:
    return Nat(behind=Nat())


def symmetric() -> Nat:
    return Nat(mapping="hard", filtering="port")


def firewall() -> Nat:
    return Nat(mapping="none")


KINDS = [full_cone, restricted, port_restricted, rejecting, carrier, firewall, symmetric]
IMPOSSIBLE = {
    frozenset(pair)
    for pair in [
        (symmetric,),
        (symmetric, port_restricted),
        (symmetric, rejecting),
        (symmetric, carrier),
        (symmetric, firewall),
    ]
}


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("late", [0.0, 0.02, 0.2])
def test_punches_end_as_through_real_routers(first: Callable[[], Nat], second: Callable[[], Nat], late: float) -> None:
    async def main() -> None:
        network = internet()
        circuit = await Circuit(network, network.add_host(nat=first()), network.add_host(nat=second())).open()
        near, far = await circuit.punch(late)
        possible = frozenset({first, second}) not in IMPOSSIBLE
        assert (len(near), len(far)) == ((1, 1) if possible else (0, 0))
        if possible:
            await near[0].write(b"direct")
            assert await far[0].read_exactly(6) == b"direct"

    run(main())


@simulated
async def test_simultaneous_punch_takes_one_round_trip() -> None:
    network = internet()
    circuit = await Circuit(network, *(network.add_host(nat=Nat()) for _ in range(2))).open()
    began, moments = now(), []

    async def first_of(transport: HostTransport, session: Session, candidate: Multiaddr | None) -> None:
        assert candidate is not None
        async with aclosing(transport.punch(session, [candidate], PUNCH_SECONDS)) as found:
            async for _ in found:
                moments.append(now() - began)
                return

    seen = [each.remote_address for each in circuit.inner]
    await asyncio.gather(*map(first_of, circuit.transports, circuit.sessions, reversed(seen)))
    assert moments == [pytest.approx(2 * ONE_WAY)] * 2
    assert not any(host.nat.streams for host in network.hosts if host.nat is not None and not host.streams)


@simulated
async def test_joined_sessions_use_both_relay_lines() -> None:
    network = internet(uplink=1e6, downlink=1e6)
    circuit = await Circuit(network, *(network.add_host(nat=Nat()) for _ in range(2))).open()
    circuit.relay.uplink = 1e5
    joining = circuit.relay.spawn(Splice(circuit.inner[0], circuit.inner[1], Unlimited(), 120.0).run())
    began = now()
    await asyncio.gather(circuit.sessions[0].write(bytes(100_000)), circuit.sessions[1].read_exactly(100_000))
    assert now() - began == pytest.approx(1.0, abs=0.15)
    circuit.relay.crash()
    await asyncio.sleep(1.0)
    assert joining.cancelled()
    for session in circuit.sessions:
        with pytest.raises(ConnectionError):
            await session.read_exactly(1)


@simulated
async def test_a_relay_without_power_leaves_its_sessions_silent() -> None:
    network = internet()
    circuit = await Circuit(network, *(network.add_host(nat=Nat()) for _ in range(2))).open()
    circuit.relay.power_off()
    reading = asyncio.ensure_future(circuit.sessions[0].read_exactly(1))
    await asyncio.sleep(60)
    assert not reading.done()
    reading.cancel()
    with pytest.raises(DialError, match="no answer"):
        await circuit.transports[0].open_session(Multiaddr(f"/ip4/{circuit.relay.ip}/tcp/32768"), bytes(32))
