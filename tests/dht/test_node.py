"""Nodes that store and get, over memory and sockets."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys

import pytest

from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.dht import DHTID, DHTNode
from shoal.dht.records import FindResult, Found
from shoal.errors import DHTError
from shoal.net.memory import MemoryNetwork
from shoal.p2p import P2P
from tests.dht.swarm import Swarm, holders
from tests.dht.virtual_time import in_virtual_time


def later(seconds: float) -> float:
    return get_dht_time() + seconds


# --- alone ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_node_without_peers_works_by_itself():
    node = await Swarm().node()
    assert await node.get("key") is None
    assert await node.store("key", ["value"], later(10))
    assert await node.get("key") == (["value"], later(10))
    assert await node.get("key", latest=True) == (["value"], later(10))
    assert await node.find_nearest_nodes([DHTID(5)]) == {5: {node.node_id: node.peer_id}}
    assert await node.find_nearest_nodes([DHTID(5)], exclude_self=True) == {5: {}}
    assert not await node.store("other", 1, later(10), exclude_self=True)
    await asyncio.sleep(10.1)
    assert await node.get("key") is None


@in_virtual_time
async def test_a_lone_client_stores_nothing():
    node = await Swarm().node(client_mode=True)
    assert not await node.store("key", 1, later(10))
    assert await node.get("key") is None


# --- searching --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_nearest_nodes_are_found():
    swarm = Swarm(seed=1)
    await swarm.grow(60)
    asker = swarm.nodes[7]
    queries = [DHTID.generate(number) for number in range(20)]
    found = await asker.find_nearest_nodes(queries, k_nearest=10)
    for query in queries:
        exact = sorted((node.node_id for node in swarm.nodes), key=query.xor_distance)[:10]
        assert list(found[query]) == exact
        assert all(found[query][node.node_id] == node.peer_id for node in swarm.nodes if node.node_id in exact)
    [without_self] = (await asker.find_nearest_nodes([asker.node_id], k_nearest=5, exclude_self=True)).values()
    assert asker.node_id not in without_self
    assert len(without_self) == 5


@pytest.mark.slow
@in_virtual_time
async def test_nodes_beyond_bucket_size_are_found():
    swarm = Swarm(seed=1)
    await swarm.grow(100)
    node_ids = [node.node_id for node in swarm.nodes]
    queries = [DHTID.generate(number) for number in range(50)]
    exact = {query: sorted(node_ids, key=query.xor_distance) for query in queries}
    found = await swarm.nodes[7].find_nearest_nodes(queries, k_nearest=30)
    assert {query: list(found[query]) for query in queries} == {query: exact[query][:30] for query in queries}
    for asker, query in zip(swarm.nodes, queries[:10], strict=False):
        assert list((await asker.find_nearest_nodes([query], k_nearest=30))[query]) == exact[query][:30]
    assert list((await asker.find_nearest_nodes([query], k_nearest=1000))[query]) == exact[query]


@in_virtual_time
async def test_replicas_beyond_bucket_size_are_stored():
    swarm = Swarm(seed=2)
    await swarm.grow(40, bucket_size=4, num_replicas=12)
    for number in range(10):
        assert await swarm.nodes[number].store(number, "value", later(100))
        key_id = DHTID.generate(number)
        nearest = sorted(swarm.nodes, key=lambda node: key_id.xor_distance(node.node_id))[:12]
        assert {node.node_id for node in holders(swarm, key_id)} == {node.node_id for node in nearest}


@in_virtual_time
async def test_searches_may_start_at_given_nodes():
    swarm = Swarm()
    stranger = await swarm.node()
    loner = await swarm.node(initial_peers=[])
    loner.p2p.add_addresses(stranger.peer_id, await stranger.get_visible_maddrs())
    known = {stranger.node_id: stranger.peer_id}
    [found] = (await loner.find_nearest_nodes([DHTID(1)], node_to_peer_id=known, exclude_self=True)).values()
    assert found == known


@in_virtual_time
async def test_dead_nodes_are_not_among_the_results():
    swarm = Swarm(seed=2)
    await swarm.grow(30)
    query = DHTID.generate("query")
    nearest = sorted(swarm.nodes, key=lambda node: node.node_id ^ query)
    asker = nearest.pop()
    for node in nearest[:5:2]:
        await swarm.kill(node)
    [found] = (await asker.find_nearest_nodes([query], k_nearest=5)).values()
    assert list(found) == [node.node_id for node in nearest if node.is_alive][:5]


# --- storing and getting ----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_search_survives_dead_first_nodes():
    swarm = Swarm(seed=4)
    reader, *others = await swarm.grow(70)
    key = DHTID.generate("key")
    known = sorted((node_id for node_id, _ in reader.protocol.routing_table), key=key.xor_distance)
    assert len(known) > 30
    dead = set(known[:25])
    for node in others:
        if node.node_id in dead:
            await swarm.kill(node)
    assert await reader.store("key", "value", later(100))
    alive = [node for node in swarm.nodes if node.is_alive]
    nearest = sorted(alive, key=lambda node: node.node_id ^ key)
    assert holders(swarm, key) == [node for node in alive if node in nearest[:5]]


@in_virtual_time
async def test_everybody_gets_what_anybody_stored():
    swarm = Swarm(seed=3)
    await swarm.grow(20)
    for number, node in enumerate(swarm.nodes):
        assert await node.store(f"key {number}", {"number": (number,)}, later(100))
    for number, node in enumerate(reversed(swarm.nodes)):
        assert (await node.get(f"key {number}")).value == {"number": (number,)}
    assert await swarm.nodes[0].get("missing") is None


@in_virtual_time
async def test_later_expirations_win_and_ties_lose():
    swarm = Swarm(seed=4)
    one, other = (await swarm.grow(8))[:2]
    expires = later(50)
    assert await one.store("key", "first", expires)
    assert not await other.store("key", "tie", expires)
    assert not await other.store("key", "earlier", expires - 1)
    assert (await one.get("key", latest=True)).value == "first"
    assert await other.store("key", "second", expires + 1)
    assert await swarm.nodes[5].get("key", latest=True) == ("second", expires + 1)
    assert not await one.store("expired", 1, later(-1))


@in_virtual_time
async def test_only_the_nearest_nodes_hold_a_record():
    swarm = Swarm(seed=5)
    await swarm.grow(40)
    for number in range(10):
        key = DHTID.generate(f"key {number}")
        expected = sorted(swarm.nodes, key=lambda node, key=key: node.node_id ^ key)[:5]
        for extra in range(3):  # storing again does not change the number of holders
            assert await swarm.nodes[number].store(f"key {number}", extra, later(100 + extra))
            assert {node.node_id for node in holders(swarm, key)} == {node.node_id for node in expected}


@pytest.mark.parametrize("num_replicas", [1, 4, 20])
@in_virtual_time
async def test_number_of_replicas(num_replicas):
    swarm = Swarm(seed=6)
    await swarm.grow(20, num_replicas=num_replicas)
    for number in range(5):
        assert await swarm.nodes[number].store(f"key {number}", number, later(100))
        assert len(holders(swarm, DHTID.generate(f"key {number}"))) == num_replicas


@in_virtual_time
async def test_dead_replicas_are_replaced_by_the_next_nearest():
    swarm = Swarm(seed=7)
    await swarm.grow(30)
    key = DHTID.generate("key")
    nearest = sorted(swarm.nodes, key=lambda node: node.node_id ^ key)
    for node in nearest[:4]:
        await swarm.kill(node)
    assert await nearest[-1].store("key", 1, later(100))
    assert len(holders(swarm, key)) == 5
    for node in nearest[4:6]:
        await swarm.kill(node)
    assert (await nearest[-2].get("key")).value == 1


@in_virtual_time
async def test_silent_nodes_only_delay_a_store():
    swarm = Swarm(seed=8)
    await swarm.grow(20)
    key = DHTID.generate("key")
    nearest = sorted(swarm.nodes, key=lambda node: node.node_id ^ key)
    for node in nearest[1:3]:
        swarm.fall_silent(node)
    start = asyncio.get_running_loop().time()
    assert await nearest[-1].store("key", 1, later(100))
    first = asyncio.get_running_loop().time() - start
    assert first < 6.5
    start = asyncio.get_running_loop().time()
    assert await nearest[-1].store("key", 2, later(101))
    assert asyncio.get_running_loop().time() - start < 1, "the silent ones are known by now"


@pytest.mark.slow_drill
@pytest.mark.slow
@in_virtual_time
async def test_a_third_of_the_nodes_falls_silent():
    swarm = Swarm(seed=22, delay=0.05)
    nodes = await swarm.grow(45)
    for number in range(40):
        assert await nodes[number].store(f"key {number}", number, later(1000))
    silent, alive = nodes[:15], nodes[15:]
    for node in silent:
        swarm.fall_silent(node)
    loop = asyncio.get_running_loop()
    durations = []
    for number in range(40):
        start = loop.time()
        found = await alive[number % 30].get(f"key {number}")
        durations.append(loop.time() - start)
        survivors = [n for n in holders(swarm, DHTID.generate(f"key {number}")) if n in alive]
        assert (found is not None and found.value == number) or not survivors
    assert sorted(durations)[20] < 1
    durations = []
    for number in range(40):
        start = loop.time()
        assert await alive[number % 30].store(f"new {number}", number, later(1000))
        durations.append(loop.time() - start)
        assert len([n for n in holders(swarm, DHTID.generate(f"new {number}")) if n in alive]) == 5
    assert sorted(durations)[20] < 2
    assert max(durations) < 5


@in_virtual_time
async def test_many_keys_at_once():
    swarm = Swarm(seed=9)
    one, *_, other = await swarm.grow(15)
    keys = [f"key {number}" for number in range(50)]
    stored = await one.store_many(keys, list(range(50)), later(100))
    assert stored == dict.fromkeys(keys, True)
    found = await other.get_many([*keys, "missing"])
    assert {key: item and item.value for key, item in found.items()} == {
        **dict(zip(keys, range(50), strict=True)),
        "missing": None,
    }


@in_virtual_time
async def test_store_many_takes_subkeys_and_expirations():
    swarm = Swarm()
    one, other = await swarm.grow(2)
    whole_seconds = int(later(3000))
    assert await one.store("b", "present", later(40))
    stored = await one.store_many(
        ["a", "a", "b", "c"], [1, 2, 3, 4], [later(10), later(20), later(30), whole_seconds], ["x", "y", None, None]
    )
    assert stored == {("a", "x"): True, ("a", "y"): True, "b": False, "c": True}
    assert {k: v.value for k, v in (await other.get("a", latest=True)).value.items()} == {"x": 1, "y": 2}
    assert await other.get("c") == (4, whole_seconds)


@pytest.mark.parametrize(
    ("keys", "values", "expirations", "subkeys"),
    [(["a"], [1, 2], 2e9, None), (["a"], [1], [2e9, 2e9], None), (["a", "b"], [1, 2], 2e9, ["x"])],
)
@in_virtual_time
async def test_lists_that_do_not_belong_together_are_refused(keys, values, expirations, subkeys):
    node = await Swarm().node()
    with pytest.raises(ValueError, match="do not belong together"):
        await node.store_many(keys, values, expirations, subkeys)


@pytest.mark.parametrize("key", ["", 0, False, 0.0, None, (), [], b"", ("a", ["b"]), b"\xff"], ids=repr)
@pytest.mark.parametrize("value", ["", 0, None, (), [], {}, b"", [((),)]], ids=repr)
@in_virtual_time
async def test_odd_keys_and_values(key, value):
    swarm = Swarm()
    one, other = await swarm.grow(2)
    assert await one.store("key" if key is None else key, value, later(10))
    found = (await other.get("key" if key is None else key)).value
    assert found == value
    assert type(found) is type(value)
    subkey = tuple(key) if isinstance(key, list) else key
    if subkey is not None and key != ("a", ["b"]):
        assert await one.store("dictionary", value, later(10), subkey=subkey)
        assert (await other.get("dictionary", latest=True)).value[subkey].value == value


@pytest.mark.parametrize("expiration_time", [math.nan, math.inf, -1.0, -math.inf, 10**400])
@in_virtual_time
async def test_impossible_expirations_are_refused(expiration_time):
    node = await Swarm().node()
    with pytest.raises(ValueError, match="finite number of seconds"):
        await node.store("key", 1, expiration_time)


@pytest.mark.parametrize("expiration_time", [None, "soon", True])
@in_virtual_time
async def test_expirations_must_be_numbers(expiration_time):
    node = await Swarm().node()
    with pytest.raises(TypeError, match="must be a number"):
        await node.store("key", 1, expiration_time)


@in_virtual_time
async def test_what_cannot_be_stored_is_refused_at_once():
    node = await Swarm().node()
    with pytest.raises(TypeError, match="cannot serialize"):
        await node.store("key", object(), later(10))
    with pytest.raises(TypeError, match="cannot serialize"):
        await node.store({1, 2}, 1, later(10))
    with pytest.raises(ValueError, match="over the limit"):
        await node.store("key", b"x" * 2**20, later(10))
    for subkey in ([1], {}, math.nan):
        with pytest.raises(ValueError, match="cannot be a subkey"):
            await node.store("key", 1, later(10), subkey=subkey)


# --- dictionaries -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_dictionaries_are_united_from_all_replicas():
    swarm = Swarm(seed=10)
    await swarm.grow(12)
    for number, node in enumerate(swarm.nodes):
        assert await node.store("dictionary", number, later(50 + number), subkey=("peer", number))
    found = await swarm.nodes[3].get("dictionary", latest=True)
    assert found.expiration_time == pytest.approx(later(61), abs=10)
    assert {subkey: item.value for subkey, item in found.value.items()} == {("peer", n): n for n in range(12)}


def told(entries: dict[str, float], latest: float, maxsize: int | None = None) -> FindResult:
    """What a node may say of a dictionary."""
    content = [maxsize, latest, [[name, b"\x01", expires] for name, expires in entries.items()]]
    return FindResult(Found.DICTIONARY, MSGPackSerializer.dumps(content), latest, [])


@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize(
    "lie",
    [
        lambda: told({}, math.inf),
        lambda: told({}, later(86_000)),
        lambda: told({"x": later(50)}, later(50), maxsize=1),
        lambda: told({"x": later(50)}, later(50), maxsize=0),
    ],
    ids=["for ever", "for a day", "at most one", "at most none"],
)
@in_virtual_time
async def test_a_node_that_tells_nothing_leaves_nothing_out(lie, latest):
    swarm = Swarm(seed=13)
    reader, liar, *others = await swarm.grow(6, num_replicas=6, cache_locally=False, cache_on_store=False)
    honest = {str(other.peer_id) for other in others}
    for other in others:
        await other.store("d", 1, later(40), subkey=str(other.peer_id))
    for node in (reader, liar):
        node.protocol.storage.clear()
    liar.protocol.records.answer = lambda *_: lie()
    # The liar answers first.
    swarm.network.delay = lambda source, target, _: 0.01 if liar.peer_id in (source, target) else 0.2
    found = await reader.get("d", latest=latest)
    assert found is not None
    assert found.value
    assert honest <= set(found.value) or not latest
    assert found.expiration_time < later(60)


@in_virtual_time
async def test_entries_expire_singly_and_yield_to_later_ones():
    swarm = Swarm(seed=11)
    one, other = (await swarm.grow(10))[:2]
    start = get_dht_time()
    assert await one.store("d", 1, start + 10, subkey="short")
    assert await one.store("d", 2, start + 20, subkey="long")
    assert not await other.store("d", 3, start + 19, subkey="long")
    assert not await other.store("d", "plain", start + 15), "a plain value must outlive the dictionary"
    assert await other.store("d", 4, start + 21, subkey="long")
    await asyncio.sleep(11)
    found = await swarm.nodes[5].get("d", latest=True)
    assert found == ({"long": (4, start + 21)}, start + 21)
    assert await other.store("d", "plain", start + 30)
    assert await one.get("d", latest=True) == ("plain", start + 30)


@in_virtual_time
async def test_reading_does_not_change_what_is_stored():
    swarm = Swarm(seed=12)
    one, other = await swarm.grow(2, num_replicas=1, cache_locally=False, cache_on_store=False)
    here, there = sorted([one, other], key=lambda node: node.node_id ^ DHTID.generate("d"))
    key = DHTID.generate("d")
    here.protocol.storage.store(key, b"\x01", later(10), subkey="a")
    there.protocol.storage.store(key, b"\x02", later(20), subkey="b")
    assert set((await here.get("d", latest=True)).value) == {"a", "b"}
    assert [subkey for subkey, _ in here.protocol.storage.get(key).value.items()] == ["a"]
    assert here.protocol.storage.get(key).expiration_time < later(10)


@in_virtual_time
async def test_callers_get_separate_result_objects():
    swarm = Swarm(seed=13)
    one, other = (await swarm.grow(5))[:2]
    await one.store("d", [1], later(10), subkey="a")
    first, second = await asyncio.gather(other.get("d", latest=True), other.get("d", latest=True))
    first.value["a"].value.append("changed")
    assert second.value["a"].value == [1]


# --- clients ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_clients_use_the_dht_without_serving_it():
    swarm = Swarm(seed=14)
    await swarm.grow(6)
    client, other_client = await swarm.grow(2, client_mode=True)
    for number in range(20):
        assert await client.store(f"key {number}", number, later(100))
        assert (await other_client.get(f"key {number}")).value == number
        assert (await swarm.nodes[number % 6].get(f"key {number}")).value == number
    assert len(client.protocol.storage) == len(other_client.protocol.storage) == 0
    for node in swarm.nodes:
        assert client.node_id not in node.protocol.routing_table
    assert await client.get_visible_maddrs() == []
    assert client.client_mode


@in_virtual_time
async def test_client_stores_are_visible_with_one_replica():
    swarm = Swarm(seed=15)
    server = await swarm.node(num_replicas=1)
    client = await swarm.node(num_replicas=1, client_mode=True, cache_on_store=False)
    for number in range(20):
        assert await client.store(f"key {number}", number, later(100))
        assert (await server.get(f"key {number}")).value == number


# --- the status of a store --------------------------------------------------------------------------------------------


@in_virtual_time
async def test_minority_does_not_decide_a_store():
    swarm = Swarm(seed=16)
    await swarm.grow(10)
    key = DHTID.generate("key")
    nearest = sorted(swarm.nodes, key=lambda node: node.node_id ^ key)
    for node in nearest[1:3]:
        node.protocol.storage.store(key, b"later", later(1000))
    for attempt in range(5):
        assert await nearest[-1].store("key", 1, later(100 + attempt)), "accepted by three of five"
    nearest[0].protocol.storage.store(key, b"later", later(1000))
    for attempt in range(5):
        assert not await nearest[-1].store("key", 1, later(200 + attempt)), "refused by three of five"


@in_virtual_time
async def test_a_store_may_return_after_the_first_answer():
    swarm = Swarm(seed=17)
    await swarm.grow(12)
    key = DHTID.generate("key")
    nearest = sorted(swarm.nodes, key=lambda node: node.node_id ^ key)
    asker = nearest[0]
    await asker.find_nearest_nodes([key])
    swarm.fall_silent(nearest[2])
    start = asyncio.get_running_loop().time()
    stored = await asker.store_many(["key"], [1], later(100), await_all_replicas=False)
    assert stored == {"key": True}
    quick = asyncio.get_running_loop().time() - start
    await asker.store_many(["key"], [1], later(101))
    await asyncio.sleep(10)
    assert quick <= 3.2
    assert len(holders(swarm, key)) >= 5


# --- cancelling and ending --------------------------------------------------------------------------------------------


@in_virtual_time
async def test_cancelling_one_future_leaves_the_others():
    swarm = Swarm(seed=18, delay=0.2)
    one, *_, other = await swarm.grow(8)
    await one.store_many(["a", "b"], [1, 2], later(100))
    futures = await other.get_many(["a", "b"], sufficient_expiration_time=math.inf, return_futures=True)
    await asyncio.sleep(0.05)
    futures["a"].cancel()
    assert (await futures["b"]).value == 2
    assert len(other.pending_get_requests) == 0


@in_virtual_time
async def test_cancelling_a_get_cancels_its_search():
    swarm = Swarm(seed=19, delay=0.2)
    one, *_, other = await swarm.grow(8)
    await one.store("a", 1, later(100))
    getting = asyncio.ensure_future(other.get("a", latest=True))
    await asyncio.sleep(0.05)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    assert len(other.pending_get_requests) == 0


@in_virtual_time
async def test_cancelled_store_stores_nothing():
    swarm = Swarm(seed=19, delay=0.2)
    *_, node = await swarm.grow(8)
    storing = asyncio.ensure_future(node.store("a", 1, later(100)))
    await asyncio.sleep(0.05)
    storing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await storing
    await asyncio.sleep(5)
    assert holders(swarm, DHTID.generate("a")) == []
    assert await node.store("a", 2, later(100))


@in_virtual_time
async def test_shutdown_ends_what_is_in_progress():
    swarm = Swarm(seed=20)
    await swarm.grow(5)
    node = swarm.nodes[0]
    for other in swarm.nodes[1:]:
        swarm.fall_silent(other)
    getting = asyncio.ensure_future(node.get("missing"))
    storing = asyncio.ensure_future(node.store("key", 1, later(100)))
    futures = await node.get_many(["a"], return_futures=True)
    await asyncio.sleep(0.5)
    start = asyncio.get_running_loop().time()
    await node.shutdown()
    with pytest.raises(DHTError, match="shut down"):
        await getting
    with pytest.raises(DHTError, match="shut down"):
        await storing
    with pytest.raises(asyncio.CancelledError):
        await futures["a"]
    assert asyncio.get_running_loop().time() == start
    assert not node.is_alive
    await node.shutdown()
    for attempt in (
        node.get("a"),
        node.store("a", 1, later(1)),
        node.find_nearest_nodes([]),
        node.store_many([], [], 1),
    ):
        with pytest.raises(DHTError, match="create a new one"):
            await attempt


@pytest.mark.parametrize("count", [1, 3])
@in_virtual_time
async def test_shutdown_ends_operations_in_progress(count):
    for moment in range(30):
        swarm = Swarm(seed=22, delay=0.0)
        node = (await swarm.grow(count))[-1]
        calls = [
            asyncio.ensure_future(call)
            for call in (node.store("key", 1, later(100)), node.get("other"), node.find_nearest_nodes([DHTID(1)]))
        ]
        for _ in range(moment):
            await asyncio.sleep(0)
        await node.shutdown()
        _, waiting = await asyncio.wait(calls, timeout=1)
        assert not waiting, f"after {moment} turns of the loop"
        for other in swarm.nodes:
            await other.shutdown()
        for call in calls:
            assert isinstance(call.exception(), DHTError | None)


@in_virtual_time
async def test_shutdown_resolves_futures_of_unstarted_searches():
    swarm = Swarm(seed=21)
    node, _ = await swarm.grow(2)
    futures = await node.get_many(["missing"], return_futures=True)
    await node.shutdown()
    with pytest.raises(asyncio.CancelledError):
        await futures["missing"]
    assert len(node.pending_get_requests) == 0


# --- making nodes -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_only_create_makes_nodes():
    with pytest.raises(AssertionError, match=r"DHTNode\.create"):
        DHTNode(protocol=None, config=None, owns_p2p=False)  # type: ignore[arg-type]


@in_virtual_time
async def test_settings_of_an_existing_peer_are_refused():
    p2p = await Swarm().p2p()
    with pytest.raises(ValueError, match=r"host_maddrs.* no effect together with p2p"):
        await DHTNode.create(p2p=p2p, host_maddrs=[])
    with pytest.raises(TypeError, match="authorizer must derive from AuthorizerBase"):
        await DHTNode.create(p2p=p2p, authorizer=object())  # type: ignore[arg-type]
    for setting in ("bucket_size", "num_replicas", "num_workers", "chunk_size", "depth_modulo"):
        with pytest.raises(ValueError, match=f"{setting} must be at least 1"):
            await DHTNode.create(p2p=p2p, **{setting: 0})
    assert p2p.is_alive


@in_virtual_time
async def test_a_node_shuts_down_its_own_peer_only():
    swarm = Swarm()
    p2p = await swarm.p2p()
    await (await DHTNode.create(p2p=p2p)).shutdown()
    assert p2p.is_alive
    node = await DHTNode.create(transport=MemoryNetwork().transport())
    await node.shutdown()
    assert not node.p2p.is_alive
    created: list[P2P] = []
    make = P2P.create

    async def remember(*args, **kwargs):
        created.append(await make(*args, **kwargs))
        return created[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2P, "create", remember)
        with pytest.raises(ValueError, match="blacklist_time"):
            await DHTNode.create(transport=MemoryNetwork().transport(), blacklist_time=-1)
    assert not created[0].is_alive


# --- the same seed gives the same run ---------------------------------------------------------------------------------

STORY = """
import asyncio, hashlib
from shoal.base.clock import get_dht_time
from tests.dht.swarm import Swarm
from shoal.testing import run

async def main():
    swarm = Swarm(seed=123)
    await swarm.grow(25)
    for number in range(10):
        await swarm.nodes[number].store(f"key {number}", number, get_dht_time() + 100, subkey=number % 3 or None)
    await swarm.kill(swarm.nodes[3])
    swarm.fall_silent(swarm.nodes[4])
    for number in range(10):
        await swarm.nodes[-number - 1].get(f"key {number}", latest=True)
    story = [
        (int(n.node_id), [(int(i), str(p)) for i, p in n.protocol.routing_table], n.p2p.metrics.calls_made,
         sorted(map(int, (k for k, _ in n.protocol.storage.items()))), n.p2p.metrics.bytes_received)
        for n in swarm.nodes
    ]
    return hashlib.sha256(repr((story, get_dht_time())).encode()).hexdigest()

print(run(main()))
"""


@pytest.mark.slow_drill
def test_same_seed_gives_the_same_run():
    stories = [
        subprocess.run(
            [sys.executable, "-c", STORY],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert stories[0] == stories[1]
    assert len(stories[0].strip()) == 64
