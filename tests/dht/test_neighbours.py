"""Nodes of one local network find each other without an address, over real multicast on this machine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import shoal
from shoal.access.tokens import Token
from shoal.dht import DHTNode, joining
from shoal.dht.protocol import DHTProtocol
from shoal.errors import BootstrapError, ValidationError
from shoal.net.pasted import short_form
from shoal.p2p import P2P, Identity, Multiaddr
from shoal.p2p import local_network as room
from shoal.p2p.local_network import LocalNetwork
from tests.p2p.peers import Peers, until

pytest.importorskip("zeroconf")
from zeroconf import NotRunningException, ServiceStateChange
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

_numbers = itertools.count()


def _has_multicast() -> bool:
    """Whether a datagram to a group comes back on loopback."""
    group, port = "224.0.0.251", 0
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth,
        ):
            ear.bind(("", port))
            membership = socket.inet_aton(group) + socket.inet_aton("127.0.0.1")
            ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            ear.settimeout(2)
            mouth.sendto(b"?", (group, ear.getsockname()[1]))
            return ear.recv(1) == b"?"
    except OSError:
        return False


pytestmark = [
    pytest.mark.oldest,
    pytest.mark.skipif(not _has_multicast(), reason="there is no multicast on loopback here"),
]


@pytest.fixture(autouse=True)
def own_service(monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of service that no other test looks for, in this process or another."""
    service = f"_s{os.getpid()}-{next(_numbers)}._tcp.local."
    monkeypatch.setattr(room, "SERVICE", service)
    return service


