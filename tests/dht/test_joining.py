"""How a node joins, finds its swarm again, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from shoal.base.clock import get_dht_time
from shoal.dht import DHTID, DHTNode
from shoal.dht.joining import IDLE_SECONDS, LONGEST_PAUSE_OF_ENDED_SECONDS
from shoal.dht.local_records import records_for_newcomer
from shoal.dht.routing import RoutingTable
from shoal.dht.storage import DHTLocalStorage
from shoal.errors import BootstrapError, DialError, P2PDaemonError, ValidationError
from shoal.p2p import Identity, PeerID
from shoal.reach.reachability import Reachability
from tests.dht.swarm import Swarm, addresses, holders
from tests.dht.virtual_time import in_virtual_time

NOBODY = f"/memory/999/p2p/{Identity.generate(random.Random('nobody')).peer_id}"


def later(seconds: float) -> float:
    return get_dht_time() + seconds


# --- peers that do not answer -----------------------------------------------------------------------------------------


@in_virtual_time
async def test_nobody_answers():
    swarm = Swarm()
    silent = await swarm.node()
    swarm.fall_silent(silent)
    initial_peers = [NOBODY, *await addresses(silent)]
    start = asyncio.get_running_loop().time()
    with pytest.raises(BootstrapError, match=r"(?i)failed to connect to bootstrap peers") as caught:
        await DHTNode.create(p2p=await swarm.p2p(), initial_peers=initial_peers)
    assert asyncio.get_running_loop().time() - start == pytest.approx(3)
    assert list(caught.value.verdicts) == list(map(str, initial_peers))
    assert "nothing listens there" in caught.value.verdicts[NOBODY]
    assert "no answer within 3 s" in caught.value.verdicts[str(initial_peers[1])]
    assert isinstance(caught.value, (RuntimeError, P2PDaemonError))


@in_virtual_time
async def test_nobody_answers_and_that_is_all_right(caplog):
    node = await DHTNode.create(p2p=await Swarm().p2p(), initial_peers=[NOBODY], ensure_bootstrap_success=False)
    assert "starting alone" in caplog.text
    assert await node.store("key", 1, later(10))
    alone = await DHTNode.create(
        transport=Swarm().network.transport(), initial_peers=[NOBODY], ensure_bootstrap_success=False
    )
    assert alone.is_alive
    await alone.shutdown()


@in_virtual_time
async def test_one_good_address_among_dead_ones_suffices():
    swarm = Swarm()
    good, silent = await swarm.grow(2)
    swarm.fall_silent(silent)
    start = asyncio.get_running_loop().time()
    node = await swarm.node(initial_peers=[NOBODY, *await addresses(silent), *await addresses(good)])
    assert asyncio.get_running_loop().time() - start < 3.1
    assert good.node_id in node.protocol.routing_table


@in_virtual_time
async def test_several_addresses_of_one_peer():
    swarm = Swarm()
    good = await swarm.node()
    dead = f"/memory/999/p2p/{good.peer_id}"
    node = await swarm.node(initial_peers=[dead, *await addresses(good)])
    assert good.node_id in node.protocol.routing_table


@in_virtual_time
async def test_the_join_keeps_to_its_time():
    swarm = Swarm(delay=0.2)
    nodes = await swarm.grow(6, bootstrap_timeout=30)
    start = asyncio.get_running_loop().time()
    await swarm.node(initial_peers=await addresses(nodes[0]), bootstrap_timeout=2)
    assert asyncio.get_running_loop().time() - start <= 2.01
    with pytest.raises(BootstrapError, match=r"within 0\.1 s"):
        await swarm.node(initial_peers=await addresses(nodes[0]), bootstrap_timeout=0.1)


# --- nodes that do not fit --------------------------------------------------------------------------------------------


@in_virtual_time
async def test_undialable_peer_is_called_through_a_relay(caplog):
    swarm = Swarm()
    await swarm.grow(2)
    p2p = await swarm.p2p()
    await p2p.transport.close()
    node = await DHTNode.create(p2p=p2p, initial_peers=await addresses(swarm.nodes[0]))
    assert p2p.reachability is Reachability.RELAYED
    assert node.protocol.is_node
    assert await swarm.nodes[1].protocol.call_ping(p2p.peer_id) == node.node_id
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


@in_virtual_time
async def test_unreachable_peer_joins_as_a_client(caplog):
    swarm = Swarm()
    await swarm.node()
    swarm.nodes[0].p2p.relay.wanted = False
    p2p = await swarm.p2p()
    await p2p.transport.close()  # it does not listen any more, but still announces its address
    node = await DHTNode.create(p2p=p2p, initial_peers=await addresses(swarm.nodes[0]))
    assert swarm.nodes[0].node_id in node.protocol.routing_table
    assert node.node_id not in swarm.nodes[0].protocol.routing_table
    assert not node.protocol.is_node
    assert not node.client_mode, "it will be a node as soon as others can call it"
    assert p2p.reachability is Reachability.CLIENT
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("nobody can call this peer (seen at: ")
    assert await node.store("key", 1, get_dht_time() + 60)
    assert (await swarm.nodes[0].get("key")).value == 1
    await node.shutdown()
    client = await DHTNode.create(p2p=p2p, initial_peers=await addresses(swarm.nodes[0]), client_mode=True)
    assert client.client_mode


@in_virtual_time
async def test_one_objecting_peer_keeps_nobody_out():
    swarm = Swarm()
    good, odd = await swarm.grow(2)
    dial = odd.p2p.transport.dial

    async def refuse(address, peer):
        if peer in (good.peer_id,):
            return await dial(address, peer)
        raise DialError("it sees nobody")

    odd.p2p.transport.dial = refuse
    initial_peers = [*await addresses(odd), *await addresses(good)]
    node = await swarm.node(initial_peers=initial_peers)
    assert good.node_id in node.protocol.routing_table
    assert node.protocol.is_node
    lonely = await swarm.node(initial_peers=await addresses(odd))
    assert lonely.p2p.reachability is Reachability.RELAYED


@in_virtual_time
async def test_peer_that_claims_to_be_public_must_be():
    swarm = Swarm()
    await swarm.node()
    p2p = await swarm.p2p(force_reachability="public")
    await p2p.transport.close()
    initial_peers = await addresses(swarm.nodes[0])
    with pytest.raises(ValidationError, match="which force_reachability says is public") as error:
        await DHTNode.create(p2p=p2p, initial_peers=initial_peers)
    assert "cannot call this node back" in error.value.verdicts[str(initial_peers[0])]
    node = await DHTNode.create(p2p=p2p, initial_peers=initial_peers, strict=False)
    assert p2p.reachability is Reachability.PUBLIC
    await node.shutdown()


@pytest.mark.parametrize("failures", [1, 2])
@in_virtual_time
async def test_a_broken_connection_keeps_nobody_out(failures):
    swarm = Swarm()
    good = await swarm.node()
    p2p = await swarm.p2p()
    left = {}

    def break_some(transport):
        dial = transport.dial

        async def dial_sometimes(address, peer):
            left[transport] = left.get(transport, failures) - 1
            if left[transport] >= 0:
                raise DialError("the connection was closed during the handshake")
            return await dial(address, peer)

        transport.dial = dial_sometimes

    break_some(good.p2p.transport)
    break_some(p2p.transport)
    node = await DHTNode.create(p2p=p2p, initial_peers=await addresses(good))
    assert left == {good.p2p.transport: -1, p2p.transport: -1}
    assert good.node_id in node.protocol.routing_table
    assert node.node_id in good.protocol.routing_table


@in_virtual_time
async def test_peer_that_does_not_listen_is_a_client():
    swarm = Swarm()
    await swarm.node()
    node = await DHTNode.create(p2p=await swarm.p2p(client_mode=True), initial_peers=await addresses(swarm.nodes[0]))
    assert node.client_mode


# --- the swarm after joins --------------------------------------------------------------------------------------------


@in_virtual_time
async def test_newcomers_meet_their_neighbors():
    swarm = Swarm(seed=1)
    await swarm.grow(30)
    for node in swarm.nodes:
        nearest = sorted((other for other in swarm.nodes if other is not node), key=lambda o: o.node_id ^ node.node_id)
        known = sum(other.node_id in node.protocol.routing_table for other in nearest[:10])
        assert known >= 9


@in_virtual_time
async def test_twenty_nodes_may_join_at_once():
    swarm = Swarm(seed=2)
    first = await swarm.node()
    await asyncio.gather(
        *(swarm.node(initial_peers=[*await_addresses]) for await_addresses in [await addresses(first)] * 19)
    )
    assert asyncio.get_running_loop().time() < 3
    assert await swarm.nodes[3].store("key", 1, later(100))
    assert len(holders(swarm, DHTID.generate("key"))) == 5
    for node in swarm.nodes:
        assert (await node.get("key")).value == 1


@in_virtual_time
async def test_stale_buckets_are_looked_through_again():
    swarm = Swarm(seed=3)
    await swarm.grow(20)
    node = await swarm.node(refresh_timeout=60)
    calls = node.p2p.metrics.calls_made
    await asyncio.sleep(30)
    assert node.p2p.metrics.calls_made <= calls + 30 / IDLE_SECONDS, "signs of life"
    for other in swarm.nodes[:5]:
        await swarm.kill(other)
    await asyncio.sleep(200)
    assert node.p2p.metrics.calls_made > calls
    assert not [other for other in swarm.nodes[:5] if other.node_id in node.protocol.routing_table]
    assert len(node.protocol.routing_table) >= 10
    await node.shutdown()


@in_virtual_time
async def test_idle_nodes_only_ping_now_and_then():
    swarm = Swarm(seed=4)
    await swarm.grow(5)
    await asyncio.sleep(100)
    before = [(node.p2p.metrics.calls_made, node.p2p.metrics.bytes_sent) for node in swarm.nodes]
    await asyncio.sleep(10_000)
    for node, (calls, bytes_sent) in zip(swarm.nodes, before, strict=True):
        made = node.p2p.metrics.calls_made - calls
        assert 0 < made <= 10_000 / IDLE_SECONDS
        assert node.p2p.metrics.bytes_sent - bytes_sent < 10_000 * 50, "bytes per second, answers included"


# --- records for newcomers --------------------------------------------------------------------------------------------


@in_virtual_time
async def test_records_move_to_new_nodes():
    swarm = Swarm(seed=5)
    old = await swarm.grow(6)
    for number in range(30):
        assert await old[number % 6].store(f"key {number}", number, later(1000))
    for number in range(5):
        assert await old[number].store("dictionary", number, later(1000), subkey=number)
    new = await swarm.grow(24)
    await asyncio.sleep(5)
    for node in old:
        await swarm.kill(node)
    await asyncio.sleep(60)
    found = await new[-1].get_many([f"key {number}" for number in range(30)], sufficient_expiration_time=float("inf"))
    kept = [number for number in range(30) if (item := found[f"key {number}"]) and item.value == number]
    assert len(kept) >= 28
    dictionary = await new[-1].get("dictionary", latest=True)
    assert {subkey: item.value for subkey, item in dictionary.value.items()} == {n: n for n in range(5)}


@pytest.mark.parametrize("seed", range(20))
def test_handed_over_records_follow_the_rule(seed):
    rng = random.Random(seed)
    num_replicas = rng.randint(1, 5)
    table = RoutingTable(DHTID.generate(rng=rng), 20, 5)
    table.note_choice(table.node_id, PeerID(b"own"))  # as those of all the others
    for number in range(rng.choice([0, 1, 3, 10, 100])):
        near = DHTID(table.node_id ^ rng.getrandbits(rng.randint(150, 160)))
        table.add_or_update_node(near, PeerID(b"%d" % number))
    newcomer = DHTID(table.node_id ^ rng.getrandbits(rng.randint(150, 160)))
    table.add_or_update_node(newcomer, PeerID(b"newcomer"))
    storage = DHTLocalStorage()
    for _ in range(100):
        storage.store(DHTID(table.node_id ^ rng.getrandbits(rng.randint(150, 160))), b"v", later(100))

    def should_go(key: DHTID) -> bool:
        neighbors = sorted((node for node, _ in table if node != newcomer), key=key.xor_distance)[:num_replicas]
        if not neighbors:
            return True
        wanted = len(neighbors) < num_replicas or key ^ newcomer < key ^ neighbors[-1]
        return wanted and key ^ table.node_id < key ^ neighbors[0]

    expected = [key for key, _ in storage.items() if should_go(key)]
    assert [key for key, _, _ in records_for_newcomer(newcomer, storage, table, num_replicas)] == expected


@in_virtual_time
async def test_ended_peers_are_pinged_rarely():
    swarm = Swarm(seed=9)
    *alive, gone = await swarm.grow(6)
    await swarm.kill(gone)
    delay, dials = swarm.network.delay, []

    def note(source: PeerID, target: PeerID, size: int) -> float:
        if target == gone.peer_id:
            dials.append(get_dht_time())
        return delay(source, target, size)

    swarm.network.delay = note
    for node in alive:
        await node.find_nearest_nodes([gone.node_id])  # it notices
    await asyncio.sleep(300)
    assert len(dials) >= len(alive), "nobody has heard a goodbye"
    dials.clear()
    await asyncio.sleep(1800)
    assert len(dials) <= len(alive) * (1 + 1800 / LONGEST_PAUSE_OF_ENDED_SECONDS)
