"""Nodes that do not tell what they have agreed to keep: the user hears of each of them once."""

from __future__ import annotations

import asyncio
import logging

import pytest

from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.dht import DHTID, DHTNode, store
from shoal.dht.store import DEPOSITS_TO_TELL
from tests.dht.swarm import Swarm
from tests.dht.virtual_time import in_virtual_time

KEYS = ["one", "two", "three", "four"]
KIND = "records that are not told"


@pytest.fixture(autouse=True)
def _nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "warn_seldom", Seldom(store.logger.warning))


async def store_everywhere(node: DHTNode, seconds: float = 600.0) -> None:
    for key in KEYS:
        assert await node.store(key, "value", get_dht_time() + seconds, subkey=node.peer_id.to_base58())


async def read_all(nodes: list[DHTNode]) -> None:
    for node in nodes:
        for key in KEYS:
            await node.get(key, latest=True)


def hide_everything(node: DHTNode) -> None:
    node.protocol.records.find = lambda key_id: None


def lines_about(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "agreed to keep" in record.getMessage()]


@in_virtual_time
async def test_a_node_that_hides_records_is_named_once_by_their_owner(caplog):
    swarm = Swarm(seed=1)
    nodes = await swarm.grow(7)
    owner, other, *_ = nodes
    await store_everywhere(owner)
    held = {node: [key for key in KEYS if DHTID.generate(key) in node.protocol.storage] for node in nodes[2:]}
    censor = max(held, key=lambda node: len(held[node]))
    assert len(held[censor]) >= DEPOSITS_TO_TELL
    hide_everything(censor)
    for _ in range(3):
        await read_all([owner, other])
        found = await owner.get(KEYS[0], latest=True)
        assert owner.peer_id.to_base58() in found.value, "others tell it"
    [line] = lines_about(caplog)
    assert line.startswith(f"peer {censor.peer_id} has agreed")
    assert owner.p2p.metrics.troubles[KIND] == len(held[censor]), "each record counts once"
    assert other.p2p.metrics.troubles[KIND] == 0, "it has stored nothing"


@in_virtual_time
async def test_honest_nodes_are_not_named(caplog):
    """Records are replaced by later ones, withdrawn, expire, and are stored while they are looked for."""
    caplog.set_level(logging.WARNING, "shoal")
    swarm = Swarm(seed=2)
    nodes = await swarm.grow(12)
    for seconds in (20.0, 30.0, 40.0):
        for node in nodes[:3]:
            storing = node.protocol.spawn(store_everywhere(node, seconds))
            while not storing.done():
                await read_all([node])
            await storing
        await read_all(nodes)
    for key in KEYS:
        assert await nodes[0].store(key, None, get_dht_time() + 50.0, subkey=nodes[0].peer_id.to_base58())
        assert await nodes[1].store(f"{key} plain", "value", get_dht_time() + 5.0)
        assert await nodes[2].store(f"{key} plain", "other", get_dht_time() + 15.0)
    await read_all(nodes)
    assert not lines_about(caplog)
    assert not any(node.p2p.metrics.troubles[KIND] for node in nodes)


@in_virtual_time
async def test_a_node_is_not_named_while_its_answer_to_a_newer_record_is_on_its_way(caplog):
    """It leaves out the newer one, which the owner has itself, and no longer has the older one."""
    swarm = Swarm(seed=3)
    nodes = await swarm.grow(7)
    owner = nodes[0]
    await store_everywhere(owner, 20.0)
    store_at = owner.protocol.store_at

    async def answers_come_late(*args):
        accepted = await store_at(*args)
        await asyncio.sleep(5.0)
        return accepted

    owner.protocol.store_at = answers_come_late
    storing = owner.protocol.spawn(store_everywhere(owner, 30.0))
    while not storing.done():
        await read_all([owner])
        await asyncio.sleep(0.1)
    await storing
    assert not lines_about(caplog)
    assert owner.p2p.metrics.troubles[KIND] == 0
