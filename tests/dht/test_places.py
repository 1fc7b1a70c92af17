"""Nodes that join by addresses without a peer id, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.dht import DHTNode
from shoal.dht.joining import Reunion
from shoal.errors import BootstrapError
from shoal.p2p import Identity, Multiaddr
from shoal.testing import Host, Link, Network
from tests.dht.virtual_time import in_virtual_time

PORT = 31337
RETURN_SECONDS = 120.0
"""Enough for a node to find back: it looks every half minute at the latest."""


def a_network() -> Network:
    return Network(Link(delay=0.03), internet=True)


async def start(
    host: Host, initial_peers: object = None, *, identity: Identity | None = None, **options: Any
) -> DHTNode:
    create = DHTNode.create(
        initial_peers=initial_peers,
        transport=host.transport(identity),
        rng=host.rng,
        host_maddrs=f"0.0.0.0:{PORT}",
        nat_port_map=False,
        **options,
    )
    return await host.run(create)


def knows(node: DHTNode, other: DHTNode) -> bool:
    return other.node_id in node.protocol.routing_table


@in_virtual_time
async def test_newcomers_become_nodes_like_others() -> None:
    network = a_network()
    hosts = [network.add_host() for _ in range(4)]
    first = await start(hosts[0])
    address = f"{hosts[0].ip}:{PORT}"
    nodes = [first, *[await start(host, address) for host in hosts[1:]]]
    for node in nodes[1:]:
        assert knows(node, first)
        assert knows(first, node)
        assert node.p2p.clock.sources.keys() >= {first.peer_id}
    assert await nodes[1].store("key", "value", nodes[1].p2p.clock.time() + 60)
    found = await nodes[3].get("key")
    assert found is not None
    assert found.value == "value"


@in_virtual_time
async def test_one_initial_peer_suffices_others_follow() -> None:
    network = a_network()
    hosts = [network.add_host() for _ in range(3)]
    first = await start(hosts[0])
    both = f"{hosts[0].ip}:{PORT} {hosts[1].ip}:{PORT}"
    node = await start(hosts[2], both)
    assert knows(node, first)
    second = await start(hosts[1])
    await asyncio.sleep(RETURN_SECONDS)
    assert knows(node, second), "two swarms have become one"
    assert knows(second, node)


@in_virtual_time
async def test_nobody_answers() -> None:
    network = a_network()
    here, there = network.add_host(), network.add_host()
    address = f"{there.ip}:{PORT}"
    with pytest.raises(BootstrapError) as error:
        await start(here, address)
    assert list(error.value.verdicts) == [address]


@in_virtual_time
async def test_first_node_finds_peers_that_start_later() -> None:
    network = a_network()
    here, there = network.add_host(), network.add_host()
    node = await start(here, f"{there.ip}:{PORT}", ensure_bootstrap_success=False)
    await asyncio.sleep(1000)
    later = await start(there)
    await asyncio.sleep(RETURN_SECONDS)
    assert knows(node, later)
    assert knows(later, node)


@in_virtual_time
async def test_any_peer_at_the_address_will_do() -> None:
    network = a_network()
    here, there = network.add_host(), network.add_host()
    first = await start(there)
    node = await start(here, f"{there.ip}:{PORT}")
    assert knows(node, first)
    await there.run(first.shutdown())
    await asyncio.sleep(60)
    second = await start(there)
    assert second.peer_id != first.peer_id
    await asyncio.sleep(RETURN_SECONDS)
    assert knows(node, second)
    assert knows(second, node)


@in_virtual_time
async def test_silent_neighbour_is_tried_again() -> None:
    network = a_network()
    here, there = network.add_host(), network.add_host()
    node, identity = await start(here), Identity.generate(network.rng)
    announced = {identity.peer_id: [Multiaddr(f"/ip4/{there.ip}/tcp/{PORT}")]}
    reunion = Reunion(node.protocol, node._server_mode, [], announced)
    here.spawn(reunion.run())
    await asyncio.sleep(60)
    other = await start(there, identity=identity)
    assert not knows(node, other)
    await asyncio.sleep(RETURN_SECONDS)
    assert knows(node, other)
    assert knows(other, node)


@in_virtual_time
async def test_simulations_never_touch_the_real_network() -> None:
    pytest.importorskip("zeroconf")
    with pytest.raises(ValueError, match="this peer is not on one: give it addresses"):
        await start(a_network().add_host(), "local")


@in_virtual_time
async def test_two_nodes_may_start_in_any_order() -> None:
    """A list of addresses may be the same at all peers; one's own is in it."""
    network = a_network()
    hosts = [network.add_host() for _ in range(2)]
    both = [f"{host.ip}:{PORT}" for host in hosts]
    options = {"ensure_bootstrap_success": False}
    nodes = [await start(host, both, **options) for host in hosts]
    assert knows(nodes[0], nodes[1])
    assert knows(nodes[1], nodes[0])
