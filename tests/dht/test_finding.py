"""Calling a peer of which only the id is known."""

from __future__ import annotations

import asyncio

import pytest

from shoal.dht import DHTID, DHTNode
from shoal.dht.traverse import SECONDS_BETWEEN_SEARCHES
from shoal.errors import DialError, P2PDaemonError
from shoal.p2p import P2P, Identity, PeerID
from tests.dht.swarm import Swarm
from tests.dht.virtual_time import in_virtual_time
from tests.p2p.peers import Number, serving


def calls_made(swarm: Swarm) -> int:
    return sum(node.p2p.metrics.calls_made for node in swarm.nodes)


async def ask(caller: P2P, peer: PeerID) -> Number:
    return await caller.call(peer, "Service.rpc_square", Number(value=7), Number, timeout=10)


@in_virtual_time
async def test_peer_is_called_by_its_id_alone():
    swarm = Swarm(seed=3)
    await swarm.grow(80)
    client = await swarm.node(client_mode=True)
    for node in swarm.nodes[:-1]:
        await serving(node.p2p)
        assert node.node_id == DHTID.of_peer(node.peer_id)
    strangers = 0
    for caller in (client, swarm.nodes[0], swarm.nodes[40]):
        for callee in swarm.nodes[:-1]:
            if not caller.p2p.is_reachable(callee.peer_id) and callee is not caller:
                strangers += 1
                assert (await ask(caller.p2p, callee.peer_id)).value == 49
    assert strangers > 5


@in_virtual_time
async def test_concurrent_calls_share_one_search_for_a_peer():
    swarm = Swarm(seed=4)
    await swarm.grow(30)
    caller = swarm.nodes[3].p2p
    stranger = Identity.generate(swarm.rng).peer_id
    before = calls_made(swarm)
    outcomes = await asyncio.gather(*[ask(caller, stranger) for _ in range(20)], return_exceptions=True)
    assert all(isinstance(error, DialError) for error in outcomes)
    assert "no address of peer" in str(outcomes[0])
    cost = calls_made(swarm) - before
    assert 0 < cost < 20, "one walk"
    with pytest.raises(DialError):
        await ask(caller, stranger)
    assert calls_made(swarm) == before + cost
    await asyncio.sleep(SECONDS_BETWEEN_SEARCHES)
    late = await swarm.node()
    await serving(late.p2p)
    assert (await ask(caller, late.peer_id)).value == 49


@in_virtual_time
async def test_search_for_a_peer_takes_one_timeout():
    """All who could know it fall silent."""
    swarm = Swarm(seed=5)
    await swarm.grow(40)
    stranger = Identity.generate(swarm.rng).peer_id
    caller, *others = swarm.nodes
    for node in sorted(others, key=lambda node: DHTID.of_peer(stranger).xor_distance(node.node_id))[:20]:
        swarm.fall_silent(node)
    now = asyncio.get_running_loop().time
    began = now()
    with pytest.raises(DialError):
        await ask(caller.p2p, stranger)
    assert 0 < now() - began <= caller.protocol.wait_timeout + 0.1


@in_virtual_time
async def test_dht_calls_never_search_for_addresses():
    """Or a stranger that tells no address could make a node walk through the table for each ping."""
    swarm = Swarm(seed=6)
    await swarm.grow(20)
    asked = swarm.nodes[0]
    before = calls_made(swarm)
    assert await asked.protocol.call_ping(Identity.generate(swarm.rng).peer_id) is None
    assert calls_made(swarm) == before


@in_virtual_time
async def test_failed_second_node_takes_nothing_away():
    swarm = Swarm(seed=8)
    node = await swarm.node()
    with pytest.raises(P2PDaemonError, match="registered already"):
        await DHTNode.create(p2p=node.p2p)
    assert node.p2p.directory is node


@in_virtual_time
async def test_no_searches_after_the_node_shut_down():
    swarm = Swarm(seed=7)
    await swarm.grow(5)
    node = swarm.nodes[4]
    p2p = node.p2p
    await node.shutdown()
    with pytest.raises(DialError, match="no address of peer"):
        await ask(p2p, Identity.generate(swarm.rng).peer_id)


@in_virtual_time
async def test_last_of_sixty_nodes_calls_others_by_id():
    swarm = Swarm(seed=6)
    await swarm.grow(60)
    *others, last = swarm.nodes
    for node in others:
        await serving(node.p2p)
    assert sum(not last.p2p.is_reachable(node.peer_id) for node in others) > 5
    assert [(await ask(last.p2p, node.peer_id)).value for node in others] == [49] * 59
