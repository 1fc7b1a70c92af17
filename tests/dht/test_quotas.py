"""How much of a node's memory others may fill, whose records are refused, and which go first."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc

import pytest

from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.base.serializer import MSGPackSerializer
from shoal.dht import local_records
from shoal.dht.local_records import LocalRecords, Payer, Place, Room
from shoal.dht.records import HaveSet, NewRecord
from shoal.dht.routing import DHTID
from shoal.dht.storage import DictionaryDHTValue
from shoal.dht.validation import PLAIN_VALUE, WHOLE_DICTIONARY, AcceptedRecords, DHTRecord, Reason
from shoal.metrics import Metrics
from shoal.net.server import CallServer
from shoal.net.transport import Stream
from shoal.p2p import Multiaddr
from tests.dht.swarm import Swarm, addresses
from tests.dht.virtual_time import in_virtual_time

FAR, NEAR = 2**159, 2**80
ALICE, BOB = Payer("alice", "alice"), Payer("bob", "bob")


def later(seconds: float) -> float:
    return get_dht_time() + seconds


def plain(key: int, size: int = 100, seconds: float = 1000, in_cache: bool = False) -> NewRecord:
    return NewRecord(DHTID(key), PLAIN_VALUE, b"x" * size, later(seconds), in_cache)


def entry(key: int, subkey: object, size: int = 100, seconds: float = 1000) -> NewRecord:
    return NewRecord(DHTID(key), MSGPackSerializer.dumps(subkey), b"x" * size, later(seconds))


def some_records(room: Room, metrics: Metrics | None = None) -> LocalRecords:
    return LocalRecords(None, None, own_id=0, metrics=metrics, room=room)


def records_of_size(number: int) -> Room:
    """Room for so many records of a hundred bytes, of which one peer may have a quarter and a host a half."""
    size = local_records.size_of_record(None, b"x" * 100)
    return Room(number * size, number * size // 4, number, number * size // 2, number)


@pytest.fixture(autouse=True)
def all_lines(monkeypatch):
    """Another test may have caused the same line a moment ago."""
    monkeypatch.setattr(local_records, "warn_seldom", Seldom(local_records.logger.warning))


# --- how much there is ------------------------------------------------------------------------------------------------


def fill_with_plain_values(rng, here):
    for number in range(400):
        yield here.keep(NewRecord(DHTID(rng.getrandbits(160)), PLAIN_VALUE, rng.randbytes(100), later(100 + number)))


def fill_one_dictionary(rng, here):
    for number in range(400):
        subkey = MSGPackSerializer.dumps(rng.randbytes(100))
        yield here.keep(NewRecord(DHTID(5), subkey, rng.randbytes(300), later(100 + number)))


def fill_many_dictionaries(rng, here):
    for number in range(400):
        subkey = MSGPackSerializer.dumps(f"{rng.random()}")
        yield here.keep(NewRecord(DHTID(rng.getrandbits(160)), subkey, b"", later(100 + number)))


def fill_with_tuples(rng, here):
    """Each byte of such a subkey takes dozens in memory."""
    for number in range(40):
        subkey = MSGPackSerializer.dumps((number, *((each,) for each in rng.randbytes(300))))
        yield here.keep(NewRecord(DHTID(5), subkey, b"", later(100 + number)))


def fill_and_replace_large_subkeys(rng, here):
    """Each time the same subkey, in new memory."""
    subkey = MSGPackSerializer.dumps(rng.randbytes(3000))
    for number in range(1200):
        yield here.keep(NewRecord(DHTID(number % 100), subkey, b"", later(100 + number)))


def fill_and_replace_entries(rng, here):
    for number in range(1800):
        subkey = MSGPackSerializer.dumps(number % 2)
        yield here.keep(NewRecord(DHTID(number % 400 // 2), subkey, rng.randbytes(100), later(100 + number)))


def fill_and_replace(rng, here):
    for number in range(1800):
        yield here.keep(NewRecord(DHTID(number % 400), PLAIN_VALUE, rng.randbytes(100), later(100 + number)))


def fill_a_cache(rng, here):
    for number in range(400):
        yield here.keep(NewRecord(DHTID(rng.getrandbits(160)), PLAIN_VALUE, b"", later(100 + number), in_cache=True))


FILLINGS = [
    fill_with_plain_values,
    fill_one_dictionary,
    fill_many_dictionaries,
    fill_with_tuples,
    fill_and_replace,
    fill_and_replace_large_subkeys,
    fill_and_replace_entries,
    fill_a_cache,
]


FILLINGS_OF_A_SMALL_ROOM = [(fill_with_plain_values, Room(nbytes=250_000)), (fill_a_cache, Room(nbytes=250_000))]


@pytest.mark.parametrize(("fill", "room"), [*((each, Room()) for each in FILLINGS), *FILLINGS_OF_A_SMALL_ROOM])
def test_what_is_counted_is_what_it_takes(fill, room):
    rng = random.Random(1)
    gc.collect()
    tracemalloc.start()
    try:
        here = LocalRecords(None, None, room=room)
        before = tracemalloc.get_traced_memory()[0]
        kept = list(fill(rng, here))
        assert all(kept) if room == Room() else any(kept)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    least = 0.15 if fill is fill_with_tuples else 0.4  # each subkey is charged as if others of its size were left over
    assert least * here.nbytes < taken < 1.15 * here.nbytes


@in_virtual_time
async def test_what_has_expired_takes_nothing():
    here = LocalRecords(None, None)
    for number in range(100):
        assert here.keep(entry(7, number, seconds=10))
        assert here.keep(plain(100 + number, seconds=20, in_cache=number % 2 == 0))
    assert here.keep(entry(7, "stays", seconds=1000))
    await asyncio.sleep(30)
    assert here.keep(plain(1000))
    size = 2 * local_records.BYTES_PER_RECORD + 2 * 100
    assert size < here.nbytes < size + 400
    held = here.storage.get(DHTID(7)).value
    assert held.subkeys() == ["stays"], "nobody has looked at the dictionary since"


@in_virtual_time
async def test_a_replaced_record_takes_no_room():
    here = some_records(records_of_size(8))
    for number in range(100):
        assert here.keep(plain(1, seconds=10 + number), ALICE)
        assert here.keep(entry(2, "s", size=10, seconds=10 + number), BOB)
        await asyncio.sleep(1)
    assert here.keep(plain(2, seconds=1000), BOB), "a whole dictionary makes way"
    assert here.nbytes == 2 * local_records.size_of_record(None, b"x" * 100)
    assert here.keep(entry(1, "s", size=100, seconds=2000), ALICE), "so does a plain value"
    await asyncio.sleep(3000)
    assert here.keep(plain(3))
    assert here.nbytes == local_records.size_of_record(None, b"x" * 100)


@in_virtual_time
async def test_what_is_cleared_takes_nothing():
    here = some_records(records_of_size(8))
    for where in (here.storage, here.cache):
        for number in range(100):
            assert here.keep(plain(number, in_cache=where is here.cache), ALICE) or number >= 2
        assert here.keep(entry(1000, "s", size=10), BOB)
        here.storage.clear()
        here.cache.clear()
        assert here.nbytes == 0
        assert not where


@in_virtual_time
async def test_bounded_cache_is_charged_for_its_content():
    here = LocalRecords(10, None)
    for number in range(100):
        assert here.keep(plain(number, seconds=1000 + number, in_cache=True))
    assert len(here.cache) == 10
    assert here.nbytes == 10 * local_records.size_of_record(None, b"x" * 100)


def test_validators_remember_no_large_records():
    accepted = AcceptedRecords()
    tracemalloc.start()
    try:
        for number in range(200):
            accepted.add(DHTRecord(b"key", b"subkey", bytes(2**16), float(number)))
        assert tracemalloc.get_traced_memory()[0] < 200 * 500
    finally:
        tracemalloc.stop()
    assert DHTRecord(b"key", b"subkey", bytes(2**16), 7.0) in accepted
    assert DHTRecord(b"ke", b"ysubkey", bytes(2**16), 7.0) not in accepted
    assert DHTRecord(b"key", b"subkey", bytes(2**16), 7.5) not in accepted


# --- who gets how much ------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_crowded_keys_limit_entries_per_peer():
    """Nobody could read all of them; a newcomer's entry is kept, and told first."""
    carol = Payer("carol", "a network")
    here = some_records(Room(entries_per_key=20, entries_per_key_and_peer=2, entries_per_key_and_host=3))
    assert all(here.keep(entry(NEAR, number), ALICE) for number in range(20))
    assert not here.keep(entry(NEAR, "one more"), ALICE)
    assert here.keep(entry(NEAR, 3, seconds=2000), ALICE), "it has this one"
    assert here.keep(entry(FAR, "another key"), ALICE)
    assert [bool(here.keep(entry(NEAR, f"of bob {number}"), BOB)) for number in range(3)] == [True, True, False]
    others = [Payer(f"dave {number}", "a network") for number in range(2)]
    assert [bool(here.keep(entry(NEAR, f"of {who.peer}"), who)) for who in (carol, *others)] == [True] * 3
    assert not here.keep(entry(NEAR, "erin"), Payer("erin", "a network")), "three of one network"
    told = [here.answer(DHTID(NEAR), [], 10**6, HaveSet(bytes([number]) * 8), 3) for number in range(10)]
    for found in told:
        subkeys = here.unpack_dictionary(DHTID(NEAR), found.value).subkeys()
        assert len([subkey for subkey in subkeys if isinstance(subkey, int)]) == 1, "one of each network"
    for number in range(20):
        here.ledger.forget(Place(False, DHTID(NEAR), number))
    assert all(here.keep(entry(NEAR, f"again {number}"), ALICE) for number in range(4)), "it is not crowded any more"


