"""Somebody hides what stands under a key of the table: those who have met go on, and newcomers find the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from shoal.averaging.control import AveragingMode
from shoal.averaging.groups.memory import REMEMBERED_SECONDS
from shoal.averaging.groups.search import GroupSearch, Outcall
from shoal.averaging.node import AveragerNode
from shoal.dht import DHTID, DHTNode
from shoal.testing import Network, SharedTable, run, start_averager, start_dht_nodes, start_step
from tests.drills import mostly_drills
from tests.simulation.rounds import TABLE_DELAY, WIDE_AREA, WINDOW
from tests.simulation.trackers import Tracked, calls_of, start_trackers, train


class CensoredTable(SharedTable):
    """Accepts everything and, once it censors, tells nothing."""

    def __init__(self) -> None:
        super().__init__(TABLE_DELAY)
        self.censors = False

    async def get(self, key: Any, latest: bool = False, **how: Any) -> Any:
        found = await super().get(key, latest, **how)
        return None if self.censors else found


async def start(network: Network, size: int, clients: int = 0, **settings: Any) -> tuple[CensoredTable, list]:
    table = CensoredTable()
    settings = {"min_matchmaking_time": WINDOW, **settings}
    nodes = []
    for index in range(size):
        mode = AveragingMode.CLIENT if index < clients else AveragingMode.NODE
        tensors = [torch.full((4,), float(index))]
        nodes.append(await start_averager(network.add_host(), tensors, table, mode=mode, **settings))
    return table, nodes


async def average(network: Network, nodes: list[AveragerNode], expected: int | None = None) -> list[int]:
    """All look for a group within a second; returns the sizes of the groups, 0 for those who found none."""

    async def take_part(node: AveragerNode) -> int:
        await asyncio.sleep(network.rng.random())
        step = start_step(network, node, timeout=3 * WINDOW)
        step.expected_group_size = expected
        await asyncio.wait([asyncio.wrap_future(step)])
        return 0 if step.exception() is not None else len(step.round.peers)

    return list(await asyncio.gather(*map(take_part, nodes)))


def calls(nodes: list[AveragerNode]) -> int:
    return sum(node.p2p.metrics.calls_made for node in nodes)


@pytest.mark.parametrize(("size", "clients"), [(2, 0), (3, 0), (4, 1), (12, 3)])
@pytest.mark.parametrize("seed", mostly_drills([1, 2, 3]))
def test_averaging_goes_on_although_the_key_seems_to_be_empty(seed, size, clients):
    async def main() -> None:
        network = Network(WIDE_AREA)
        table, nodes = await start(network, size, clients)
        assert await average(network, nodes, size) == [size] * size
        table.censors = True
        for _ in range(3):
            began = asyncio.get_running_loop().time()
            assert await average(network, nodes, size) == [size] * size
            assert asyncio.get_running_loop().time() - began < WINDOW + 2
            await asyncio.sleep(60)

    run(main(), seed=seed, time_limit=1000)


def test_who_was_met_long_ago_is_not_called():
    async def main() -> None:
        network = Network(WIDE_AREA)
        table, nodes = await start(network, 3)
        assert await average(network, nodes, 3) == [3] * 3
        table.censors = True
        await asyncio.sleep(REMEMBERED_SECONDS)
        before = calls(nodes)
        assert await average(network, nodes, 3) == [0] * 3
        assert calls(nodes) == before

    run(main(), seed=1, time_limit=1000)


@pytest.mark.parametrize("seed", mostly_drills([1, 2, 3]))
def test_no_more_calls_where_the_table_shows_everybody(seed, monkeypatch):
    seen = []
    call = GroupSearch._call
    monkeypatch.setattr(
        GroupSearch, "_call", lambda self, peer, kind, now: seen.append(kind) or call(self, peer, kind, now)
    )

    async def main() -> None:
        network = Network(WIDE_AREA)
        _, nodes = await start(network, 8)
        for _ in range(3):
            assert await average(network, nodes, 8) == [8] * 8
            await asyncio.sleep(60)

    run(main(), seed=seed, time_limit=1000)
    assert len(seen) > 3
    assert Outcall.UNSEEN not in seen


def test_one_who_is_gone_is_called_once_for_each_promise_and_not_waited_for():
    async def main() -> None:
        network = Network(WIDE_AREA)
        _, nodes = await start(network, 4)
        assert await average(network, nodes, 4) == [4] * 4
        network.host_of(nodes[3].p2p.peer_id).power_off()
        began = asyncio.get_running_loop().time()
        before = calls(nodes[:3])
        assert await average(network, nodes[:3], 4) == [3] * 3
        assert asyncio.get_running_loop().time() - began < WINDOW + 1 + 3
        assert calls(nodes[:3]) - before < 40

    run(main(), seed=1, time_limit=1000)


def test_clients_are_not_remembered_for_they_cannot_be_called():
    async def main() -> None:
        network = Network(WIDE_AREA)
        _, nodes = await start(network, 4, clients=1)
        assert await average(network, nodes, 4) == [4] * 4
        memory = nodes[1].lanes[""].matchmaking.former_members
        assert set(memory) == {node.p2p.peer_id for node in nodes[2:]}
        assert len(nodes[0].lanes[""].matchmaking.former_members) == 3

    run(main(), seed=1, time_limit=1000)


def test_peers_that_change_buckets_call_nobody():
    async def main() -> None:
        network = Network(WIDE_AREA)
        table, nodes = await start(network, 2, initial_group_bits="0", target_group_size=2)
        for node in nodes:
            node.lanes[""].matchmaking.keys.group_bits = "0"
        assert await average(network, nodes) == [2, 2]
        table.censors = True
        await asyncio.sleep(60)
        for node in nodes:
            node.lanes[""].matchmaking.keys.group_bits = "0"
        before = calls(nodes)
        assert await average(network, nodes) == [0, 0]
        assert calls(nodes) == before

    run(main(), seed=1, time_limit=1000)


# --- progress ---------------------------------------------------------------------------------------------------------


def test_trackers_go_on_although_the_key_seems_to_be_empty():
    async def main() -> None:
        network, table = Network(WIDE_AREA), CensoredTable()
        tracked = await start_trackers(network, 4, table)
        await train(tracked, 20)
        assert [one.expected for one in tracked] == [4] * 4
        table.censors = True
        for _ in range(10):
            await train(tracked, 90)
            assert [one.expected for one in tracked] == [4] * 4
        for one in tracked:
            await one.exchange.stop()

    run(main(), seed=1, time_limit=2000)


@pytest.mark.parametrize("seconds", [150, 500])
def test_after_an_outage_trackers_find_back_without_the_table(seconds):
    async def main() -> None:
        network, table = Network(WIDE_AREA), CensoredTable()
        tracked = await start_trackers(network, 4, table)
        await train(tracked, 20)
        assert [one.expected for one in tracked] == [4] * 4
        table.censors = True
        network.partition(*([one.host] for one in tracked))
        await train(tracked, seconds)
        assert [one.expected for one in tracked] == [1] * 4, "nothing is known of the others any more"
        network.heal()
        await train(tracked, 30)
        assert [one.expected for one in tracked] == [4] * 4
        for one in tracked:
            await one.exchange.stop()

    run(main(), seed=1, time_limit=2000)


def test_nobody_calls_for_ever():
    async def main() -> None:
        network, table = Network(WIDE_AREA), SharedTable(TABLE_DELAY)
        tracked = await start_trackers(network, 3, table)
        await train(tracked, 20)
        await tracked[2].exchange.stop()
        network.host_of(tracked[1].p2p.peer_id).power_off()
        await train(tracked[:1], 100)
        recent_peers_of_first = tracked[0].exchange.recent_peers
        assert tracked[1].p2p.peer_id in recent_peers_of_first
        assert tracked[2].p2p.peer_id not in recent_peers_of_first, "it has said goodbye"
        await train(tracked[:1], 560)
        before = calls_of(tracked[:1])
        await train(tracked[:1], 100)
        assert tracked[1].p2p.peer_id not in recent_peers_of_first
        assert calls_of(tracked[:1]) == before
        await tracked[0].exchange.stop()

    run(main(), seed=1, time_limit=2000)


# --- nodes of the table that lie --------------------------------------------------------------------------------------


KEYS = [DHTID.generate("run_progress"), DHTID.generate("simulation.0b")]


def make_censor(node: DHTNode) -> None:
    """It says that it keeps what belongs to the run, and that it has nothing of it."""
    records, find = node.protocol.records, node.protocol.records.find
    keep = records.keep
    records.keep = lambda record, payer=None: record.key_id in KEYS or keep(record, payer)
    records.find = lambda key_id: None if key_id in KEYS else find(key_id)


def nearest_to(nodes: list[DHTNode], key: DHTID, count: int) -> list[DHTNode]:
    return sorted(nodes, key=lambda node: node.node_id ^ key)[:count]


class Swarm:
    """Nodes of a table, some of which train."""

    def __init__(self, network: Network, nodes: list[DHTNode]) -> None:
        self.network, self.nodes = network, nodes
        self.tracked: list[Tracked] = []
        self.averagers: list[AveragerNode] = []

    async def begin_to_train(self, nodes: list[DHTNode]) -> list[Tracked]:
        for node in nodes:
            host = self.network.host_of(node.peer_id)
            self.tracked.append(Tracked(host, node.p2p, node))
            await host.run(self.tracked[-1].exchange.start())
            tensors = [torch.zeros(4)]
            self.averagers.append(await start_averager(host, tensors, node, min_matchmaking_time=WINDOW))
        return self.tracked[-len(nodes) :]

    async def assert_all_take_part(self) -> None:
        size = len(self.tracked)
        assert [one.expected for one in self.tracked] == [size] * size
        assert await average(self.network, self.averagers, size) == [size] * size

    async def stop(self) -> None:
        for one in self.tracked:
            await one.exchange.stop()


async def start_swarm(network: Network) -> Swarm:
    """Twenty nodes, of which four train that are not the nearest to any key of the run."""
    nodes = await start_dht_nodes(network, 20)
    holders = [node for key in KEYS for node in nearest_to(nodes, key, 5)]
    swarm = Swarm(network, nodes)
    await swarm.begin_to_train([node for node in nodes if node not in holders][:4])
    await train(swarm.tracked, 10)
    await swarm.assert_all_take_part()
    return swarm


@pytest.mark.parametrize("seed", mostly_drills([1, 2]))
def test_a_newcomer_finds_the_run_by_an_honest_majority_of_the_nodes_that_hold_it(seed):
    async def main() -> None:
        network = Network(WIDE_AREA)
        swarm = await start_swarm(network)
        for key in KEYS:
            for node in nearest_to(swarm.nodes, key, 2):
                make_censor(node)
        await train(swarm.tracked, 70)
        await swarm.begin_to_train(await start_dht_nodes(network, 1, swarm=swarm.nodes))
        await train(swarm.tracked, 10)
        await swarm.assert_all_take_part()
        await swarm.stop()

    run(main(), seed=seed, time_limit=2000)


@pytest.mark.parametrize("seed", mostly_drills([1, 2]))
def test_training_goes_on_although_all_that_hold_the_keys_hide_them(seed):
    async def main() -> None:
        network = Network(WIDE_AREA)
        swarm = await start_swarm(network)
        trained = [one.p2p.peer_id for one in swarm.tracked]
        for node in swarm.nodes:
            if node.peer_id not in trained:
                make_censor(node)
        for _ in range(4):
            await train(swarm.tracked, 70)
            await swarm.assert_all_take_part()
        await swarm.stop()

    run(main(), seed=seed, time_limit=2000)
