"""After an outage everybody finds back; ``benchmarks/outages.py`` tries more kinds of them, and more seeds."""

from __future__ import annotations

import asyncio
import logging

import pytest

from benchmarks.outages import WIDE_AREA, Swarm, let_a_crowd_return, simulate
from shoal.dht import DHTNode
from shoal.testing import Network, run, start_dht_nodes
from tests.drills import mostly_drills
from tests.simulation.training import LINK, Course
from tests.simulation.training import Swarm as Training

BAR_SECONDS = 60.0


@pytest.mark.parametrize("seconds", mostly_drills([60.0, 10.0, 600.0]))
@pytest.mark.parametrize("who", ["one", "half", "all"])
def test_the_swarm_is_one_again_soon(who, seconds):
    assert simulate(who, seconds, nodes=4, seed=0).seconds <= BAR_SECONDS


@pytest.mark.parametrize("who", mostly_drills(["half", "one"]))
def test_idle_nodes_find_back_too(who):
    assert simulate(who, 7200.0, nodes=4, seed=1, busy=False).seconds <= BAR_SECONDS


def test_two_halves_that_have_forgotten_each_other_meet_through_initial_peers():
    """In a large swarm, living nodes take the places of suspects: only where a node has joined is never forgotten."""

    async def main() -> None:
        network = Network(WIDE_AREA)
        swarm = Swarm(network, await start_dht_nodes(network, 24, bucket_size=4), busy=False)
        away = swarm.hosts[:12]
        network.partition(away, swarm.hosts[12:])
        for node in swarm.nodes:
            forget_all(node, [other for other in swarm.nodes if is_apart(swarm, node, other, 12)])
        await asyncio.sleep(600)
        network.heal()
        await asyncio.sleep(BAR_SECONDS)
        for here, there in ((0, 23), (23, 0), (5, 17)):
            assert await swarm.hosts[here].run(swarm.nodes[here].store(f"{here}", here, 1.8e9))
            found = await swarm.hosts[there].run(swarm.nodes[there].get(f"{here}", latest=True))
            assert found is not None
            assert found.value == here

    run(main())


def is_apart(swarm: Swarm, one: DHTNode, other: DHTNode, border: int) -> bool:
    return (swarm.nodes.index(one) < border) != (swarm.nodes.index(other) < border)


def forget_all(node: DHTNode, others: list[DHTNode]) -> None:
    for other in others:
        if other.peer_id in node.protocol.routing_table.peer_id_to_node:
            del node.protocol.routing_table[other.node_id]


def test_who_loses_the_swarm_says_so_once_and_once_when_it_is_found(caplog):
    caplog.set_level(logging.INFO, logger="shoal.dht.joining")
    assert simulate("one", 600.0, nodes=4, seed=1).seconds <= BAR_SECONDS
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    lost, found = (record.getMessage() for record in caplog.records)
    assert "this machine is offline, or all others have left" in lost
    assert "3 known peers" in lost
    assert "found the swarm again, 6" in found


def test_an_idle_node_notices_that_it_has_lost_the_swarm(caplog):
    simulate("one", 60.0, nodes=4, seed=1, busy=False)
    assert [record.getMessage()[:18] for record in caplog.records] == ["no peer has answer"]


@pytest.mark.slow_drill
def test_a_crowd_that_returns_at_one_moment_does_not_fall_upon_its_first_peers():
    result = let_a_crowd_return(100)
    assert len(result.found_after) == 100
    assert result.seconds <= BAR_SECONDS
    assert result.most_at_a_seed <= 20


def test_a_lone_node_that_could_not_call_back_a_newcomer_has_lost_nothing(caplog):
    async def main() -> None:
        network = Network(WIDE_AREA)
        (node,) = await start_dht_nodes(network, 1)
        stranger = network.add_host()
        stranger.firewalled = True
        create = DHTNode.create(
            initial_peers=await node.get_visible_maddrs(),
            transport=stranger.transport(),
            rng=stranger.rng,
            strict=False,
        )
        await stranger.run((await stranger.run(create)).shutdown())
        await asyncio.sleep(100)

    run(main())
    assert not caplog.records, "the stranger is called through a relay, and nobody has to know more"


def test_a_node_that_starts_before_its_initial_peers_finds_them_when_they_are_there():
    async def main() -> None:
        network = Network(WIDE_AREA)
        (first,) = await start_dht_nodes(network, 1)
        early = network.add_host()
        network.partition([early], [network.host_of(first.peer_id)])
        create = DHTNode.create(
            initial_peers=await first.get_visible_maddrs(),
            transport=early.transport(),
            rng=early.rng,
            ensure_bootstrap_success=False,
        )
        node = await early.run(create)
        assert len(node.protocol.routing_table) == 0
        await asyncio.sleep(100)
        network.heal()
        await asyncio.sleep(BAR_SECONDS)
        assert first.node_id in node.protocol.routing_table
        assert node.node_id in first.protocol.routing_table

    run(main())


def test_a_peer_that_all_others_have_left_with_a_goodbye_is_not_warned(caplog):
    caplog.set_level(logging.INFO, logger="shoal.dht.joining")

    async def main() -> None:
        swarm = Training(Network(LINK), Course(target_batch_size=1000))
        first = await swarm.add()
        second = await swarm.add()
        await asyncio.sleep(60)
        await swarm.dismiss(first)
        await asyncio.sleep(120)
        told = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert told == [("INFO", "all others have left: this peer continues alone. It keeps calling them")]
        third = await swarm.add()
        await asyncio.sleep(60)
        caplog.clear()
        swarm.remove(third, silently=True)
        await asyncio.sleep(120)
        assert any("this machine is offline, or all others have left" in line for line in caplog.messages)
        await swarm.dismiss(second)

    run(main(), seed=3)