async def test_half_of_the_room_is_free_for_all():
    metrics = Metrics()
    here = some_records(records_of_size(40), metrics)
    kept = [bool(here.keep(plain(1000 + number), ALICE)) for number in range(40)]
    assert kept == [True] * 20 + [False] * 20, "half of it, although a quarter is one peer's share"
    assert metrics.records_refused == {Reason.PEER_QUOTA: 20}
    assert all(here.keep(plain(2000 + number), BOB) for number in range(10)), "others have theirs"
    assert not here.keep(plain(2010), BOB)
    assert here.keep(plain(2000, seconds=2000), BOB), "to replace one's own takes nothing more"
    assert not here.keep(plain(2001, size=300, seconds=2000), BOB), "unless it is larger"
    assert here.keep(plain(3000)), "what the node itself stores is not refused"


@in_virtual_time
async def test_a_quota_counts_records_too():
    here = some_records(Room(nbytes=30_000, records_per_peer=17))
    kept = [bool(here.keep(plain(1000 + number, size=0), ALICE)) for number in range(20)]
    assert kept == [True] * 17 + [False] * 3
    assert here.keep(plain(1000, size=0, seconds=2000), ALICE)


@in_virtual_time
async def test_peers_of_one_public_network_share_a_quota():
    metrics = Metrics()
    here = some_records(records_of_size(40), metrics)
    kept = [bool(here.keep(plain(number), Payer(f"sybil {number}", "192.0.2.0/24"))) for number in range(40)]
    assert kept == [True] * 20 + [False] * 20
    assert metrics.records_refused == {Reason.HOST_QUOTA: 20}
    assert all(here.keep(plain(100 + number), Payer(number, number)) for number in range(20)), "others have theirs"


