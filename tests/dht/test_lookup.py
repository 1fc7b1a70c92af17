"""What a walk makes of hostile answers."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.base.serializer import MSGPackSerializer
from shoal.dht import DHTID, DHTNode, traverse
from shoal.dht.records import (
    FindRequest,
    FindResponse,
    FindResult,
    Found,
    NodeContact,
    StoreRequest,
    StoreResponse,
    pack_contact,
)
from shoal.p2p import P2P, P2PContext, PeerID, ServicerBase
from tests.dht.swarm import Swarm
from tests.dht.virtual_time import in_virtual_time

KEY = DHTID.generate("key")


class Liar:
    """A peer that tells everybody who asks of the same made-up nodes, and keeps nothing of what it accepts."""

    def __init__(self, p2p: P2P, node_id: DHTID, told: dict[DHTID, msgspec.Raw]) -> None:
        self.p2p, self.node_id = p2p, node_id
        self.requests = 0

        class DHTProtocol(ServicerBase):
            async def rpc_find(_, request: FindRequest, context: P2PContext) -> FindResponse:
                self.requests += 1
                positions = list(range(len(told)))
                return FindResponse(
                    results=[FindResult(Found.NOTHING, b"", 0.0, positions) for _ in request.keys],
                    node_ids=b"".join(told_id.to_bytes() for told_id in told),
                    contacts=list(told.values()),
                    node_id=node_id.to_bytes(),
                )

            async def rpc_store(_, request: StoreRequest, context: P2PContext) -> StoreResponse:
                return StoreResponse(refusals=[None] * len(request.records), node_id=node_id.to_bytes())

        self.servicer = DHTProtocol()

    async def join(self, *victims: DHTNode) -> None:
        await self.servicer.add_p2p_handlers(self.p2p)
        for victim in victims:
            victim.p2p.add_addresses(self.p2p.peer_id, await self.p2p.get_visible_maddrs())
            victim.protocol.routing_table.add_or_update_node(self.node_id, self.p2p.peer_id)


def near_key(number: int) -> DHTID:
    return DHTID(KEY ^ (number + 1))


async def swarm_with_liar(told_by: dict[DHTID, msgspec.Raw] | None = None, **contact) -> tuple[Swarm, Liar]:
    swarm = Swarm(seed=1)
    await swarm.grow(8)
    p2p = await swarm.p2p()
    if told_by is None:
        own = NodeContact(p2p.peer_id.to_bytes(), [str(a) for a in p2p.get_addresses(p2p.peer_id)])
        packed = pack_contact(msgspec.structs.replace(own, **contact))
        told_by = {near_key(number): packed for number in range(20)}
    liar = Liar(p2p, DHTID(KEY), told_by)
    await liar.join(*swarm.nodes)
    return swarm, liar


@in_virtual_time
async def test_one_peer_does_not_stand_for_many_nodes():
    swarm, liar = await swarm_with_liar()
    node = swarm.nodes[0]
    [found] = (await node.find_nearest_nodes([KEY], k_nearest=20)).values()
    assert [peer for peer in found.values() if peer == liar.p2p.peer_id] == [liar.p2p.peer_id], "only as itself"
    assert len(found) == 9
    assert await node.store("key", 1, get_dht_time() + 10)
    assert (await swarm.nodes[5].get("key", latest=True)).value == 1


@pytest.mark.parametrize(
    "contact",
    [
        {"peer_id": b"nobody"},
        {"addresses": []},
        {"addresses": ["nonsense", "/ip4/1.2.3.4/tcp/99999", "/memory/12345"]},
        {"addresses": ["/memory/1/p2p/12D3KooWNikr79Xdz69AuQ6KJHCC4opkyHBccKnbb8rEMcqmUnRE"]},
    ],
    ids=repr,
)
@in_virtual_time
async def test_made_up_peers_are_dropped(contact):
    swarm, _ = await swarm_with_liar(**contact)
    node = swarm.nodes[0]
    [found] = (await node.find_nearest_nodes([KEY], k_nearest=20)).values()
    assert set(found) == {KEY, *(other.node_id for other in swarm.nodes)}
    assert await node.store("key", 1, get_dht_time() + 10)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x92\x01\x02", b"\x90", b"\x92\xc4\x00\x90"], ids=repr)
@in_virtual_time
async def test_contacts_that_are_none_are_dropped(raw):
    swarm, _ = await swarm_with_liar({near_key(number): msgspec.Raw(raw or b"\xc0") for number in range(20)})
    [found] = (await swarm.nodes[0].find_nearest_nodes([KEY], k_nearest=20)).values()
    assert set(found) <= {KEY, *(other.node_id for other in swarm.nodes)}
    assert await swarm.nodes[0].store("key", 1, get_dht_time() + 10)


@in_virtual_time
async def test_node_is_reached_by_its_good_address():
    swarm = Swarm(seed=2)
    target = await swarm.node()
    asker = await swarm.node(initial_peers=[])
    addresses = ["nonsense", *(str(a) for a in target.p2p.get_addresses(target.peer_id))]
    contact = pack_contact(NodeContact(target.peer_id.to_bytes(), addresses))
    await Liar(await swarm.p2p(), DHTID(KEY), {target.node_id: contact}).join(asker)
    [found] = (await asker.find_nearest_nodes([target.node_id], k_nearest=1)).values()
    assert found == {target.node_id: target.peer_id}


@in_virtual_time
async def test_node_never_calls_itself_by_hearsay():
    swarm = Swarm(seed=3)
    node = await swarm.node()
    own = pack_contact(NodeContact(node.peer_id.to_bytes(), ["/memory/1"]))
    await Liar(await swarm.p2p(), DHTID(KEY), {near_key(0): own}).join(node)
    [found] = (await node.find_nearest_nodes([KEY], exclude_self=True)).values()
    assert list(found) == [KEY]
    assert isinstance(next(iter(found.values())), PeerID)


# --- hops -------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_hops_are_counted():
    swarm = Swarm(seed=1)
    nodes = await swarm.grow(3, num_replicas=1, cache_on_store=False, cache_nearest=0)
    keys = {min(nodes, key=lambda node, n=n: node.node_id ^ DHTID.generate(n)): n for n in range(50)}
    holder, middle, reader = nodes
    assert await holder.store(keys[holder], 1, get_dht_time() + 100)
    assert len(holder.protocol.storage) == 1
    del reader.protocol.routing_table[holder.node_id]
    assert (await reader.get(keys[holder])).value == 1
    assert (await middle.get(keys[holder])).value == 1
    assert (await holder.get(keys[holder])).value == 1
    assert await holder.get("missing") is None
    assert [node.p2p.metrics.hops_to_records for node in nodes] == [{0: 1}, {1: 1}, {2: 1}]


# --- ids that were chosen ---------------------------------------------------------------------------------------------


def contact_of(p2p: P2P) -> msgspec.Raw:
    return pack_contact(NodeContact(p2p.peer_id.to_bytes(), [str(a) for a in p2p.get_addresses(p2p.peer_id)]))


async def swarm_with_censors(size: int = 12, count: int = 20) -> Swarm:
    swarm = Swarm(seed=5)
    await swarm.grow(size)
    peers = [await swarm.p2p() for _ in range(count)]
    told = {near_key(number): contact_of(p2p) for number, p2p in enumerate(peers)}
    for number, p2p in enumerate(peers):
        await Liar(p2p, near_key(number), told).join(*swarm.nodes)
    return swarm


@in_virtual_time
async def test_chosen_ids_near_a_key_hide_nothing():
    swarm = await swarm_with_censors()
    assert await swarm.nodes[3].store("key", 1, get_dht_time() + 100)
    honest = sorted(swarm.nodes, key=lambda node: KEY ^ node.node_id)
    assert [KEY in node.protocol.storage for node in honest] == [True] * 5 + [False] * 7
    found = await asyncio.gather(*(node.get("key", latest=True) for node in swarm.nodes))
    assert [item.value for item in found] == [1] * 12
    [nearest] = (await swarm.nodes[7].find_nearest_nodes([KEY], k_nearest=20)).values()
    assert list(nearest)[:12] == [node.node_id for node in honest]
    assert list(nearest)[12:] == [near_key(number) for number in range(8)]


@in_virtual_time
async def test_chosen_ids_hold_records_if_alone():
    swarm = Swarm(seed=6)
    nodes = [await swarm.node(node_id=near_key(number)) for number in range(3)]
    assert await nodes[0].store("key", 1, get_dht_time() + 100)
    assert all(KEY in node.protocol.storage for node in nodes)
    follower = await swarm.node(num_replicas=1)
    assert await follower.store("key", 2, get_dht_time() + 200)
    assert follower.protocol.storage.get(KEY).value == MSGPackSerializer.dumps(2)
    assert KEY in follower.protocol.storage, "although it is the farthest"


@in_virtual_time
async def test_honest_nodes_survive_false_contacts():
    swarm = Swarm(seed=7)
    target, asker = await swarm.node(), await swarm.node(initial_peers=[])
    lie = pack_contact(NodeContact(PeerID(b"nobody").to_bytes(), ["/memory/1"]))
    liar = await swarm.p2p()
    truth = DHTID(target.node_id ^ 2)
    told = {target.node_id: lie, truth: contact_of(truth_teller := await swarm.p2p())}
    await Liar(liar, DHTID(target.node_id ^ 1), told).join(asker)
    # Heard of after the lie, from one of whom the liar has told.
    await Liar(truth_teller, truth, {target.node_id: contact_of(target.p2p)}).join()
    [found] = (await asker.find_nearest_nodes([target.node_id], k_nearest=5)).values()
    assert found[target.node_id] == target.peer_id
    assert asker.p2p.metrics.node_ids_refused == 0


@in_virtual_time
async def test_answers_under_other_ids_are_counted(caplog, monkeypatch):
    monkeypatch.setattr(traverse, "warn_seldom", Seldom(traverse.logger.warning))
    swarm, liar = await swarm_with_liar()
    for _ in range(3):
        await swarm.nodes[0].find_nearest_nodes([KEY], k_nearest=20)
    assert swarm.nodes[0].p2p.metrics.node_ids_refused >= 1
    lines = [r.getMessage() for r in caplog.records if "an id that it does not have" in r.getMessage()]
    assert len(lines) == 1
    assert str(liar.p2p.peer_id) in lines[0]
