"""Concurrent gets share one walk, and records that are read often are cached."""

from __future__ import annotations

import asyncio
import math

import pytest

from shoal.base.clock import get_dht_time
from shoal.dht import DHTID, DHTNode
from shoal.dht.get import CacheRefreshQueue
from shoal.dht.protocol import Blacklist
from shoal.p2p import PeerID
from shoal.peers.book import PeerBook
from tests.dht.swarm import Swarm
from tests.dht.virtual_time import in_virtual_time

KEY = DHTID.generate("key")


def later(seconds: float) -> float:
    return get_dht_time() + seconds


def calls_made(node: DHTNode) -> int:
    return node.p2p.metrics.calls_made


async def spectator(swarm: Swarm, **options) -> DHTNode:
    """A node that is not among the replicas of the key and has no copy of it."""
    nodes = await swarm.grow(12, **options)
    return max(nodes, key=lambda node: node.node_id ^ KEY)


# --- sharing searches -------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_searches_for_one_key_share_results():
    swarm = Swarm(seed=1)
    node = await spectator(swarm, cache_locally=False)
    await swarm.nodes[0].store("key", 1, later(100))
    await node.get("warm up")
    before = calls_made(node)
    alone = await node.get("key")
    cost_of_one = calls_made(node) - before
    swarm.fall_silent(next(n for n in swarm.nodes if n is not node and KEY not in n.protocol.storage))
    before = calls_made(node)
    first = asyncio.ensure_future(node.get("key", latest=True))
    others = [asyncio.ensure_future(node.get("key")) for _ in range(10)]
    await asyncio.sleep(0)
    assert len(node.pending_get_requests[KEY]) == 11
    assert [await other for other in others] == [alone] * 10
    assert not first.done(), "the latest value is more than others asked for"
    assert len(node.pending_get_requests[KEY]) == 1
    assert await first == alone
    assert len(node.pending_get_requests) == 0
    assert calls_made(node) - before < 11 * cost_of_one + 20
    assert alone.value == 1


@in_virtual_time
async def test_a_search_for_the_latest_value_serves_everybody():
    swarm = Swarm(seed=2)
    node = await spectator(swarm, cache_locally=False)
    await swarm.nodes[0].store("key", 1, later(100))
    latest = asyncio.ensure_future(node.get("key", latest=True))
    await asyncio.sleep(0.1)
    others = [
        asyncio.ensure_future(node.get("key", sufficient_expiration_time=later(seconds))) for seconds in (50, 1e6)
    ]
    await latest
    await asyncio.sleep(0)
    assert [other.done() for other in others] == [True, True]
    assert others[1].result() == latest.result()


@in_virtual_time
async def test_finding_nothing_ends_nobody_elses_search():
    swarm = Swarm(seed=3)
    node = await spectator(swarm)
    futures = [(await node.get_many(["key"], return_futures=True))["key"]]
    await asyncio.sleep(0.05)
    futures += [(await node.get_many(["key"], return_futures=True))["key"]]
    assert await futures[0] is None
    assert not futures[1].done()
    assert await futures[1] is None
    assert len(node.pending_get_requests) == 0