@in_virtual_time
async def test_refused_peer_is_named_once(caplog):
    here = some_records(records_of_size(4))
    for number in range(50):
        here.keep(plain(number), ALICE)
    [line] = [record.getMessage() for record in caplog.records]
    assert "refused a record of peer alice, which is over the quota of a peer" in line


# --- what goes --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_farthest_and_longest_lived_records_go_first(caplog):
    metrics = Metrics()
    here = some_records(records_of_size(8), metrics)
    for number, (key, seconds, in_cache) in enumerate(
        [(FAR, 100, False), (FAR + 1, 900, False), (NEAR, 100, False), (NEAR + 1, 900, False), (NEAR + 2, 50, True)]
    ):
        assert here.keep(plain(key, seconds=seconds, in_cache=in_cache), Payer(number, number))
    for number in range(3):
        assert here.keep(plain(number, seconds=10), Payer(f"p{number}", f"p{number}"))
    gone = []
    for number in range(3, 8):
        before = [key for shelf in (here.storage, here.cache) for key, _ in shelf.items()]
        assert here.keep(plain(number, seconds=10), Payer(f"p{number}", f"p{number}"))
        after = [key for shelf in (here.storage, here.cache) for key, _ in shelf.items()]
        gone += [key for key in before if key not in after]
    assert gone == [NEAR + 2, FAR + 1, FAR, NEAR + 1, NEAR]
    assert metrics.records_evicted == 5
    assert not here.keep(plain(FAR, seconds=1), Payer("late", "late")), "all that is there is better"
    assert here.nbytes <= here.ledger.room.nbytes
    assert len([line for line in caplog.records if "fill" in line.getMessage()]) == 1


@in_virtual_time
async def test_dictionary_without_lost_entries_is_believed():
    """The one that would live longest goes first, and no dictionary may claim to outlive its entries."""
    here = some_records(records_of_size(8))
    for number in range(20):
        here.keep(entry(FAR, number, seconds=100 + number), Payer(number, number))
    held = here.find(DHTID(FAR))[0]
    assert 0 < len(held) < 20
    assert 0 in held.subkeys()
    packed = here.answer(DHTID(FAR), [], 10**6)
    assert here.read(DHTID(FAR), packed.found, packed.value, packed.expiration)[0].subkeys() == held.subkeys()