@pytest.fixture(autouse=True)
def never_alone_by_lateness(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may answer late. What a node does that waits in vain has tests of its own."""
    monkeypatch.setattr(joining, "FIRST_SECONDS", 30.0)


@asynccontextmanager
async def nodes() -> AsyncIterator[Callable[..., Any]]:
    started: list[DHTNode] = []

    async def start(initial_peers: object = "local", **options: Any) -> DHTNode:
        started.append(await DHTNode.create(initial_peers=initial_peers, **options))  # type: ignore[arg-type]
        return started[-1]

    try:
        yield start
    finally:
        await asyncio.gather(*(node.shutdown() for node in started))


def knows(node: DHTNode, other: DHTNode) -> bool:
    return other.node_id in node.protocol.routing_table


async def start_alone(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> DHTNode:
    """The first node, which does not wait for others."""
    with monkeypatch.context() as patch:
        patch.setattr(joining, "FIRST_SECONDS", 0.0)
        node: DHTNode = await start("local", **options)
    return node


async def test_later_nodes_join_one_that_started_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shoal.dht.joining")
    async with nodes() as start:
        first = await start_alone(start, monkeypatch)
        assert caplog.messages == [
            "no peer is in the local network yet: starting alone. When one appears, the two join"
        ]
        second, third = await start(), await start()
        for node in (second, third):
            await until(lambda node=node: knows(node, first) and knows(first, node))
        assert await second.store("key", "value", second.p2p.clock.time() + 60)
        assert (await third.get("key")).value == "value"


async def test_two_that_both_start_alone_join_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes() as start:
        alone = [start_alone(start, monkeypatch) for _ in range(2)]
        first, second = await asyncio.gather(*alone)
        await until(lambda: knows(first, second) and knows(second, first))


async def test_a_client_joins_and_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes() as start:
        first = await start_alone(start, monkeypatch)
        client = await start(client_mode=True)
        assert knows(client, first)
        seen = LocalNetwork(client.p2p, lambda peer: None)
        await seen.start()
        await until(lambda: first.peer_id in seen.present)
        assert list(seen.present) == [first.peer_id]
        await seen.close()


async def test_an_address_besides_need_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes() as start:
        first = await start_alone(start, monkeypatch)
        second = await start(["127.0.0.1:1", "local"])
        assert knows(second, first)
        with pytest.raises(BootstrapError):
            await start("127.0.0.1:1")
        [address] = await first.get_visible_maddrs()
        third = await start_alone(lambda given, **_: start([given, short_form(address)]), monkeypatch)
        assert knows(third, first), "it joins by the address, whether or not multicast works"


async def test_an_announcement_is_gone_with_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes() as start:
        first = await start_alone(start, monkeypatch)
        second = await start()
        await until(lambda: second.peer_id in _present(first))
        await second.shutdown()
        await until(lambda: second.peer_id not in _present(first))


def _present(node: DHTNode) -> dict[Any, Any]:
    assert node._neighbours is not None
    return node._neighbours.network.present


async def test_private_members_join_no_strangers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Token.new_run("mine")
    async with nodes() as start:
        stranger = await start_alone(start, monkeypatch, token="")
        member = await start_alone(start, monkeypatch, token=run.text)
        await until(lambda: stranger.peer_id in _present(member))
        wanted = f"announced in the local network: peer {stranger.peer_id} is no member of the run"
        await until(lambda: wanted in caplog.text)
        other = await start("local", token=run.text)
        assert knows(other, member)
        assert not knows(other, stranger)
        assert not knows(member, stranger)


@pytest.mark.parametrize(
    "properties",
    [{}, {b"id": b"nonsense"}, {b"id": b"\xff\xfe"}, {b"id": b"QmNoEd25519"}, {b"id": None}],
    ids=["no id", "no base58", "no text", "no key", "no value"],
)
async def test_announcements_of_other_things_are_ignored(own_service: str, properties: dict[Any, Any]) -> None:
    found: list[object] = []
    liar = AsyncZeroconf(interfaces=["127.0.0.1"])
    async with Peers("tcp") as peers:
        network = LocalNetwork(await peers.start(), found.append)
        await network.start()
        for number, told in enumerate([properties, {b"id": str(Identity.generate().peer_id).encode()}]):
            info = AsyncServiceInfo(
                own_service,
                f"{number}.{own_service}",
                port=9,
                properties=told,
                server=f"{number}.local.",
                parsed_addresses=["127.0.0.1"],
            )
            await (await liar.async_register_service(info, cooperating_responders=True))
        await until(lambda: bool(found))
        assert len(network.present) == 1
        await network.close()
    await liar.async_close()


async def test_names_of_other_services_are_ignored(own_service: str) -> None:
    """Whatever ends otherwise raises an error of zeroconf, which would reach nobody."""
    async with Peers("tcp") as peers:
        found: list[object] = []
        network = LocalNetwork(await peers.start(), found.append)
        await network.start()
        network._note(None, own_service, "x._other._tcp.local.", SimpleNamespace(name="Added"))
        await until(lambda: not network._asking)
        assert not found
        await network.close()


async def test_a_flood_of_announcements_fills_no_memory(own_service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_PRESENT", 2)
    liar = AsyncZeroconf(interfaces=["127.0.0.1"])
    async with Peers("tcp") as peers:
        found: list[object] = []
        network = LocalNetwork(await peers.start(), found.append)
        await network.start()
        for number in range(5):
            told = {b"id": str(Identity.generate().peer_id).encode()}
            name, server = f"{number}.{own_service}", f"{number}.local."
            info = AsyncServiceInfo(
                own_service, name, port=9, properties=told, server=server, parsed_addresses=["127.0.0.1"]
            )
            await (await liar.async_register_service(info, cooperating_responders=True))
            await until(lambda number=number: len(network.present) == min(number + 1, 2))
        assert len(found) == 2
        await network.close()
    await liar.async_close()


async def test_names_that_never_answer_wait_for_their_turn(own_service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_ASKED", 3)
    monkeypatch.setattr(room, "MAX_WAITING", 5)
    monkeypatch.setattr(room, "ASK_SECONDS", 0.1)
    async with Peers("tcp") as peers:
        network = LocalNetwork(await peers.start(), lambda peer: None)
        await network.start()
        for number in range(50):
            network._note(network._zeroconf.zeroconf, own_service, f"{number}.{own_service}", ServiceStateChange.Added)
            assert len(network._asking) <= 3
            assert len(network._waiting) <= 5
        await until(lambda: not network._asking and not network._waiting)
        await network.close()


async def test_zeroconf_failures_are_logged_and_retried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(room, "LOOK_AGAIN_SECONDS", 0.01)
    is_broken = False

    class Broken(AsyncZeroconf):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            if is_broken:
                raise NotRunningException("stopped")
            super().__init__(**options)

    monkeypatch.setattr("zeroconf.asyncio.AsyncZeroconf", Broken)
    async with Peers("tcp") as peers:
        moving = await peers.start()
        network = LocalNetwork(moving, lambda peer: None)
        await network.start()
        is_broken = True
        port = moving.transport.addresses()[0]["tcp"]
        monkeypatch.setattr(
            moving.transport, "addresses", lambda latest=False: [Multiaddr(f"/ip4/127.0.0.2/tcp/{port}")]
        )
        await until(lambda: bool(caplog.messages))
        assert "cannot look for peers in its local network now: NotRunningException: stopped" in caplog.messages[0]
        is_broken = False
        await until(lambda: network._zeroconf is not None)
        await network.close()


async def test_neighbour_with_another_clock_joins_with_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shoal.dht.joining")
    async with nodes() as start:
        await start_alone(start, monkeypatch)

        def object_to(*_: object) -> None:
            raise ValidationError("clock off by 99 s")

        monkeypatch.setattr(DHTProtocol, "_check_clock", object_to)
        await start()
    told = [record for record in caplog.records if "joined peer" in record.getMessage()]
    assert told
    assert all(record.levelname == "WARNING" and "but clock off by 99 s" in record.getMessage() for record in told)


async def test_a_machine_without_a_network_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(room, "LOOK_AGAIN_SECONDS", 0.01)
    async with nodes() as start:
        first = await start_alone(start, monkeypatch)
        is_offline = True

        class Offline(AsyncZeroconf):  # type: ignore[misc]
            def __init__(self, **options: Any) -> None:
                if is_offline:
                    raise OSError(101, "Network is unreachable")
                super().__init__(**options)

        monkeypatch.setattr("zeroconf.asyncio.AsyncZeroconf", Offline)
        second = await start_alone(start, monkeypatch)
        await until(lambda: bool(caplog.messages))
        assert "cannot look for peers in its local network now: [Errno 101]" in caplog.messages[0]
        assert not knows(second, first)
        is_offline = False
        await until(lambda: knows(second, first))


async def test_a_machine_that_moves_announces_its_new_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOOK_AGAIN_SECONDS", 0.01)
    async with Peers("tcp") as peers:
        moving, watching = await peers.start(), await peers.start()
        away = LocalNetwork(moving, lambda peer: None)
        network = LocalNetwork(watching, lambda peer: None)
        await away.start()
        await network.start()
        [address] = moving.transport.addresses()
        await until(lambda: network.present.get(moving.peer_id) == [address])
        other = Multiaddr(f"/ip4/127.0.0.2/tcp/{address['tcp']}")
        monkeypatch.setattr(moving.transport, "addresses", lambda latest=False: [other])
        await until(lambda: network.present.get(moving.peer_id) == [other])
        await away.close()
        await network.close()


async def test_peers_of_the_former_network_are_forgotten(own_service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would be called in vain for ever, and many of them would leave no room for others."""
    monkeypatch.setattr(room, "LOOK_AGAIN_SECONDS", 0.01)
    async with Peers("tcp") as peers:
        moving, staying = await peers.start(), await peers.start()
        network, left = LocalNetwork(moving, lambda peer: None), LocalNetwork(staying, lambda peer: None)
        await left.start()
        await network.start()
        await until(lambda: staying.peer_id in network.present)
        # In another network nobody announces this kind of service.
        monkeypatch.setattr(room, "SERVICE", own_service.replace("_s", "_o", 1))
        other = Multiaddr(f"/ip4/127.0.0.2/tcp/{moving.transport.addresses()[0]['tcp']}")
        monkeypatch.setattr(moving.transport, "addresses", lambda latest=False: [other])
        await until(lambda: not network.present)
        await network.close()
        await left.close()


def test_missing_package_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(ModuleNotFoundError, match=r"'local' needs zeroconf, .*: pip install 'shoal\[local\]'"):
        shoal.DHT("local", start=True)


async def test_a_peer_without_a_table_cannot_look_around() -> None:
    with pytest.raises(ValueError, match="which a DHT or a DHTNode understands"):
        await P2P.create(initial_peers="local")


def test_a_dht_that_looks_around(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(joining, "FIRST_SECONDS", 0.0)
        first = shoal.DHT("local", start=True)
    with first, shoal.DHT(initial_peers=["local"], start=True) as second:
        assert second.store("key", 1, shoal.get_dht_time() + 60)
        assert first.get("key", latest=True).value == 1
