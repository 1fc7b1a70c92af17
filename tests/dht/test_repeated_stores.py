"""Repeated stores go straight to the nodes that were found before."""

from __future__ import annotations

import asyncio

import pytest

from shoal.base.clock import get_dht_time
from shoal.dht import DHTID, DHTNode
from shoal.dht.store import WALK_LASTS_SECONDS
from shoal.dht.traverse import Lookup
from tests.dht.swarm import Swarm, holders
from tests.dht.virtual_time import in_virtual_time

KEY = "progress"
KEY_ID = DHTID.generate(KEY)


@pytest.fixture(autouse=True)
def walks(monkeypatch: pytest.MonkeyPatch) -> list[list[DHTID]]:
    """The keys of each walk that looks for nodes to store at."""
    walks, find_nearest = [], Lookup.find_nearest

    async def noted(self, targets, *args, **options):
        walks.append(list(targets))
        await find_nearest(self, targets, *args, **options)

    monkeypatch.setattr(Lookup, "find_nearest", noted)
    return walks


async def store(node: DHTNode, value: int) -> bool:
    return await node.store(KEY, value, get_dht_time() + 300, subkey="me")


def is_near(node: DHTNode, other: DHTNode) -> bool:
    """Whether a node knows another one as one of the nearest to the key."""
    nearest = node.protocol.routing_table.get_nearest_neighbors(KEY_ID, node.config.num_replicas)
    return other.node_id in dict(nearest)


async def grow(count: int, **options: int) -> tuple[Swarm, DHTNode]:
    swarm = Swarm(seed=3)
    owner, *_ = await swarm.grow(count, **options)
    return swarm, owner


@in_virtual_time
async def test_repeated_stores_reuse_the_walk(walks):
    swarm, owner = await grow(12)
    walks.clear()
    assert await store(owner, 0)
    keepers = holders(swarm, KEY_ID)
    for value in range(1, 4):
        assert await store(owner, value)
    assert walks == [[KEY_ID]]
    assert holders(swarm, KEY_ID) == keepers
    for keeper in keepers:
        found = await keeper.get(KEY)
        assert found.value["me"].value == 3
    await asyncio.sleep(WALK_LASTS_SECONDS)
    assert await store(owner, 4)
    assert walks == [[KEY_ID]] * 2
    assert await owner.store_many([KEY, "another"], [5, 5], get_dht_time() + 300, subkeys=["me", "me"])
    assert walks[2:] == [[DHTID.generate("another")]]


@in_virtual_time
async def test_nearer_newcomer_gets_the_record(walks):
    swarm, owner = await grow(8)
    assert await store(owner, 0)
    keepers, newcomers = holders(swarm, KEY_ID), []
    while not any(is_near(owner, newcomer) for newcomer in newcomers):
        newcomers += await swarm.grow(1)
    walks.clear()
    assert await store(owner, 1)
    assert [KEY_ID] in walks
    assert set(holders(swarm, KEY_ID)) - set(keepers) <= set(newcomers)
    assert is_near(owner, newcomers[-1])
    assert newcomers[-1] in holders(swarm, KEY_ID)


@in_virtual_time
async def test_nodes_that_have_left_are_replaced(walks):
    swarm, owner = await grow(16)
    assert await store(owner, 0)
    gone = [node for node in holders(swarm, KEY_ID) if node is not owner][:2]
    for node in gone:
        await swarm.kill(node)
    walks.clear()
    assert await store(owner, 1)
    assert not walks, "others that were found there keep it"
    assert len(holders(swarm, KEY_ID)) == owner.config.num_replicas
    assert await store(owner, 2)
    assert walks == [[KEY_ID]], "somebody did not answer"


@in_virtual_time
async def test_walk_repeats_if_no_known_node_answers(walks):
    swarm, _ = await grow(24, bucket_size=5)
    owner = await swarm.node(client_mode=True, bucket_size=5)  # which does not keep it itself
    assert await store(owner, 0)
    for node in holders(swarm, KEY_ID):
        await swarm.kill(node)
    walks.clear()
    assert await store(owner, 1)
    assert walks == [[KEY_ID]]
    assert len(holders(swarm, KEY_ID)) == owner.config.num_replicas