@in_virtual_time
async def test_strangers_leave_room_for_others():
    """They store what lives a day, all over the table, from many peers of few networks; honest records come later."""
    rng, room = random.Random(2), records_of_size(400)
    here = some_records(room)
    for number in range(4000):
        payer = Payer(f"liar {number % 50}", f"network {number % 3}")
        here.keep(NewRecord(DHTID(rng.getrandbits(160)), PLAIN_VALUE, bytes(100), later(86000)), payer)
    assert here.nbytes <= room.nbytes
    honest = [NewRecord(DHTID(rng.getrandbits(150)), PLAIN_VALUE, bytes(100), later(60)) for _ in range(80)]
    for number, record in enumerate(honest):
        assert here.keep(record, Payer(f"honest {number % 10}", f"honest {number % 10}"))
    for number in range(4000):
        payer = Payer(f"liar {number % 50}", f"network {number % 3}")
        here.keep(NewRecord(DHTID(rng.getrandbits(160)), PLAIN_VALUE, bytes(100), later(86000)), payer)
    assert all(here.find(record.key_id) is not None for record in honest)
    assert here.nbytes <= room.nbytes


@in_virtual_time
async def test_whole_dictionaries_are_charged_entry_by_entry():
    here = some_records(records_of_size(40))
    dictionary: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    for number in range(100):
        dictionary.store(number, b"x" * 100, later(1000))
    assert here.keep(NewRecord(DHTID(1), WHOLE_DICTIONARY, dictionary.packb(), later(1000)), ALICE)
    assert 15 < len(here.storage.get(DHTID(1)).value) <= 20


# --- between nodes ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_node_charges_those_who_store():
    swarm = Swarm()
    first = await swarm.node()
    second = await swarm.node(initial_peers=await addresses(first))
    assert await second.store("key", "value", later(60))
    ledger = first.protocol.records.ledger
    assert ledger.bytes_of(Payer(second.peer_id, second.peer_id)) > local_records.BYTES_PER_RECORD
    assert ledger.bytes_of(Payer(first.peer_id, first.peer_id)) == 0


@pytest.mark.parametrize(
    ("seen", "network"),
    [
        ("/ip4/93.184.216.34/tcp/1", "93.184.216.0/24"),
        ("/ip6/2606:2800:220:1::5/tcp/1", "2606:2800:220::/48"),
        ("/ip4/192.168.1.5/tcp/1", None),
        ("/ip4/127.0.0.1/tcp/1", None),
    ],
)
@in_virtual_time
async def test_networks_follow_from_connection_addresses(seen, network, monkeypatch):
    accept = CallServer.accept

    def accept_from_there(server: CallServer, stream: Stream) -> None:
        stream.remote_address = Multiaddr(seen)
        accept(server, stream)

    monkeypatch.setattr(CallServer, "accept", accept_from_there)
    swarm = Swarm()
    node, other = await swarm.node(), await swarm.node()
    other.p2p.add_addresses(node.peer_id, await addresses(node))
    await other.protocol.call_ping(node.peer_id)
    node.p2p.add_addresses(other.peer_id, ["/ip4/8.8.8.8/tcp/1"])  # what it may say
    host = network or other.peer_id
    assert node.p2p.host_seen_of(other.peer_id) == host
    assert await other.store("key", "value", later(60))
    ledger = node.protocol.records.ledger
    assert ledger.bytes_of(Payer(other.peer_id, host)) > 0
    assert ledger.quotas[1].bytes_of(host) == ledger.bytes_of(Payer(other.peer_id, None))
    await other.p2p.shutdown()
    await asyncio.sleep(10)
    assert node.p2p.host_seen_of(other.peer_id) == other.peer_id, "it has left"


@in_virtual_time
async def test_peer_belongs_to_the_network_it_connects_from(monkeypatch):
    accept, places = CallServer.accept, ["/ip4/192.168.1.5/tcp/1"]

    def accept_from_there(server: CallServer, stream: Stream) -> None:
        stream.remote_address = Multiaddr(places[-1])
        accept(server, stream)

    monkeypatch.setattr(CallServer, "accept", accept_from_there)
    swarm = Swarm()
    node, other = await swarm.node(), await swarm.node()
    other.p2p.add_addresses(node.peer_id, await addresses(node))
    await other.p2p.pool.prepare(node.peer_id, 1)
    await other.protocol.call_ping(node.peer_id)
    assert node.p2p.host_seen_of(other.peer_id) == other.peer_id
    places.append("/ip4/93.184.216.34/tcp/1")
    await other.p2p.pool.prepare(node.peer_id, 2)
    await asyncio.sleep(1)
    assert node.p2p.host_seen_of(other.peer_id) == "93.184.216.0/24"
    assert node.p2p.address_seen_of(other.peer_id) == places[-1]
