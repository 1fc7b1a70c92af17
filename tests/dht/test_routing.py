"""Ids, buckets, and the routing table."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dht.routing import DHTID, SECONDS_BETWEEN_CHECKS, KBucket, RoutingTable
from shoal.p2p import PeerID
from tests.dht.virtual_time import in_virtual_time

ids = st.integers(min_value=DHTID.MIN, max_value=DHTID.MAX - 1).map(DHTID)


def peer(number: int) -> PeerID:
    return PeerID(b"peer %d" % number)


def random_table(count: int, bucket_size: int, depth_modulo: int, seed: int = 0) -> RoutingTable:
    rng = random.Random(seed)
    table = RoutingTable(DHTID.generate(rng=rng), bucket_size, depth_modulo)
    for number in range(count):
        table.add_or_update_node(DHTID.generate(rng=rng), peer(number))
    return table


# --- ids --------------------------------------------------------------------------------------------------------------


@given(ids)
def test_ids_survive_as_bytes(one):
    assert len(one.to_bytes()) == len(bytes(one)) == 20
    assert DHTID.from_bytes(one.to_bytes()) == one
    assert DHTID.from_bytes(bytes(one)) == one


@pytest.mark.parametrize("value", [-1, 2**160, 2**200])
def test_ids_out_of_range_are_refused(value):
    with pytest.raises(AssertionError):
        DHTID(value)


@given(ids, ids, ids)
def test_xor_is_a_metric(a, b, c):
    assert a.xor_distance(b) == b.xor_distance(a)
    assert (a.xor_distance(b) == 0) == (a == b)
    assert a.xor_distance(c) <= a.xor_distance(b) + b.xor_distance(c)
    assert a.xor_distance([b, c]) == [a.xor_distance(b), a.xor_distance(c)]


@given(st.lists(ids, min_size=1, max_size=5))
def test_common_prefix_as_text(some):
    texts = [f"{int(one):0160b}" for one in some]
    expected = next((i for i in range(160) if len({text[i] for text in texts}) > 1), 160)
    assert DHTID.longest_common_prefix_length(*some) == expected


def test_keys_of_different_types_have_different_ids():
    keys = [1, True, 1.0, "1", b"1", [1], (1,), [], (), "", b"", 0, False]
    assert len({DHTID.generate(key) for key in keys}) == len(keys)


def test_random_ids_come_from_the_given_source():
    assert DHTID.generate(rng=random.Random(1)) == DHTID.generate(rng=random.Random(1))
    assert DHTID.generate(rng=random.Random(1)) != DHTID.generate(rng=random.Random(2))
    assert DHTID.generate() != DHTID.generate()


# --- buckets ----------------------------------------------------------------------------------------------------------


def test_split_puts_midpoint_into_upper_half():
    bucket = KBucket(0, DHTID.MAX, size=4)
    middle = DHTID(DHTID.MAX // 2)
    for node_id in (DHTID(middle - 1), middle):
        bucket.add_or_update_node(node_id, peer(int(node_id == middle)))
    lower, upper = bucket.split()
    assert list(lower.nodes_to_peer_id) == [middle - 1]
    assert list(upper.nodes_to_peer_id) == [middle]
    assert upper.has_in_range(middle)
    assert not lower.has_in_range(middle)


def test_a_split_lets_replacements_move_up():
    bucket = KBucket(0, DHTID.MAX, size=1)
    low, high = DHTID(1), DHTID(DHTID.MAX - 1)
    assert bucket.add_or_update_node(low, peer(0))
    assert not bucket.add_or_update_node(high, peer(1))
    lower, upper = bucket.split()
    assert list(lower.nodes_to_peer_id) == [low]
    assert list(upper.nodes_to_peer_id) == [high]
    assert not upper.replacement_nodes


def test_the_newest_replacement_follows_a_member():
    bucket = KBucket(0, DHTID.MAX, size=1)
    for number in range(3):
        bucket.add_or_update_node(DHTID(number), peer(number))
    assert list(bucket.replacement_nodes) == [1, 2]
    bucket.remove(DHTID(0))
    assert list(bucket.nodes_to_peer_id) == [2]
    assert list(bucket.replacement_nodes) == [1]


def test_suspects_stay_until_a_living_node_comes():
    table = RoutingTable(DHTID(0), bucket_size=2, depth_modulo=1)
    first, second, third, fourth = (DHTID(2**159 + number) for number in range(4))
    table.add_or_update_node(DHTID(1), peer(100))
    for number, node_id in enumerate((first, second)):
        table.add_or_update_node(node_id, peer(number))
    table.suspect(first)
    table.suspect(second)
    assert table.suspects == {first: peer(0), second: peer(1)}
    assert first not in table
    assert peer(0) not in table
    assert [node_id for node_id, _ in table.get_nearest_neighbors(first, 5)] == [1], "nobody is told of suspects"
    table.add_or_update_node(third, peer(2))
    assert table.suspects == {second: peer(1)}, "who fell silent first goes first"
    assert peer(0) not in table.peer_id_to_node
    table.add_or_update_node(second, peer(1))
    assert not table.suspects
    assert [node_id for node_id, _ in table] == [1, third, second]
    table.add_or_update_node(fourth, peer(3))
    table.suspect(third)
    assert [node_id for node_id, _ in table] == [1, second, fourth], "somebody was waiting for its place"
    assert not table.suspects


def test_an_outage_leaves_a_table_of_suspects():
    table = random_table(200, 20, 5)
    members = dict(table)
    for node_id in members:
        table.suspect(node_id)
        check_invariants(table)
    while len(table):  # those who had waited for a place
        for node_id, _ in list(table):
            table.suspect(node_id)
    assert len(table.suspects) >= 0.8 * len(members)
    assert all(len(bucket.suspects) <= 20 for bucket in table.buckets)
    check_invariants(table)


def test_the_id_of_a_suspect_is_free():
    table = RoutingTable(DHTID(0), 20, 5)
    table.add_or_update_node(DHTID(7), peer(1))
    table.suspect(DHTID(7))
    table.add_or_update_node(DHTID(7), peer(2))
    assert table[DHTID(7)] == peer(2)
    check_invariants(table)


@in_virtual_time
async def test_full_bucket_checks_its_oldest_member_rarely():
    import asyncio

    table = RoutingTable(DHTID(0), bucket_size=2, depth_modulo=1)
    far = [DHTID(2**159 + number) for number in range(8)]
    table.add_or_update_node(DHTID(1), peer(100))
    for number in (0, 1):
        assert table.add_or_update_node(far[number], peer(number)) is None
    table.add_or_update_node(far[0], peer(0))  # seen again: now 1 is the oldest
    assert table.add_or_update_node(far[2], peer(2)) == (far[1], peer(1))
    assert table.add_or_update_node(far[3], peer(3)) is None, "too early"
    await asyncio.sleep(SECONDS_BETWEEN_CHECKS)
    assert table.add_or_update_node(far[3], peer(3)) == (far[0], peer(0)), "1 is being checked already"
    await asyncio.sleep(SECONDS_BETWEEN_CHECKS)
    assert table.add_or_update_node(far[4], peer(4)) is None, "everybody is being checked"
    table.add_or_update_node(far[1], peer(1))  # it answered
    await asyncio.sleep(SECONDS_BETWEEN_CHECKS)
    assert table.add_or_update_node(far[4], peer(4)) == (far[1], peer(1))
    del table[far[1]]  # it did not
    assert table.get(far[1]) is None
    assert list(table.bucket_of(far[0]).nodes_to_peer_id) == [far[0], far[4]]


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_hundred_nodes_fit_without_replacements():
    table = random_table(100, 20, 5)
    assert 3 <= len(table.buckets) <= 10
    assert not any(bucket.replacement_nodes for bucket in table.buckets)
    assert len(table) == 100


@pytest.mark.parametrize(
    ("bucket_size", "depth_modulo", "fewest", "most"),
    [(20, 5, 45, 65), (50, 5, 35, 45), (20, 10, 650, 800), (20, 1, 7, 15)],
)
def test_number_of_buckets_for_ten_thousand_nodes(bucket_size, depth_modulo, fewest, most):
    table = random_table(10_000, bucket_size, depth_modulo)
    assert fewest <= len(table.buckets) <= most
    if (bucket_size, depth_modulo) == (20, 5):
        assert 800 <= len(table) <= 1100
    check_invariants(table)


def check_invariants(table: RoutingTable) -> None:
    assert table.buckets[0].lower == DHTID.MIN
    assert table.buckets[-1].upper == DHTID.MAX
    for left, right in zip(table.buckets, table.buckets[1:], strict=False):
        assert left.upper == right.lower
    known = {}
    for bucket in table.buckets:
        assert len(bucket.nodes_to_peer_id) + len(bucket.suspects) <= table.bucket_size
        assert len(bucket.replacement_nodes) <= table.bucket_size
        assert not bucket.replacement_nodes or len(bucket) == table.bucket_size
        for node_id, peer_id in (bucket.nodes_to_peer_id | bucket.suspects | bucket.replacement_nodes).items():
            assert bucket.has_in_range(node_id)
            assert peer_id not in known, "a peer with two ids"
            known[peer_id] = node_id
    assert known == table.peer_id_to_node


operations = st.lists(
    st.tuples(st.sampled_from(["see", "forget", "suspect"]), st.integers(0, 40), st.integers(0, 40)), max_size=150
)


@given(ids, operations, st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_table_stays_consistent(own_id, operations, bucket_size, depth_modulo, rng):
    table = RoutingTable(own_id, bucket_size, depth_modulo)
    node_ids = [DHTID(rng.getrandbits(160) if i % 2 else own_id ^ (1 << rng.randrange(160))) for i in range(41)]
    for operation, which_node, which_peer in operations:
        node_id, peer_id = node_ids[which_node], peer(which_peer)
        if operation == "see":
            holder = table.get(node_id)
            table.add_or_update_node(node_id, peer_id)
            assert table.get(node_id) == (peer_id if holder is None or holder == peer_id else holder)
        elif node_id in table:
            if operation == "suspect":
                table.suspect(node_id)
            else:
                del table[node_id]
            assert node_id not in table
        check_invariants(table)


def test_nobody_takes_over_the_id_of_another_peer():
    table = RoutingTable(DHTID(0), 20, 5)
    table.add_or_update_node(DHTID(7), peer(1))
    assert table.add_or_update_node(DHTID(7), peer(2)) == (7, peer(1)), "the holder is asked first"
    assert table[DHTID(7)] == peer(1)
    del table[DHTID(7)]
    table.add_or_update_node(DHTID(7), peer(2))
    assert table[DHTID(7)] == peer(2)


def test_peer_with_new_id_loses_the_old():
    table = RoutingTable(DHTID(0), 20, 5)
    table.add_or_update_node(DHTID(7), peer(1))
    table.add_or_update_node(DHTID(8), peer(1))
    assert DHTID(7) not in table
    assert table[DHTID(8)] == peer(1)
    assert len(table) == 1


def test_the_own_id_never_enters():
    table = RoutingTable(DHTID(5), 20, 5)
    table.add_or_update_node(DHTID(5), peer(1))
    assert len(table) == 0


@given(st.integers(0, 300), st.integers(1, 30), ids, st.integers(0, 100))
def test_nearest_neighbors_are_exact(count, k, query, seed):
    table = random_table(count, bucket_size=5, depth_modulo=3, seed=seed)
    members = dict(table)
    expected = heapq.nsmallest(k, members, key=query.xor_distance)
    assert [node_id for node_id, _ in table.get_nearest_neighbors(query, k)] == expected
    assert all(members[node_id] == found for node_id, found in table.get_nearest_neighbors(query, k))
    if expected:
        excluded = expected[0]
        others = heapq.nsmallest(k, (m for m in members if m != excluded), key=query.xor_distance)
        assert [n for n, _ in table.get_nearest_neighbors(query, k, exclude=excluded)] == others


def test_member_is_its_own_nearest_neighbor():
    table = random_table(200, 20, 5)
    member = next(iter(dict(table)))
    assert table.get_nearest_neighbors(member, 1)[0][0] == member
    assert member not in dict(table.get_nearest_neighbors(member, 300, exclude=member))


def test_lookups_of_what_is_not_there():
    table = random_table(10, 20, 5)
    with pytest.raises(KeyError):
        table[DHTID(1)]
    with pytest.raises(KeyError):
        del table[DHTID(1)]
    assert peer(99) not in table
    assert peer(3) in table


@pytest.mark.parametrize(("bucket_size", "depth_modulo"), [(0, 5), (20, 0)])
def test_senseless_sizes_are_refused(bucket_size, depth_modulo):
    with pytest.raises(ValueError, match="at least 1"):
        RoutingTable(DHTID(0), bucket_size, depth_modulo)


# --- ids that were chosen ---------------------------------------------------------------------------------------------


def test_chosen_ids_come_after_all_others():
    rng, key = random.Random(1), DHTID.generate("key")
    table = RoutingTable(DHTID.generate(rng=rng), 20, 5)
    for number in range(60):
        table.add_or_update_node(DHTID.of_peer(peer(number)), peer(number))
    for number in range(100, 110):
        table.add_or_update_node(DHTID(key ^ (number - 99)), peer(number))
    nearest = table.get_nearest_neighbors(key, 1000)
    honest = [node_id for node_id, who in nearest if node_id == DHTID.of_peer(who)]
    chosen = [node_id for node_id, _ in nearest[len(honest) :]]
    assert [node_id for node_id, _ in nearest[: len(honest)]] == sorted(honest, key=key.xor_distance)
    assert chosen == [DHTID(key ^ number) for number in range(1, 11)]
    assert table.get_nearest_neighbors(key, 20) == nearest[:20]
    assert table.get_nearest_neighbors(key, 20, exclude=honest[0]) == nearest[1:21]
    assert table.get_nearest_neighbors(key, len(nearest), exclude=chosen[3])[-6:] == nearest[-6:]


def test_natural_owner_of_a_chosen_id_is_believed():
    table, honest = RoutingTable(DHTID(0), 20, 5), DHTID.of_peer(peer(1))
    table.add_or_update_node(honest, peer(2))
    assert honest in table.chosen
    del table[honest]
    table.add_or_update_node(honest, peer(1))
    assert honest not in table.chosen
    table.add_or_update_node(DHTID(5), peer(1))
    assert 5 in table.chosen, "this peer has another id now, of its own choice"


def test_chosen_ids_make_way_in_a_full_bucket():
    table = RoutingTable(DHTID(0), bucket_size=4, depth_modulo=1)
    far = [number for number in range(100) if DHTID.of_peer(peer(number)) >= 2**159]
    for number in range(6):
        table.add_or_update_node(DHTID(2**159 + number), peer(1000 + number))
    assert len(table.bucket_of(2**159).nodes_to_peer_id) == 4
    for count, number in enumerate(far[:6], start=1):
        table.add_or_update_node(DHTID.of_peer(peer(number)), peer(number))
        members = table.bucket_of(2**159).nodes_to_peer_id
        assert len(members) == 4
        assert sum(member not in table.chosen for member in members) == min(count, 4)
    assert all(peer(number) in table.peer_id_to_node for number in far[:4])
    table.add_or_update_node(DHTID(2**159 + 50), peer(2000))
    assert DHTID(2**159 + 50) not in table.bucket_of(2**159).nodes_to_peer_id, "it gets nobody's place"


def test_chosen_ids_that_are_gone_are_forgotten():
    table = RoutingTable(DHTID(0), 20, 5)
    table.note_choice(DHTID(0), peer(0))
    for number in range(1, 2000):
        table.add_or_update_node(DHTID(2**159 + number), peer(1))
        assert len(table.chosen) < 40
    assert table.chosen >= {0, 2**159 + 1999}
