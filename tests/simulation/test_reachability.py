"""Peers whose ways to each other change: who is a node of the table, who reduces, what others are told."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.averaging.control import AveragingMode
from shoal.averaging.node import AveragerNode
from shoal.dht import DHTNode
from shoal.dht.joining import STEP_DOWN_SECONDS
from shoal.reach.reachability import Reach, Reachability
from shoal.reach.relay.client import RelayClient
from shoal.testing import Nat, make_averager, run, start_step
from tests.drills import mostly_drills
from tests.simulation.routers import Internet

SIZE = 64
EXPIRES_IN = 1200.0


async def averager(internet: Internet, node: DHTNode, value: float) -> AveragerNode:
    made = make_averager(node.p2p, [torch.full((SIZE,), value)], node, min_matchmaking_time=3.0)
    await internet.host_of(node).run(made.start())
    return made


async def average(internet: Internet, averagers: list[AveragerNode]) -> list[int]:
    """One round; returns how many members each of them had."""
    steps = [start_step(internet.network, each, expected_group_size=len(averagers), timeout=30.0) for each in averagers]
    results = [await asyncio.wrap_future(step) for step in steps]
    return [len(result) for result in results]


def port_of(node: DHTNode) -> int:
    return int(node.p2p.transport.addresses()[0]["tcp"] or 0)


@pytest.mark.parametrize("mapping", mostly_drills(["hard", "easy"]))
def test_a_network_whose_only_public_peer_dies_trains_on(mapping: str) -> None:
    async def main() -> None:
        internet = Internet()
        home = Nat(mapping=mapping)
        public = await internet.start()
        nodes = [await internet.start(home) for _ in range(3)]
        assert [node.p2p.reachability for node in nodes] == [Reachability.RELAYED] * 3
        await asyncio.sleep(30)
        averagers = [await averager(internet, node, float(number)) for number, node in enumerate(nodes)]
        for number in range(20):
            if number == 3:
                internet.host_of(public).crash()
            assert await average(internet, averagers) == [3, 3, 3], f"round {number}"
            assert {each.lanes[""].matchmaking.settings.mode for each in averagers} == {AveragingMode.NODE}
            await asyncio.sleep(10)
        assert [node.p2p.reachability for node in nodes] == [Reachability.PUBLIC] * 3, "to each other"
        assert all(node.protocol.is_node for node in nodes)

    run(main())


@pytest.mark.parametrize("silent", mostly_drills([True, False]))
def test_when_the_only_public_peer_goes_another_one_takes_its_place(silent: bool) -> None:
    async def main() -> None:
        internet = Internet()
        public = await internet.start()
        nodes = [await internet.start(Nat()) for _ in range(3)]
        first, *others = nodes
        await asyncio.sleep(30)
        averagers = [await averager(internet, node, float(number)) for number, node in enumerate(nodes)]
        assert await average(internet, averagers) == [3, 3, 3]
        host = internet.host_of(public)
        host.power_off() if silent else host.crash()
        for number in range(6):  # over the connections that there are
            assert await average(internet, averagers) == [3, 3, 3], f"round {number} without a public peer"
            await asyncio.sleep(20)
        router, loop = internet.host_of(first).nat, asyncio.get_running_loop()
        assert router is not None
        router.forward(port_of(first), internet.host_of(first))
        began = loop.time()
        while not all(set(node.p2p.reservations.held) == {first.peer_id} for node in others):
            assert loop.time() - began <= 35.0
            assert await average(internet, averagers) == [3, 3, 3]
            await asyncio.sleep(1)
        assert first.p2p.reachability is Reachability.PUBLIC
        assert await average(internet, averagers) == [3, 3, 3]

    run(main())


def test_who_cannot_be_called_takes_part_as_a_client_for_the_time_being() -> None:
    async def main() -> None:
        internet = Internet()
        public = await internet.start()
        public.p2p.relay.wanted = False
        private = await internet.start(Nat())
        assert private.p2p.reachability is Reachability.CLIENT
        assert not private.protocol.is_node
        averagers = [await averager(internet, node, 1.0) for node in (public, private)]
        assert await average(internet, averagers) == [2, 2]
        public.p2p.relay.wanted = True
        await asyncio.sleep(60)
        assert private.p2p.reachability is Reachability.RELAYED
        assert private.protocol.is_node
        assert private.node_id in public.protocol.routing_table
        assert await average(internet, averagers) == [2, 2]

    run(main())


def test_relays_are_found_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RelayClient, "note_greeting", lambda *told: None)  # as if that was long ago, and forgotten

    async def main() -> None:
        internet = Internet()
        public = [await internet.start() for _ in range(4)]
        private = await internet.start(Nat())
        held = private.p2p.reservations.held
        await asyncio.sleep(60)
        assert len(held) == 2
        left = {node.peer_id for node in public} - {*held}
        for relay in list(held):
            internet.network.host_of(relay).crash()
        await asyncio.sleep(15)
        assert {*held} == left
        assert private.p2p.reachability is Reachability.RELAYED

    run(main())


def test_relayed_peers_step_down_when_there_are_enough_public_ones() -> None:
    async def main() -> None:
        internet = Internet()
        await internet.start()
        private = await internet.start(Nat())
        host = internet.host_of(private)
        assert private.protocol.is_node
        for number in range(20):
            assert await host.run(private.store(f"key {number}", number, host.dht_time() + EXPIRES_IN + 100 * number))
        assert len(private.protocol.storage) == 20
        for _ in range(5):
            await internet.start()
        await asyncio.sleep(30)
        reaches = [private.p2p.book.find(node.peer_id).reach for node in internet.nodes[2:]]
        assert reaches == [Reach.PUBLIC] * 5
        await asyncio.sleep(STEP_DOWN_SECONDS - 60)
        assert private.protocol.is_node
        await asyncio.sleep(90)
        assert not private.protocol.is_node
        assert private.p2p.is_callable
        assert len(private.protocol.storage) == 0
        assert all(private.node_id not in node.protocol.routing_table for node in internet.nodes if node is not private)
        for node in internet.nodes:
            for number in range(20):
                found = await internet.host_of(node).run(node.get(f"key {number}", latest=True))
                assert found is not None
                assert found.value == number
        for node in internet.nodes[2:4]:
            internet.host_of(node).crash()
        for number in range(20):
            await host.run(private.get(f"key {number}", latest=True))
        await asyncio.sleep(10)
        assert private.protocol.is_node, "it is needed again"

    run(main())


def test_private_addresses_are_told_in_their_network_alone() -> None:
    async def main() -> None:
        internet = Internet()
        first = await internet.start()
        home = Nat()
        private, neighbor = [await internet.start(home) for _ in range(2)]
        stranger = await internet.start(Nat())
        await asyncio.sleep(60)
        for node, expected in ((neighbor, True), (stranger, False)):
            answer = await internet.host_of(node).run(node.protocol.call_find(first.peer_id, [private.node_id]))
            contacts = {key: bytes(contact) for key, contact in answer.contacts.items()}
            told = contacts[int(private.node_id)]
            assert (str(private.p2p.transport.addresses()[0]).encode() in told) is expected
            assert b"p2p-circuit" in told

    run(main())


@pytest.mark.parametrize("mapping", ["easy", "hard"])
def test_what_the_router_does_to_ports_is_observed(mapping: str) -> None:
    async def main() -> None:
        internet = Internet()
        for _ in range(3):
            await internet.start()
        node = await internet.start(Nat(mapping=mapping))
        await asyncio.sleep(60)
        assert node.p2p.metrics.nat == mapping
        assert node.p2p.outlook.reach is (Reach.HARD if mapping == "hard" else Reach.EASY)
        assert internet.nodes[0].p2p.book.find(node.peer_id).reach == node.p2p.outlook.reach

    run(main())


def test_a_new_address_of_the_router_is_noticed_at_once() -> None:
    async def main() -> None:
        internet = Internet()
        await internet.start()
        await internet.start()
        home = Nat()
        node = await internet.start(home)
        home.forward(port_of(node), internet.host_of(node))
        await asyncio.sleep(1200)
        assert node.p2p.reachability is Reachability.PUBLIC
        home.rebind(new_address=True)
        await asyncio.sleep(120)
        assert str(node.p2p.outlook.announced()[0]).startswith(f"/ip4/{home.ip}/tcp/")
        assert node.p2p.reachability is Reachability.PUBLIC

    run(main())
