"""Addresses that peers tell of themselves: which are dialled at their word, and that time tells a scanner nothing."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import DialError, IdentityMismatchError, InterruptedDialError, RefusedDialError
from shoal.net.addresses import AddressBook, ip_to_dial, is_name, may_be_dialled_for
from shoal.net.memory import MemoryNetwork, MemoryTransport
from shoal.net.own_addresses import LOOPBACK, PLUGGED, ROUTED, VIRTUAL, OwnAddress, OwnAddresses
from shoal.net.tcp.connect import connect
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import Stream
from shoal.p2p import P2P, Identity, Multiaddr, PeerID
from shoal.peers.identity import circuit_address
from shoal.reach.checkup import CALL_BACK_SECONDS, CallBack, CallMe, Checkup
from shoal.reach.relay.circuits import may_be_dialled
from tests.dht.virtual_time import in_virtual_time
from tests.p2p.peers import Number, Peers, serving, stub

STRANGER, OTHER = Identity.generate().peer_id, Identity.generate().peer_id
MACHINE = OwnAddresses(
    lambda: [
        OwnAddress("192.168.1.5", ROUTED, 24),
        OwnAddress("2a00:1450:1:1::5", ROUTED, 64),
        OwnAddress("fd00:1::5", PLUGGED, 64),
        OwnAddress("172.17.0.1", VIRTUAL, 16),
        OwnAddress("127.0.0.1", LOOPBACK, 8),
        OwnAddress("::1", LOOPBACK, 128),
    ]
)
MACHINE.look(0.0)
FAR, FAR_6 = "8.8.4.4", "2a00:1450:9::9"
"""Hosts of the internet."""
LAN, BRIDGE, ROUTED_LAN, ON_LINK = "192.168.1.7", "172.17.0.2", "10.7.7.7", "2a00:1450:1:1::7"
"""A neighbour, a container on this machine, a host of another private network, a neighbour by IPv6."""
CARRIER, CABLE, HERE = "100.64.7.7", "169.254.7.7", "192.168.1.5"
"""A customer of the same provider, a machine on the same cable, another peer on this machine."""
EVERYBODY = [FAR, FAR_6, LAN, BRIDGE, ROUTED_LAN, ON_LINK, CARRIER, CABLE, HERE, "127.0.0.1", "::1", ""]
PRIVATE = {LAN, BRIDGE, ROUTED_LAN, ON_LINK, CABLE, HERE, "127.0.0.1", "::1"}
ON_THIS_MACHINE = {HERE, "127.0.0.1", "::1"}


def tcp(host: str, port: int = 4000) -> Multiaddr:
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")


def is_inside(address: Multiaddr) -> bool:
    return MACHINE.is_inside(address.values()[0] or "")


def is_here(address: Multiaddr) -> bool:
    return MACHINE.is_here(address.values()[0] or "")


def may_dial(address: Multiaddr, seen: str) -> bool:
    return may_be_dialled_for(address, tcp(seen) if seen else None, is_inside=is_inside, is_here=is_here)


@pytest.mark.parametrize(
    ("host", "tellers"),
    [
        # The public internet: anybody could find out by itself.
        (FAR, EVERYBODY),
        ("9.9.9.9", EVERYBODY),
        (FAR_6, EVERYBODY),
        (ON_LINK, EVERYBODY),
        # This machine itself.
        ("127.0.0.1", ON_THIS_MACHINE),
        ("127.0.0.2", ON_THIS_MACHINE),
        ("::1", ON_THIS_MACHINE),
        # Private networks, those of this machine too.
        (LAN, PRIVATE),
        ("192.168.1.1", PRIVATE),
        (HERE, PRIVATE),
        (BRIDGE, PRIVATE),
        ("10.0.0.1", PRIVATE),
        ("172.16.0.1", PRIVATE),
        ("fd00:1::7", PRIVATE),
        ("fd00:2::7", PRIVATE),
        ("100.64.1.1", PRIVATE | {CARRIER}),
        # A machine on the same cable may name itself; others could name services of clouds.
        (CABLE, {CABLE}),
        ("169.254.169.254", set()),
        ("fe80::7", set()),
        # Addresses that mean no host, or hide another address.
        ("0.0.0.0", set()),
        ("0.0.0.7", set()),
        ("::", set()),
        ("224.0.0.1", set()),
        ("239.255.255.250", set()),
        ("ff02::1", set()),
        ("240.0.0.1", set()),
        ("255.255.255.255", set()),
        ("::ffff:127.0.0.1", set()),
        ("::ffff:192.168.1.1", set()),
        (f"::ffff:{FAR}", set()),
        ("2002:7f00:1::", set()),
        ("2002:c0a8:101::1", set()),
        ("2001:0:7f00:1::1", set()),
        ("64:ff9b::7f00:1", set()),
        ("64:ff9b:1::c0a8:101", set()),
        ("::127.0.0.1", set()),
        # Neither of the internet nor of a network at home: examples, tests of routers.
        ("203.0.113.7", PRIVATE),
        ("198.18.0.1", PRIVATE),
    ],
)
def test_which_addresses_are_dialled_at_whose_word(host: str, tellers: Any) -> None:
    assert {seen for seen in EVERYBODY if may_dial(tcp(host), seen)} == set(tellers)


@pytest.mark.parametrize("seen", EVERYBODY)
def test_a_name_is_looked_up_before_it_is_judged(seen: str) -> None:
    for text in ("/dns4/example.org/tcp/1", "/dns/localhost/tcp/1", "/dns6/router.lan/tcp/1"):
        assert is_name(Multiaddr(text))
        assert not may_dial(Multiaddr(text), seen)
    assert not is_name(tcp(FAR))
    assert not is_name(Multiaddr("/memory/7"))
    assert may_dial(Multiaddr("/memory/7"), seen), "there is no other network inside a process"


@given(st.ip_addresses(), st.sampled_from(EVERYBODY))
def test_whatever_a_far_peer_tells_the_own_networks_are_not_dialled(ip: Any, seen: str) -> None:
    if may_dial(tcp(str(ip)), seen) and seen not in PRIVATE | {CARRIER}:
        assert ip.is_global
        assert ip_to_dial(str(ip)) == ip


@pytest.mark.parametrize("seen", [FAR, FAR_6, LAN, ROUTED_LAN, CARRIER, CABLE, "127.0.0.1", "203.0.113.7"])
def test_everybody_may_be_called_at_the_host_where_it_is_seen(seen: str) -> None:
    assert may_dial(tcp(seen, 31337), seen)


# --- what a peer knows of its own surroundings ------------------------------------------------------------------------


async def test_neighbours_behind_the_own_router_are_near() -> None:
    """A router that turns their connections around shows its outer address (a hairpin)."""
    async with Peers("tcp") as peers:
        p2p = await peers.start(announce_maddrs=["/ip4/8.8.8.8/tcp/4000"])
        assert p2p.judge_for(tcp("8.8.8.8"))(tcp("192.168.99.7"))
        assert not p2p.judge_for(tcp("8.8.8.8"))(tcp("127.0.0.1")), "but they are not on this machine"
        assert not p2p.judge_for(tcp(FAR))(tcp("192.168.99.7"))
        p2p.outlook.evidence.offers["router, ip4"] = tcp("8.8.8.9")
        assert p2p.judge_for(tcp("8.8.8.9"))(tcp("192.168.99.7"))
        p2p.outlook.evidence.offers["seen over ip4"] = tcp(FAR)
        assert not p2p.judge_for(tcp(FAR))(tcp("192.168.99.7")), "one who says to see this peer there may lie"


async def test_a_circuit_begins_at_its_relay() -> None:
    async with Peers("tcp") as peers:
        p2p = await peers.start()
        far, near = circuit_address(tcp(FAR), OTHER), circuit_address(tcp("192.168.99.7"), OTHER)
        assert p2p.judge_for(tcp("9.9.9.9"))(far)
        assert not p2p.judge_for(tcp("9.9.9.9"))(near)
        assert p2p.judge_for(tcp("192.168.99.8"))(near)
        assert p2p.judge_for(near)(near), "it has come through that relay"
        assert not p2p.judge_for(near)(circuit_address(tcp("192.168.99.7", 22), OTHER)), "and not from another port"
        assert not p2p.judge_for(near)(circuit_address(tcp("192.168.99.7"), STRANGER))
        assert not p2p.judge_for(Multiaddr(f"/dns4/a/tcp/1/p2p/{OTHER}/p2p-circuit"))(
            Multiaddr(f"/dns4/b/tcp/1/p2p/{OTHER}/p2p-circuit")
        )
        assert not p2p.judge_for(near)(tcp("192.168.99.7")), "but may be anywhere"
        assert not p2p.judge_for(near)(tcp("192.168.99.8"))
        assert p2p.judge_for(near)(tcp(FAR))
        assert not p2p.judge_for(far)(near)
        assert not p2p.judge_for(None)(near)
        p2p.address_book.replace(OTHER, [tcp("192.168.99.7")], p2p.judge_for(tcp("9.9.9.9")))
        assert not p2p.judge_for(far)(near), "the relay itself is not called there either"
        p2p.address_book.replace(OTHER, [tcp("192.168.99.7")], p2p.judge_for(tcp("192.168.99.7")))
        assert p2p.judge_for(far)(near), "this peer calls the relay there anyway"
        assert p2p.judge_for(None)(circuit_address(tcp("192.168.99.7"), p2p.peer_id)), "it is the relay itself"


def test_a_relay_with_a_public_place_has_callers_from_anywhere() -> None:
    lan, far = tcp("192.168.1.9", 4001), tcp(FAR, 4001)
    assert may_be_dialled(tcp(LAN), [lan], is_inside, is_here)
    assert not may_be_dialled(tcp(LAN), [far, lan], is_inside, is_here)
    assert not may_be_dialled(tcp(LAN), [lan, far], is_inside, is_here)
    assert not may_be_dialled(tcp(LAN), [], is_inside, is_here)
    assert may_be_dialled(tcp("9.9.9.9"), [far, lan], is_inside, is_here)


# --- what is remembered -----------------------------------------------------------------------------------------------


def refuse(address: Multiaddr) -> bool:
    return False


def test_what_only_the_peer_itself_has_told_is_judged() -> None:
    book, own, heard = AddressBook(), tcp(LAN), tcp("192.168.1.8")
    book.replace(STRANGER, [own, heard], refuse)
    assert book.get(STRANGER) == [own, heard], "others may be told, in its network they may know better"
    assert book.to_dial(STRANGER) == []
    book.add(STRANGER, [heard])
    assert book.to_dial(STRANGER) == [heard], "somebody else has told it as well"
    book.replace(STRANGER, [own, heard], refuse)
    assert book.to_dial(STRANGER) == [heard], "and stays told"
    book.prefer(STRANGER, own)
    assert set(book.to_dial(STRANGER)) == {own, heard}, "it has answered there"
    book.replace(STRANGER, [tcp("192.168.1.9")], refuse)
    assert book.to_dial(STRANGER) == []
    book.replace(STRANGER, [tcp("192.168.1.9")], lambda address: True)
    assert book.to_dial(STRANGER) == [tcp("192.168.1.9")], "it has come into this network"
    book.forget(STRANGER, tcp("192.168.1.9"))
    assert book.judge_of(STRANGER, tcp("192.168.1.9")) is None


def test_a_name_stays_until_it_is_known_where_it_leads() -> None:
    book, name = AddressBook(), Multiaddr("/dns4/example.org/tcp/1")
    book.replace(STRANGER, [name], refuse)
    assert book.to_dial(STRANGER) == [name]
    assert book.judge_of(STRANGER, name) is refuse


def test_the_forgotten_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.net.addresses.MAX_PEERS", 1)
    book = AddressBook()
    book.replace(STRANGER, [tcp(LAN)], refuse)
    book.replace(OTHER, [tcp(LAN)], refuse)
    assert book.judge_of(STRANGER, tcp(LAN)) is None
    assert book.judge_of(OTHER, tcp(LAN)) is refuse


# --- with real sockets ------------------------------------------------------------------------------------------------


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A service of this machine that no stranger should reach."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        service.setblocking(False)
        yield service


def port_of(service: socket.socket) -> int:
    return int(service.getsockname()[1])


def assert_untouched(service: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        service.accept()


def see_everybody_far_away(server: P2P, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_for = server.judge_for
    monkeypatch.setattr(server, "judge_for", lambda seen: judge_for(tcp(FAR)))


async def test_a_far_peer_is_not_called_at_the_loopback(trap: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port = port_of(trap)
    async with Peers("tcp") as peers:
        server = await peers.start()
        see_everybody_far_away(server, monkeypatch)
        scanner = await peers.start(announce_maddrs=[f"/ip4/127.0.0.1/tcp/{port}", f"/ip4/10.1.2.3/tcp/{port}"])
        await serving(server)
        await stub(scanner, server).rpc_square(Number(value=2))
        with pytest.raises(DialError, match=r"says that it is at .*/ip4/127\.0\.0\.1/.*, but is seen elsewhere"):
            await server.dial(scanner.peer_id)
        assert server.is_hopeless(scanner.peer_id), "so the table does not try either"
    assert_untouched(trap)


async def test_a_name_that_leads_into_the_own_network_is_not_followed(
    trap: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Peers("tcp") as peers:
        server = await peers.start()
        see_everybody_far_away(server, monkeypatch)
        scanner = await peers.start(announce_maddrs=[f"/dns4/localhost/tcp/{port_of(trap)}"])
        await serving(server)
        await stub(scanner, server).rpc_square(Number(value=2))
        with pytest.raises(DialError, match="leads into a private network"):
            await server.dial(scanner.peer_id)
        assert not server.is_hopeless(scanner.peer_id), "where it leads is not known before"
    assert_untouched(trap)


async def test_an_honest_peer_with_a_name_is_called() -> None:
    async with Peers("tcp") as peers:
        server = await peers.start(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        caller = await peers.start(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        port = caller.get_addresses(caller.peer_id)[0]["tcp"]
        named = Multiaddr(f"/dns4/localhost/tcp/{port}")
        answer = await ask(caller, server, named)
        assert answer.reached == {str(named): True}


async def test_the_addresses_of_a_name_are_judged_one_by_one() -> None:
    asked: list[str] = []

    def judge(ip: str) -> bool:
        asked.append(ip)
        return False

    with pytest.raises(OSError, match="leads into a private network") as error:
        await connect("127.0.0.1", 9, socket.AF_INET, judge=judge)
    assert asked == ["127.0.0.1"]
    assert error.value.errno == errno.EPERM


def ask(caller: P2P, server: P2P, *addresses: Multiaddr) -> Any:
    return Checkup.get_stub(caller, server.peer_id).rpc_call_back(CallMe([str(each) for each in addresses]))


async def test_nobody_is_called_back_where_it_cannot_be(trap: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Peers("tcp") as peers:
        server, scanner = await peers.two()
        see_everybody_far_away(server, monkeypatch)
        monkeypatch.setattr("shoal.reach.checkup.CALL_BACK_SECONDS", 0.2)
        name = f"/dns4/localhost/tcp/{port_of(trap)}"
        wanted = [tcp("127.0.0.1", port_of(trap)), tcp("192.168.1.1", 80), tcp("::1", 80), Multiaddr(name)]
        answer: CallBack = await ask(scanner, server, *wanted)
        assert answer.reached == {name: False}, "as if nobody were there; the others were not tried"
    assert_untouched(trap)


async def test_this_machine_knows_itself() -> None:
    transport = TcpTransport(Identity.generate())
    transport.addresses(latest=True)
    assert transport.is_here(tcp("127.0.0.1"))
    assert transport.is_here(tcp("::1"))
    assert not transport.is_here(tcp(FAR))
    assert not transport.is_here(Multiaddr("/dns4/localhost/tcp/1"))


# --- what a scanner learns by time ------------------------------------------------------------------------------------

CLOSED, FILTERED, OPEN, SLOW, OTHERS, BROKEN = (Multiaddr(f"/memory/{number}") for number in range(900, 906))
PORTS = [CLOSED, FILTERED, OPEN, SLOW, OTHERS, BROKEN]


class Ports(MemoryTransport):
    """Reaches ports of all kinds, none of which is a port of the peer that is asked about."""

    async def dial(self, address: Multiaddr, expected_peer: PeerID | None) -> Stream:
        if address not in PORTS:
            return await super().dial(address, expected_peer)
        if address == FILTERED:
            await asyncio.sleep(1000.0)
        await asyncio.sleep({OPEN: 0.003, SLOW: 3.9, OTHERS: 0.01}.get(address, 0.001))
        kind = {CLOSED: RefusedDialError, OTHERS: IdentityMismatchError, BROKEN: InterruptedDialError}
        raise kind.get(address, DialError)(f"{address}: no such peer") from OSError(errno.ECONNREFUSED, "no")


@pytest.mark.parametrize("port", PORTS)
@in_virtual_time
async def test_every_failure_of_a_call_back_takes_the_same_time(port: Multiaddr) -> None:
    network = MemoryNetwork()
    server = await P2P.create(transport=Ports(network, Identity.generate()))
    scanner = await P2P.create(transport=network.transport())
    scanner.add_addresses(server.peer_id, server.get_addresses(server.peer_id))
    [own] = scanner.get_addresses(scanner.peer_id)
    loop = asyncio.get_running_loop()
    try:
        began = loop.time()
        assert (await ask(scanner, server, own)).reached == {str(own): True}
        assert loop.time() - began < 0.5, "that its own port is open is no news to the caller"
        for wanted in ([port], [port, own], [port] * 3):
            began = loop.time()
            answer: CallBack = await ask(scanner, server, *wanted)
            assert answer.reached == {str(each): each == own for each in wanted}
            assert loop.time() - began == pytest.approx(CALL_BACK_SECONDS, abs=1e-9)
    finally:
        await scanner.shutdown()
        await server.shutdown()
