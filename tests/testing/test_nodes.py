"""Starting many nodes on a simulated network, and swarms in memory."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.averaging.control import AveragingMode, AveragingStage
from shoal.base.clock import get_dht_time
from shoal.dht import DHTNode
from shoal.errors import SimulationError
from shoal.testing import (
    AveragerSwarm,
    DHTSwarm,
    Link,
    Network,
    SharedTable,
    make_step,
    run,
    start_averager,
    start_averagers,
    start_dht_node,
    start_dht_nodes,
    start_peers,
    start_step,
)
from tests.testing.pipes import now


def test_each_peer_has_its_own_host():
    async def main():
        network = Network()
        peers = await start_peers(network, 5, idle_timeout=7)
        assert [network.host_of(peer.peer_id) for peer in peers] == network.hosts
        with pytest.raises(KeyError):
            network.host_of("12D3KooW")
        return [peer.peer_id for peer in peers]

    first = run(main(), seed=1)
    assert len(set(first)) == 5
    assert run(main(), seed=1) == first
    assert not set(run(main(), seed=2)) & set(first)


def test_nodes_form_one_table():
    async def main():
        network = Network(Link(delay=(0.01, 0.05)))
        nodes = await start_dht_nodes(network, 12)
        late = await start_dht_nodes(network, 3, swarm=nodes, at_once=1)
        client = (await start_dht_nodes(network, 1, swarm=nodes, client_mode=True))[0]
        assert len(network.hosts) == 16
        assert await late[0].store("key", "value", get_dht_time() + 60)
        for node in (nodes[0], late[2], client):
            assert (await network.host_of(node.peer_id).run(node.get("key"))).value == "value"
        assert client.protocol.client_mode
        for node in (*nodes, *late, client):
            await node.shutdown()

    run(main())


def test_nodes_join_although_dials_fail():
    async def main():
        network = Network(Link(delay=0.01, dial_failure=0.3))
        assert len(await start_dht_nodes(network, 10)) == 10

    run(main())


def test_newcomers_are_not_told_of_the_dead():
    async def main():
        network = Network()
        nodes = await start_dht_nodes(network, 4)
        for node in nodes[:3]:
            network.host_of(node.peer_id).crash()
        await start_dht_nodes(network, 3, swarm=nodes)

    run(main())


def test_a_clock_that_is_off_is_corrected():
    async def main():
        network = Network()
        nodes = await start_dht_nodes(network, 2)
        host = network.add_host()
        host.clock_offset = 600.0
        addresses = await nodes[0].p2p.get_visible_maddrs()
        node = await host.run(DHTNode.create(initial_peers=addresses, transport=host.transport(), rng=host.rng))
        assert abs(host.dht_time() - get_dht_time()) < 0.01
        assert node.p2p.metrics.clock_offset == pytest.approx(600, abs=0.01)

    run(main())


def test_shared_table():
    async def main():
        table = SharedTable(0.5)
        assert await table.get("key") is None
        assert await table.store("key", 1, get_dht_time() + 10, subkey="a")
        assert now() == 2  # half a second each way
        assert not await table.store("key", 2, get_dht_time() + 1, subkey="a")
        assert await table.store("key", 3, get_dht_time() + 100, subkey="b")
        found = await table.get("key", latest=True)
        assert {subkey: entry.value for subkey, entry in found.value.items()} == {"a": 1, "b": 3}
        assert found.expiration_time == found.value["b"].expiration_time
        await asyncio.sleep(20)
        assert list((await table.get("key")).value) == ["b"]

    run(main())


def test_averagers_average():
    async def main():
        network = Network(Link(delay=0.05))
        tensors = [torch.full((100,), float(number)) for number in range(4)]
        averagers = await start_averagers(network, [[tensor] for tensor in tensors], min_matchmaking_time=2.0)
        steps = [start_step(network, each, gather=i, expected_group_size=4) for i, each in enumerate(averagers)]
        gathered = await asyncio.gather(*map(asyncio.wrap_future, steps))
        assert all(each == {a.p2p.peer_id: i for i, a in enumerate(averagers)} for each in gathered)
        assert all(torch.equal(tensor, torch.full((100,), 1.5)) for tensor in tensors)
        assert now() < 2

    run(main())


def test_averagers_on_a_distributed_table():
    async def main():
        network = Network(Link(delay=(0.01, 0.1)))
        nodes = await start_dht_nodes(network, 6)
        tensors = [torch.full((50,), float(number)) for number in range(6)]
        averagers = [
            await start_averager(network.host_of(node.peer_id), [tensor], node, min_matchmaking_time=3.0)
            for node, tensor in zip(nodes, tensors, strict=True)
        ]
        assert averagers[0].p2p is nodes[0].p2p
        steps = [start_step(network, averager) for averager in averagers]
        await asyncio.gather(*map(asyncio.wrap_future, steps))
        assert all(torch.allclose(tensor, torch.full((50,), 2.5)) for tensor in tensors)

    run(main())


def test_clients_and_auxiliaries():
    async def main():
        network, table = Network(Link(delay=0.02)), SharedTable()
        tensors = [torch.tensor([float(number)]) for number in range(3)]
        modes = (AveragingMode.NODE, AveragingMode.CLIENT, AveragingMode.AUX)
        averagers = [
            await start_averager(network.add_host(), [tensor], table, mode=mode, min_matchmaking_time=1.0)
            for tensor, mode in zip(tensors, modes, strict=True)
        ]
        assert averagers[1].p2p.client_mode
        steps = [start_step(network, averager) for averager in averagers]
        assert [step.weight for step in steps] == [1, 1, 0]
        await asyncio.gather(*map(asyncio.wrap_future, steps))
        assert [tensor.item() for tensor in tensors] == [0.5, 0.5, 2.0]

    run(main())


def test_a_step_is_cancelled_when_its_host_dies():
    async def main():
        network = Network()
        (averager,) = await start_averagers(network, [[torch.zeros(1)]])
        step = start_step(network, averager)
        await asyncio.sleep(1)
        assert step.stage is AveragingStage.LOOKING_FOR_GROUP
        network.hosts[0].crash()
        await asyncio.wait([asyncio.wrap_future(step)], timeout=10)
        assert step.cancelled()
        assert now() == 1

    run(main())


def test_state_is_shared():
    async def main():
        network, table = Network(Link(delay=0.02)), SharedTable()
        donor, newcomer = await start_averagers(network, [[torch.ones(3)], [torch.zeros(3)]], table)
        donor.state_sharing.set(allowed=True)
        await asyncio.sleep(1)
        metadata, tensors = await newcomer.state_downloads.download()
        assert metadata is None
        assert torch.equal(tensors[0], torch.ones(3))

    run(main())


def test_node_on_a_prepared_host_joins():
    async def main():
        network = Network()
        nodes = await start_dht_nodes(network, 3)
        host = network.add_host()
        host.clock_offset = 0.5
        node = await start_dht_node(network, host, nodes, client_mode=True)
        assert network.host_of(node.peer_id) is host
        assert node.client_mode
        assert await node.store("key", "value", get_dht_time() + 60)
        assert (await nodes[0].get("key")).value == "value"

    run(main())


def test_node_on_a_dead_host_is_not_restarted():
    async def main():
        network = Network(Link(delay=0.1))
        nodes = await start_dht_nodes(network, 2)
        host = network.add_host()
        starting = asyncio.ensure_future(start_dht_node(network, host, nodes))
        await asyncio.sleep(0.2)
        host.power_off()
        with pytest.raises(SimulationError, match="died"):
            await starting

    run(main())


def test_in_memory_swarm_follows_from_its_seed():
    async def main():
        swarm = DHTSwarm(seed=3, delay=0.01)
        first, *others = await swarm.grow(5)
        began = now()
        assert await others[0].store("key", "value", get_dht_time() + 60)
        assert now() > began, "messages take a moment"
        assert (await first.get("key", latest=True)).value == "value"
        swarm.fall_silent(others[1])
        assert await first.protocol.call_ping(others[1].peer_id) is None
        await swarm.kill(others[2])
        assert not others[2].is_alive
        return [node.peer_id for node in swarm.nodes]

    assert run(main()) == run(main())


def test_a_swarm_of_averagers_in_memory():
    async def main():
        swarm = AveragerSwarm()
        tensors = [torch.full((3,), float(value)) for value in (1, 5)]
        for tensor, mode in zip(tensors, (AveragingMode.NODE, AveragingMode.CLIENT), strict=True):
            await swarm.add([tensor], mode=mode, target_group_size=2)
        assert [node.p2p.client_mode for node in swarm.nodes] == [False, True]
        steps = [make_step(node, get_dht_time(), gather=index) for index, node in enumerate(swarm.nodes)]
        await asyncio.gather(*(node.run_step(step) for node, step in zip(swarm.nodes, steps, strict=True)))
        assert all(torch.equal(tensor, torch.full((3,), 3.0)) for tensor in tensors)
        assert sorted(steps[0].result().values()) == [0, 1]
        waits = make_step(swarm.nodes[0], 100.0, triggered=False, timeout=7.0)
        assert (waits.deadline, waits.scheduled_time) == (107.0, 105.0)
        assert waits.stage is AveragingStage.IDLE
        await swarm.close()
        assert not any(node.p2p.is_alive for node in swarm.nodes)

    run(main())
