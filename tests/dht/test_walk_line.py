"""Walks of one process queue up."""

from __future__ import annotations

import asyncio

from shoal.base.clock import get_dht_time
from shoal.dht.traverse import WALKS_IN_FLIGHT, Traversal, walk_line
from shoal.testing import Link, Network, run, start_dht_nodes
from tests.dht.swarm import Swarm
from tests.dht.virtual_time import in_virtual_time

CROWD = 200


@in_virtual_time
async def test_few_walks_run_at_once(monkeypatch):
    in_flight, most = 0, 0
    run_walk = Traversal.run

    async def run_and_count(walk: Traversal) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        try:
            await run_walk(walk)
        finally:
            in_flight -= 1

    monkeypatch.setattr(Traversal, "run", run_and_count)
    swarm = Swarm(seed=1)
    nodes = await swarm.grow(16)
    expires = get_dht_time() + 600
    assert all(await asyncio.gather(*(nodes[n % 16].store(f"key {n}", n, expires) for n in range(CROWD))))
    found = await asyncio.gather(*(nodes[n % 7].get(f"key {n}") for n in range(CROWD)))
    assert [record.value for record in found] == list(range(CROWD))
    assert most == WALKS_IN_FLIGHT, "the nodes of this process share one line"


def test_waiting_walks_cost_calls_no_time():
    async def main() -> None:
        network = Network(Link(delay=0.15))
        nodes = await start_dht_nodes(network, 4, bootstrap_timeout=5)
        hosts = [network.host_of(node.peer_id) for node in nodes]
        expires = get_dht_time() + 6000
        now = asyncio.get_running_loop().time
        began = now()
        stores = (
            host.run(node.store(f"{number} by {node.peer_id}", number, expires))
            for node, host in zip(nodes, hosts, strict=True)
            for number in range(CROWD)
        )
        assert all(await asyncio.gather(*stores))
        assert now() - began > 2 * nodes[0].protocol.wait_timeout, (
            "those who waited in line did so for longer than a call may take"
        )
        for node in nodes:
            assert len(node.protocol.routing_table) == 3
        assert len({id(await host.run(_line())) for host in hosts}) == len(hosts)

    run(main())


async def _line() -> asyncio.Semaphore:
    return walk_line()


@in_virtual_time
async def test_cancelled_walk_leaves_the_line():
    swarm = Swarm(seed=1)
    nodes = await swarm.grow(4)
    async with asyncio.TaskGroup() as group:
        for _ in range(WALKS_IN_FLIGHT):
            group.create_task(walk_line().acquire())
    waiting = asyncio.ensure_future(nodes[0].get("nothing"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    for _ in range(WALKS_IN_FLIGHT):
        walk_line().release()
    assert await nodes[0].get("nothing") is None


@in_virtual_time
async def test_abandoned_search_takes_no_place_in_line():
    swarm = Swarm(seed=1)
    nodes = await swarm.grow(4)
    for _ in range(WALKS_IN_FLIGHT):
        await walk_line().acquire()
    futures = await nodes[0].get_many(["a", "b"], return_futures=True)
    await asyncio.sleep(0.1)
    for future in futures.values():
        future.cancel()
    calls = nodes[0].p2p.metrics.calls_made
    for _ in range(WALKS_IN_FLIGHT):
        walk_line().release()
    await asyncio.sleep(1)
    assert nodes[0].p2p.metrics.calls_made == calls
    assert len(nodes[0].pending_get_requests) == 0
