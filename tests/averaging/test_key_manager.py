"""Keys under which averagers find each other, and what is declared there."""

from __future__ import annotations

import logging
import math
import random

import pytest

from shoal import DHT
from shoal.averaging.control import GroupInfo
from shoal.averaging.groups.keys import GroupKeyManager, is_valid_group, next_group_bits
from shoal.base.clock import get_dht_time
from shoal.dht.crypto import tag_of
from shoal.dht.validation import CompositeValidator
from shoal.p2p import Identity, PeerID


def some_peer(number: int) -> PeerID:
    return Identity.generate(random.Random(number)).peer_id


@pytest.fixture
def dht():
    dht = DHT(start=True)
    yield dht
    dht.shutdown()


@pytest.fixture
def other_dht(dht):
    other = DHT(initial_peers=dht.get_visible_maddrs(), start=True)
    yield other
    other.shutdown()


async def test_averagers_are_declared_refreshed_and_withdrawn(dht, other_dht):
    keys = GroupKeyManager(dht, "run", initial_group_bits="10110", target_group_size=2)
    keys_of_bob = GroupKeyManager(other_dht, "run", initial_group_bits="10110", target_group_size=2)
    assert keys.current_key == "run.0b10110"
    alice, bob = dht.peer_id, other_dht.peer_id
    now = get_dht_time()
    assert await keys.declare_averager(keys.current_key, alice, expiration_time=now + 60)
    assert await keys_of_bob.declare_averager(keys.current_key, bob, expiration_time=now + 61)
    found = await keys.get_averagers(keys.current_key, only_active=True)
    assert sorted(found, key=lambda item: item[1]) == [(alice, now + 60), (bob, now + 61)]

    assert await keys.declare_averager(keys.current_key, alice, expiration_time=now + 66)
    assert (alice, now + 66) in await keys.get_averagers(keys.current_key, only_active=True)

    with pytest.raises(ValueError, match="itself can declare"):
        await keys.declare_averager(keys.current_key, bob, expiration_time=now + 61, looking_for_group=False)
    assert await keys_of_bob.declare_averager(keys.current_key, bob, expiration_time=now + 61, looking_for_group=False)
    gone: list[tuple[PeerID, float]] = []
    assert await keys.get_averagers(keys.current_key, only_active=True, gone=gone) == [(alice, now + 66)]
    assert gone == [(bob, math.nextafter(now + 61, math.inf))]
    with_bob = dict(await keys.get_averagers(keys.current_key, only_active=False))
    assert with_bob == {alice: now + 66, bob: math.nextafter(now + 61, math.inf)}


async def test_nobody_is_declared_under_another_key(dht):
    keys = GroupKeyManager(dht, "run", "0", None)
    assert await keys.declare_averager(keys.current_key, dht.peer_id, get_dht_time() + 60)
    for key in ("run.0b", "run.0b1", "run.0b00", "other.0b0"):
        assert await keys.get_averagers(key, only_active=False) == []


async def test_a_node_serves_as_well_as_the_object_of_its_users(dht):
    expiration = get_dht_time() + 60

    async def declare(_: object, node: object) -> list[tuple[PeerID, float]]:
        keys = GroupKeyManager(node, "run", "", None)
        await keys.declare_averager(keys.current_key, dht.peer_id, expiration)
        return await keys.get_averagers(keys.current_key, only_active=True)

    assert dht.run_coroutine(declare) == [(dht.peer_id, expiration)]


async def test_nobody_withdraws_what_another_one_has_declared(dht, other_dht):
    keys, expiration = GroupKeyManager(dht, "run", "", None), get_dht_time() + 60
    assert await keys.declare_averager(keys.current_key, dht.peer_id, expiration)
    other_dht.node.protocol.records.record_validator = CompositeValidator()  # its node does what it is told
    withdrawal = {"subkey": tag_of(dht.peer_id), "return_future": True}
    await other_dht.store(keys.current_key, None, expiration + 60, **withdrawal)
    assert await keys.get_averagers(keys.current_key, only_active=True) == [(dht.peer_id, expiration)]


