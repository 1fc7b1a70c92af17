"""Where this machine listens, what it tells others about that, and that this stays true when it moves."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import ifaddr
import pytest

from shoal.dht import DHTNode
from shoal.net import own_addresses
from shoal.net.own_addresses import LOOPBACK, PLUGGED, ROUTED, SPARE, UNCONFIGURED, VIRTUAL, OwnAddress, OwnAddresses
from shoal.net.tcp.transport import TcpTransport
from shoal.p2p import P2P, Identity, Multiaddr
from tests.p2p.peers import Number, Peers, serving, stub, until

pytestmark = pytest.mark.oldest

HERE = OwnAddress("127.0.0.1", LOOPBACK)


def adapter(name: str, *ips: str, nice_name: str = "") -> SimpleNamespace:
    found = [
        SimpleNamespace(
            ip=(ip, 0, 0) if ":" in ip else ip,
            is_IPv4=":" not in ip,
            is_IPv6=":" in ip,
            network_prefix=64 if ":" in ip else 24,
        )
        for ip in ips
    ]
    return SimpleNamespace(name=name, nice_name=nice_name or name, ips=found)


def test_interfaces_in_the_order_in_which_others_should_try_them(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = [
        adapter("lo", "127.0.0.1", "::1"),
        adapter("docker0", "172.17.0.1"),
        adapter("tailscale0", "100.101.102.103"),
        adapter("{GUID}", "172.28.0.1", nice_name="Hyper-V Virtual Ethernet Adapter"),
        adapter("eth1", "10.0.0.5"),
        adapter("eth2", "169.254.7.7"),
        adapter("wlan0", "192.168.1.7", "fd00::7", "2001:db9::1", "2a00:1450::7", "fe80::7"),
    ]
    routed = {"ip4": "192.168.1.7", "ip6": "2a00:1450::7"}
    monkeypatch.setattr(ifaddr, "get_adapters", lambda: adapters)
    monkeypatch.setattr(
        own_addresses,
        "source_of_default_route",
        lambda family: routed["ip4" if family == own_addresses.socket.AF_INET else "ip6"],
    )
    found = own_addresses.look_at_interfaces()
    assert [(each.ip, each.rank) for each in found if each.rank != SPARE] == [
        ("192.168.1.7", ROUTED),
        ("2a00:1450::7", ROUTED),
        ("10.0.0.5", PLUGGED),
        ("172.17.0.1", VIRTUAL),
        ("100.101.102.103", VIRTUAL),
        ("172.28.0.1", VIRTUAL),
        ("169.254.7.7", UNCONFIGURED),
        ("127.0.0.1", LOOPBACK),
        ("::1", LOOPBACK),
    ]
    assert {each.ip for each in found if each.rank == SPARE} == {"fd00::7", "2001:db9::1", "fe80::7"}


def test_this_machine() -> None:
    found = own_addresses.look_at_interfaces()
    assert "127.0.0.1" in [each.ip for each in found]
    assert found == sorted(found, key=lambda each: each.rank)


def test_where_to_listen_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = TcpTransport(Identity.generate())
    monkeypatch.setenv("SHOAL_HOST_MADDRS", "/ip4/127.0.0.1/tcp/7, /ip6/::1/tcp/7")
    assert transport.listens_by_default() == ["/ip4/127.0.0.1/tcp/7", "/ip6/::1/tcp/7"]
    monkeypatch.delenv("SHOAL_HOST_MADDRS")
    assert transport.listens_by_default()[0] == "/ip4/0.0.0.0/tcp/0"
    monkeypatch.setattr(own_addresses.socket, "has_ipv6", False)
    assert transport.listens_by_default() == ["/ip4/0.0.0.0/tcp/0"]


class Machine:
    """A machine that can be moved from one network to another."""

    def __init__(self, *addresses: OwnAddress) -> None:
        self.addresses = [*addresses, HERE]
        self.looks = 0
        self.own = OwnAddresses(self._look)

    def _look(self) -> list[OwnAddress]:
        self.looks += 1
        return list(self.addresses)


def test_machine_is_not_looked_at_more_often_than_needed() -> None:
    machine = Machine(OwnAddress("192.168.1.7", ROUTED))
    own = machine.own
    assert not own.look_if_due(0.0), "nobody has been told anything yet"
    machine.addresses[0] = OwnAddress("10.0.0.7", ROUTED)
    assert not own.look_if_due(14.0)
    assert not own.look_if_unknown("192.168.1.7", 29.0)
    assert not own.look_if_unknown("127.0.0.9", 29.0)
    assert machine.looks == 1
    assert own.look_if_unknown("10.0.0.7", 29.0), "a connection comes from an address that was not there"
    assert own.lost == {"192.168.1.7"}
    machine.addresses[0] = OwnAddress("192.168.1.7", ROUTED)
    assert own.look_if_due(60.0)
    assert own.lost == {"10.0.0.7"}
    assert [each.ip for each in own.told()] == ["192.168.1.7", "127.0.0.1"]


def test_who_is_offline_has_not_moved() -> None:
    machine = Machine(OwnAddress("192.168.1.7", ROUTED))
    machine.own.look(0.0)
    for left in ([HERE], [OwnAddress("172.17.0.1", VIRTUAL), OwnAddress("169.254.1.1", UNCONFIGURED), HERE]):
        machine.addresses = left
        assert not machine.own.look(1.0)
        assert "192.168.1.7" in machine.own


def test_temporary_addresses_that_nobody_was_told_are_no_news() -> None:
    machine = Machine(OwnAddress("192.168.1.7", ROUTED), OwnAddress("2001:db9::1", SPARE))
    machine.own.look(0.0)
    machine.addresses[1] = OwnAddress("2001:db9::2", SPARE)
    assert not machine.own.look(1.0)
    assert "2001:db9::2" in machine.own


# --- peers ------------------------------------------------------------------------------------------------------------


def on(machine: Machine, **options: Any) -> dict[str, Any]:
    """What a peer needs to be on this machine. It really listens everywhere on the one that runs the test."""
    return {
        "transport": TcpTransport(Identity.generate(), machine=machine.own),
        "host_maddrs": ["/ip4/0.0.0.0/tcp/0"],
        **options,
    }


async def test_what_is_told_is_where_it_can_be_reached_now() -> None:
    machine = Machine(OwnAddress("127.0.0.3", PLUGGED), OwnAddress("127.0.0.2", ROUTED))
    machine.addresses.sort(key=lambda each: each.rank)
    async with Peers("tcp") as peers:
        server = await peers.start(**on(machine))
        caller = await peers.start()
        await serving(server)
        addresses = server.get_addresses(server.peer_id)
        assert [each["ip4"] for each in addresses] == ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
        assert (await server.get_visible_maddrs())[0] == addresses[0].encapsulate(f"/p2p/{server.peer_id}")

        machine.addresses[0] = OwnAddress("127.0.0.4", ROUTED)
        assert server.get_addresses(server.peer_id) == addresses, "not yet"
        latest = await server.get_visible_maddrs(latest=True)
        assert [each["ip4"] for each in latest] == ["127.0.0.4", "127.0.0.3", "127.0.0.1"]
        caller.add_addresses(server.peer_id, addresses)
        await stub(caller, server).rpc_square(Number(value=2))
        assert caller.get_addresses(server.peer_id)[0]["ip4"] == "127.0.0.4", "greetings tell the same"


async def test_a_peer_that_has_moved_ends_dead_connections_and_greets_anew() -> None:
    machine = Machine(OwnAddress("127.0.0.1", ROUTED))
    async with Peers("tcp") as peers:
        friend = await peers.start()
        await serving(friend)
        mover = await peers.start(**on(machine))
        await stub(mover, friend).rpc_square(Number(value=2))
        assert friend.get_addresses(mover.peer_id)[0]["ip4"] == "127.0.0.1"
        hanging = asyncio.ensure_future(stub(mover, friend).rpc_hang(Number(value=0)))
        await until(lambda: mover.pool.in_use_count == 1)

        machine.addresses = [OwnAddress("127.0.0.8", ROUTED)]
        await mover.get_visible_maddrs(latest=True)
        with pytest.raises(Exception, match="this side closed the connection"):
            await hanging
        assert mover.pool.idle_count == 0
        await stub(mover, friend).rpc_square(Number(value=2))
        assert [each["ip4"] for each in friend.get_addresses(mover.peer_id)] == ["127.0.0.8"]


def transport_on(*ips: str) -> TcpTransport:
    return TcpTransport(Identity.generate(), machine=OwnAddresses(lambda: [OwnAddress(ip, ROUTED) for ip in ips]))


async def test_loopback_is_dialled_on_the_same_machine_alone() -> None:
    loopback, home, other = (Multiaddr(f"/ip4/{ip}/tcp/5") for ip in ("127.0.0.1", "192.168.1.7", "10.0.0.7"))
    name = Multiaddr("/dns4/example.org/tcp/5")
    here = transport_on("192.168.1.7")
    assert here.worth_dialling([home, loopback]) == [loopback, home]
    assert here.worth_dialling([other, name, loopback]) == [name]
    assert here.worth_dialling([loopback]) == [loopback], "there is nothing else"
    assert here.worth_dialling([Multiaddr("/ip4/10.0.0.7/udp/5"), other]) == [other]
    assert transport_on().worth_dialling([home, loopback]) == [home]


async def test_private_addresses_are_dialled_in_their_network_alone() -> None:
    mine = OwnAddresses(lambda: [OwnAddress("192.168.1.7", ROUTED, 24), OwnAddress("2a00:1450::7", PLUGGED, 64)])
    here = TcpTransport(Identity.generate(), machine=mine)
    near, elsewhere, world, ipv6, neighbor = (
        Multiaddr(f"/{address}/tcp/5")
        for address in ("ip4/192.168.1.9", "ip4/10.0.0.7", "ip4/8.8.8.8", "ip6/2606:4700::1", "ip6/2a00:1450::9")
    )
    assert here.worth_dialling([world, elsewhere, near]) == [near, world]
    assert here.worth_dialling([elsewhere, Multiaddr("/ip4/10.0.0.8/tcp/5")])[0] == elsewhere, "there is nothing else"
    assert here.worth_dialling([ipv6, world]) == [world], "this machine has no way there"
    assert here.worth_dialling([ipv6]) == [ipv6]
    assert [here.is_inside(address) for address in (near, elsewhere, world, neighbor)] == [True, False, False, True]
    assert here.is_inside(Multiaddr("/ip4/127.0.0.9/tcp/5"))


async def test_free_ports_of_one_peer_are_the_same_if_possible() -> None:
    async with Peers("tcp") as peers:
        peer = await peers.start(host_maddrs=["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.2/tcp/0"])
        assert len({address["tcp"] for address in peer.get_addresses(peer.peer_id)}) == 1


async def test_a_node_says_where_it_listens(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("SHOAL_HOST_MADDRS")
    with caplog.at_level(logging.INFO, "shoal"):
        node = await DHTNode.create()
        addresses = [str(address) for address in node.p2p.get_addresses(node.peer_id)]
        await node.shutdown()
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert line.startswith(f"listening at {', '.join(addresses)}: anyone who reaches them may join; host_maddrs or ")
    assert addresses[-1].startswith("/ip4/127.0.0.1/tcp/")


async def test_a_client_does_not_listen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("SHOAL_HOST_MADDRS")
    with caplog.at_level(logging.INFO, "shoal"):
        node = await DHTNode.create(client_mode=True)
        assert await node.get_visible_maddrs() == []
        await node.shutdown()
    assert not caplog.records


async def test_default_is_every_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_HOST_MADDRS")
    p2p = await P2P.create()
    try:
        bound = {listener.address[0] for listener in p2p.transport.listeners}
        assert "0.0.0.0" in bound
        assert bound <= {"0.0.0.0", "::"}
        assert len({listener.address[1] for listener in p2p.transport.listeners}) == 1
    finally:
        await p2p.shutdown()