@in_virtual_time
async def test_sharing_can_be_switched_off():
    swarm = Swarm(seed=4)
    node = await spectator(swarm, reuse_get_requests=False)
    await swarm.nodes[0].store("key", 1, later(100))
    getting = [asyncio.ensure_future(node.get("key")) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(node.pending_get_requests) == 0
    assert [(await one).value for one in getting] == [1, 1, 1]


# --- copies after reading ---------------------------------------------------------------------------------------------


@in_virtual_time
async def test_found_records_are_cached():
    swarm = Swarm(seed=5)
    node = await spectator(swarm)
    expires = later(100)
    await swarm.nodes[0].store("key", 1, expires)
    first = await node.get("key")
    before = calls_made(node)
    assert await node.get("key") == first
    assert calls_made(node) == before
    assert node.protocol.cache.get(KEY).expiration_time == expires
    assert KEY not in node.protocol.storage


@in_virtual_time
async def test_keeping_copies_can_be_switched_off():
    swarm = Swarm(seed=6)
    node = await spectator(swarm, cache_locally=False, cache_nearest=0)
    await swarm.nodes[0].store("key", 1, later(100))
    for _ in range(3):
        assert (await node.get("key")).value == 1
    assert KEY not in node.protocol.cache


@in_virtual_time
async def test_one_search_may_do_without_copies():
    swarm = Swarm(seed=6)
    node = await spectator(swarm, cache_on_store=False)
    await swarm.nodes[0].store("key", 1, later(100))
    for _ in range(3):
        assert (await node.get("key", latest=True, keep_copies=False)).value == 1
    await asyncio.sleep(1)
    assert not any(KEY in each.protocol.cache for each in swarm.nodes)
    await node.get("key", latest=True)
    assert KEY in node.protocol.cache


@in_virtual_time
async def test_latest_bypasses_outdated_copies():
    swarm = Swarm(seed=7)
    node = await spectator(swarm)
    writer = swarm.nodes[0]
    await writer.store("key", "old", later(100))
    assert (await node.get("key")).value == "old"
    await writer.store("key", "new", later(200))
    assert (await node.get("key")).value == "old"
    assert (await node.get("key", latest=True)).value == "new"
    assert (await node.get("key")).value == "new", "the copy was renewed"


@in_virtual_time
async def test_nearest_node_without_the_record_gets_it():
    swarm = Swarm(seed=8)
    node = await spectator(swarm, num_replicas=2, cache_on_store=False)
    nearest, *_ = sorted(swarm.nodes, key=lambda other: other.node_id ^ KEY)
    source = sorted(swarm.nodes, key=lambda other: other.node_id ^ KEY)[4]
    source.protocol.storage.store(KEY, b"\x01", later(100))
    assert (await node.get("key", latest=True)).value == 1
    await asyncio.sleep(1)
    assert nearest.protocol.cache.get(KEY).value == b"\x01"
    copies = [other for other in swarm.nodes if KEY in other.protocol.cache]
    assert copies == [other for other in swarm.nodes if other in (node, nearest)]


@in_virtual_time
async def test_the_cache_has_a_limit():
    swarm = Swarm(seed=9)
    one, other = await swarm.grow(2, cache_size=3)
    for number in range(10):
        await one.store(f"key {number}", number, later(100 + number))
        await other.get(f"key {number}")
    assert len(one.protocol.cache) <= 3
    assert len(other.protocol.cache) <= 3


# --- copies after writing ---------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_store_updates_the_own_copy():
    swarm = Swarm(seed=10)
    node = await spectator(swarm)
    expires = later(100)
    assert await node.store("key", 1, expires)
    before = calls_made(node)
    assert await node.get("key") == (1, expires)
    assert calls_made(node) == before


@in_virtual_time
async def test_a_refused_store_fetches_what_was_better():
    swarm = Swarm(seed=11)
    node = await spectator(swarm)
    assert await node.store("key", "old", later(50))
    assert await swarm.nodes[0].store("key", "better", later(100))
    assert (await node.get("key")).value == "old"
    assert not await node.store("key", "mine", later(60))
    await asyncio.sleep(2)
    assert (await node.get("key")).value == "better"


@in_virtual_time
async def test_stores_update_cached_dictionaries_only():
    swarm = Swarm(seed=12)
    node = await spectator(swarm)
    assert await node.store("key", 1, later(100), subkey="mine")
    assert KEY not in node.protocol.cache
    await swarm.nodes[0].store("key", 2, later(100), subkey="theirs")
    await node.get("key", latest=True)
    assert await node.store("key", 3, later(200), subkey="mine")
    assert node.protocol.cache.get(KEY).value.get("mine").value == b"\x03"
    assert KEY in node.cache_refresh_queue
    await asyncio.sleep(2)
    await swarm.nodes[0].store("key", 4, later(300), subkey="theirs")
    await asyncio.sleep(2)
    assert {k: v.value for k, v in (await node.get("key")).value.items()} == {"mine": 3, "theirs": 2}


# --- refreshing -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_copies_in_use_are_renewed_before_they_expire():
    swarm = Swarm(seed=13)
    node = await spectator(swarm)
    writer = swarm.nodes[0]
    await writer.store("key", "old", later(20))
    await node.get("key")
    assert len(node.cache_refresh_queue) == 0, "fetched, but not used yet"
    await node.get("key")
    assert len(node.cache_refresh_queue) == 1
    await writer.store("key", "new", later(60))
    await asyncio.sleep(14)
    assert len(node.cache_refresh_queue) == 1
    assert node.protocol.cache.get(KEY).expiration_time < later(7)
    await asyncio.sleep(3)
    assert len(node.cache_refresh_queue) == 0
    assert node.protocol.cache.get(KEY).expiration_time > later(30)
    before = calls_made(node)
    assert (await node.get("key")).value == "new"
    assert calls_made(node) == before


@in_virtual_time
async def test_copies_that_nobody_uses_expire():
    swarm = Swarm(seed=14)
    node = await spectator(swarm)
    await swarm.nodes[0].store("key", "old", later(20))
    await node.get("key")
    await swarm.nodes[0].store("key", "new", later(60))
    await asyncio.sleep(21)
    assert KEY not in node.protocol.cache


@in_virtual_time
async def test_refreshing_can_be_switched_off():
    swarm = Swarm(seed=15)
    node = await spectator(swarm, cache_refresh_before_expiry=0)
    await swarm.nodes[0].store("key", 1, later(20))
    await node.get("key")
    await node.get("key")
    assert len(node.cache_refresh_queue) == 0


@in_virtual_time
async def test_due_keys_are_refreshed_in_batches():
    refreshed: list[tuple[float, list[int], float]] = []
    expirations = {DHTID(number): later(100 + number) for number in range(6)}
    start = get_dht_time()

    async def refresh(keys, sufficient):
        refreshed.append((get_dht_time() - start, list(map(int, keys)), sufficient - start))

    queue = CacheRefreshQueue(
        refresh, expirations.get, lead=5, batch_size=2, spawn=asyncio.get_running_loop().create_task
    )
    for number in (3, 0, 2, 1):
        queue.schedule(DHTID(number), start + 10)
    queue.schedule(DHTID(0), start + 5)
    queue.schedule(DHTID(0), start + 20)
    queue.schedule_before(DHTID(4), expirations[DHTID(4)])
    assert len(queue) == 5
    await asyncio.sleep(200)
    times = [(pytest.approx(at), len(keys)) for at, keys, _ in refreshed]
    assert times == [(5, 1), (10, 2), (10, 1), (99, 1)]
    assert refreshed[0][1] == [0]
    assert sorted(refreshed[1][1] + refreshed[2][1]) == [1, 2, 3]
    longest = 100 + max(refreshed[1][1])
    assert refreshed[1][2] == pytest.approx(longest + 5 + 1), "good enough is what outlives the copies"
    assert len(queue) == 0
    queue.schedule(DHTID(5), start + 300)
    queue.clear()
    assert len(queue) == 0


# --- blacklist --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_bans_grow_with_failures_in_a_row():
    blacklist = Blacklist(base_time=5, backoff_rate=2)
    peer, other = PeerID(b"peer"), PeerID(b"other")
    for duration in (5, 10, 20):
        blacklist.register_failure(peer)
        blacklist.register_failure(peer)  # while banned: does not count
        assert peer in blacklist
        assert other not in blacklist
        await asyncio.sleep(duration - 0.1)
        assert peer in blacklist
        await asyncio.sleep(0.2)
        assert peer not in blacklist
    blacklist.register_failure(peer)
    blacklist.register_success(peer)
    assert peer not in blacklist
    assert len(blacklist) == 0
    blacklist.register_failure(peer)
    blacklist.clear()
    assert peer not in blacklist


def test_no_ban_lasts_more_than_two_hours():
    book, peer = PeerBook(), PeerID(b"very bad")
    book[peer].unanswered = 10**6
    Blacklist(5, 2, book).register_failure(peer)
    assert book[peer].avoided_until < later(6000)


def test_no_time_means_no_ban():
    blacklist = Blacklist(base_time=0, backoff_rate=2)
    blacklist.register_failure(PeerID(b"peer"))
    assert PeerID(b"peer") not in blacklist


@pytest.mark.parametrize(("base_time", "backoff_rate"), [(-1, 2), (5, 0.5), (math.nan, 2)])
def test_senseless_ban_times_are_refused(base_time, backoff_rate):
    with pytest.raises(ValueError, match="blacklist_time must be at least 0"):
        Blacklist(base_time, backoff_rate)


@in_virtual_time
async def test_silent_nodes_are_not_asked_for_a_while():
    swarm = Swarm(seed=16)
    nodes = await swarm.grow(6)
    asker, *others = nodes
    for node in others[:2]:
        swarm.fall_silent(node)
    start = asyncio.get_running_loop().time()
    await asker.get("missing", latest=True)
    assert asyncio.get_running_loop().time() - start < 1, "most of the others have answered"
    await asyncio.sleep(3)
    assert [asker.p2p.book.find(node.peer_id).unanswered for node in others] == [1, 1, 0, 0, 0]
    start = asyncio.get_running_loop().time()
    await asker.get("missing too", latest=True)
    assert asyncio.get_running_loop().time() - start < 1
    swarm.silent_peers.clear()
    await asyncio.sleep(10)
    for node in others[:2]:
        await node.get("missing")
    await asker.get("missing", latest=True)
    assert not any(record.unanswered for record in asker.p2p.book.values())