@pytest.mark.parametrize("nonsense", [5, {}, {"a": 1}])
async def test_records_that_make_no_sense_are_skipped_and_said(dht, other_dht, caplog, nonsense):
    keys = GroupKeyManager(dht, "run", "", None)
    expiration = get_dht_time() + 60
    assert await keys.declare_averager(keys.current_key, dht.peer_id, expiration)
    for store, subkey, value in (
        (dht.store, b"no peer", ["/ip4/nowhere/tcp/1"]),
        (other_dht.store, tag_of(other_dht.peer_id), nonsense),
    ):
        assert await store(keys.current_key, value, expiration, subkey=subkey, return_future=True)
    with caplog.at_level(logging.WARNING):
        assert await keys.get_averagers(keys.current_key, only_active=True) == [(dht.peer_id, expiration)]
        assert await keys.get_averagers(keys.current_key, only_active=True) == [(dht.peer_id, expiration)]
    assert caplog.text.count("skipped a malformed record") == 1, "not for each record that a stranger makes"


def test_what_is_a_key():
    assert is_valid_group("run.0b")
    assert is_valid_group("run.0b0101")
    for wrong in ("run", "run.0b2", "run.01", "a.b.0b1", ".0b1", "run.0b1 "):
        assert not is_valid_group(wrong)


async def test_bad_bits_and_keys_are_refused(dht):
    with pytest.raises(AssertionError, match="0 and 1 only"):
        GroupKeyManager(dht, "run", "012", None)
    with pytest.raises(AssertionError, match="not a group key"):
        await GroupKeyManager(dht, "run", "", None).get_averagers("run", only_active=True)


@pytest.mark.parametrize(("size", "target"), [(16, 16), (15, 16), (2, 2), (5, None), (16, None), (20, 16)])
def test_members_of_a_group_go_to_different_buckets(size, target):
    group_id = b"g" * 20
    bits = [next_group_bits("110010", group_id, position, size, target) for position in range(size)]
    assert len(set(bits)) == size
    assert {len(each) for each in bits} == {6}
    added = math.ceil(math.log2(max(size, target or 1)))
    assert {each[: 6 - added] for each in bits} == {"110010"[added:]}
    assert bits == [next_group_bits("110010", group_id, position, size, target) for position in range(size)]
    assert bits != [next_group_bits("110010", b"h" * 20, position, size, target) for position in range(size)]


def test_without_bits_all_stay_in_one_bucket():
    assert next_group_bits("", b"g" * 20, 1, 4, 4) == ""


async def test_a_group_moves_its_members(dht):
    keys = GroupKeyManager(dht, "run", "0101", 2)
    peers = (some_peer(1), dht.peer_id)
    keys.update_key_on_group_assembled(GroupInfo(b"g" * 20, peers, (b"", b"")))
    assert keys.group_bits == next_group_bits("0101", b"g" * 20, 1, 2, 2)
    assert keys.current_key == f"run.0b{keys.group_bits}"


async def test_many_averagers_with_groups_of_a_size_are_divided_by_bits_drawn_anew(dht):
    keys = GroupKeyManager(dht, "run", "", 4)
    assert keys.draw_key(0) == keys.current_key == "run.0b"
    drawn = {keys.draw_key(4) for _ in range(100)}
    assert drawn == {f"run.0b{number:03b}" for number in range(8)}, "twice as many as share a key of progress"
    assert keys.draw_key(1) == "run.0b", "all that share two of those meet under one"
    assert keys.draw_key(0) == "run.0b", "the swarm has become small"
    for bits, size in (("01", 4), ("", None)):
        keys = GroupKeyManager(dht, "run", bits, size)
        assert keys.draw_key(4) == f"run.0b{bits}", "a user's own bits, or one group of all"


async def test_few_peers_look_one_bit_above_and_below(dht, other_dht):
    keys, other = GroupKeyManager(dht, "run", "", 3), GroupKeyManager(other_dht, "run", "", 3)
    key, expiration = keys.draw_key(3), get_dht_time() + 60
    bits = key.rpartition("0b")[2]
    above, below = f"run.0b{bits[:-1]}", {f"run.0b{bits}{bit}" for bit in "01"}
    for each in (above, *below):
        for manager, peer in ((keys, dht.peer_id), (other, other_dht.peer_id)):
            assert await manager.declare_averager(each, peer, expiration)

    async def find_more(manager: GroupKeyManager, count: int) -> str:
        return await dht.portal.submit(manager.find_more(key, count))

    assert await find_more(keys, 3) == key, "a whole group is there"
    assert await find_more(keys, 1) == above
    assert await find_more(keys, 1) in below
    assert await find_more(keys, 2) == key, "there are not more"
    assert await find_more(GroupKeyManager(dht, "run", bits, 3), 1) == key, "it has bits of its own"
