"""What a node agrees to keep, and how records travel."""

from __future__ import annotations

import pytest

from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.base.serializer import MSGPackSerializer
from shoal.dht import records, store
from shoal.dht.local_records import LocalRecords
from shoal.dht.records import Found, NewRecord, pack_value, split_into_requests
from shoal.dht.routing import DHTID
from shoal.dht.storage import DictionaryDHTValue
from shoal.dht.store import make_record
from shoal.dht.validation import (
    MAX_LIFETIME_SECONDS,
    PLAIN_VALUE,
    WHOLE_DICTIONARY,
    CompositeValidator,
    Reason,
    check_expiration,
    check_subkey,
)
from shoal.testing import Link, Network, start_dht_nodes
from tests.dht.virtual_time import in_virtual_time

pytestmark = pytest.mark.oldest


def later(seconds: float) -> float:
    return get_dht_time() + seconds


def plain(number: int, size: int, seconds: float, in_cache: bool = False) -> NewRecord:
    return NewRecord(DHTID(number), PLAIN_VALUE, b"x" * size, later(seconds), in_cache)


def test_requests_are_neither_too_large_nor_too_many():
    many = [plain(number, 10, 5) for number in range(600)]
    batches = list(split_into_requests(many))
    assert [len(batch) for batch in batches] == [256, 256, 88]
    assert [record for batch in batches for record in batch] == many
    large = [plain(number, 400_000, 5) for number in range(3)]
    assert [len(batch) for batch in split_into_requests(large)] == [1, 1, 1]
    assert list(split_into_requests([])) == []


def test_packing_values():
    assert pack_value(b"plain") == (PLAIN_VALUE, b"plain")
    dictionary: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    dictionary.store("s", b"v", later(5))
    marker, packed = pack_value(dictionary)
    assert marker == WHOLE_DICTIONARY
    assert DictionaryDHTValue.unpackb(packed).get("s") == dictionary.get("s")


def test_packing_keeps_the_newest_entries(monkeypatch, caplog):
    monkeypatch.setattr(records, "warn_seldom", Seldom(records.logger.warning))
    dictionary: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    for number in range(100):
        # Who claims to live longest does not stay for that.
        dictionary.store(number, b"v" * 100, later(1000 if number < 50 else 10))
    dictionary.store(3, b"v" * 100, later(1001))
    for _ in range(3):
        marker, packed = pack_value(dictionary, 5000)
    part = DictionaryDHTValue.unpackb(packed)
    assert marker == WHOLE_DICTIONARY
    assert len(packed) <= 5000
    assert len(part) > 30
    kept = [number for number, _ in part.items()]
    assert kept == [*range(101 - len(part), 100), 3], "in the order in which they were stored"
    assert caplog.text.count("only some of them are sent") == 1


@in_virtual_time
async def test_a_key_with_thousands_of_entries_is_found():
    network = Network(Link(delay=0.01))
    nodes = await start_dht_nodes(network, 5)
    key, value = DHTID.generate("many"), MSGPackSerializer.dumps(b"v" * 500)
    for node in nodes[:4]:
        for number in range(2500):
            node.protocol.storage.store_subkey(key, number, value, later(60))
    found = await nodes[4].get("many", latest=True)
    assert 1200 < len(found.value) < 2500
    assert max(found.value) == 2499


def test_expirations_of_any_number_type():
    import numpy as np

    for value in (5, 5.0, np.float32(5), np.int64(5)):
        checked = check_expiration(value)
        assert checked == 5.0
        assert type(checked) is float
    for value in (None, "5", True, [5]):
        with pytest.raises(TypeError, match="must be a number"):
            check_expiration(value)


@pytest.mark.parametrize("subkey", ["", 0, False, 1.5, b"", (), ("a", (1, b"b")), "x" * 4000])
def test_usable_subkeys(subkey):
    check_subkey(subkey, MSGPackSerializer.dumps(subkey))


@pytest.mark.parametrize("subkey", [None, [1], {}, float("nan"), (float("nan"),), "x" * 5000])
def test_useless_subkeys(subkey):
    with pytest.raises(ValueError, match="subkey"):
        check_subkey(subkey, MSGPackSerializer.dumps(subkey))


# --- how long records live --------------------------------------------------------------------------------------------


def record_that_lives(seconds, subkey=None):
    packed_subkey = PLAIN_VALUE if subkey is None else MSGPackSerializer.dumps(subkey)
    return NewRecord(DHTID.generate(f"{seconds} {subkey}"), packed_subkey, b"value", get_dht_time() + seconds)


@pytest.mark.parametrize("subkey", [None, "entry"])
@in_virtual_time
async def test_a_record_lives_a_day_at_most(subkey):
    records = LocalRecords(None, None)
    assert records.keep(record_that_lives(MAX_LIFETIME_SECONDS, subkey))
    assert records.keep(record_that_lives(MAX_LIFETIME_SECONDS + 59, subkey)), "clocks differ"
    assert not records.keep(record_that_lives(MAX_LIFETIME_SECONDS + 61, subkey))
    assert not records.keep(record_that_lives(100 * 365 * 86400, subkey))


@in_virtual_time
async def test_what_lives_longer_is_not_believed():
    records, key = LocalRecords(None, None), DHTID.generate("key")
    now = get_dht_time()
    assert records.read(key, Found.PLAIN, b"value", now + 10)[0] == b"value"
    value, outcome = records.read(key, Found.PLAIN, b"value", now + 1e9)
    assert value is None
    assert outcome.reason is Reason.TOO_LONG
    for lifetime, is_believed in ((10, True), (1e9, False)):
        dictionary = DictionaryDHTValue()
        dictionary.store("entry", b"value", now + lifetime)
        dictionary.store("other", b"value", now + 10)
        found, _ = records.read(key, Found.DICTIONARY, dictionary.packb(), now + 10)
        assert (found is not None) is is_believed
        whole = NewRecord(key, WHOLE_DICTIONARY, dictionary.packb(), now + 10)
        assert bool(records.keep(whole)) is is_believed


@in_virtual_time
async def test_records_of_faster_clocks_spoil_nothing():
    """Else anybody could hide all that stands under a key from those whose clocks are slower."""
    fast, slow, key = LocalRecords(None, None), LocalRecords(None, None), DHTID.generate("key")
    assert fast.keep(NewRecord(key, MSGPackSerializer.dumps("honest"), b"value", later(100)))
    assert fast.keep(NewRecord(key, MSGPackSerializer.dumps("longest"), b"value", later(MAX_LIFETIME_SECONDS + 60)))
    dictionary, _ = fast.find(key)
    # The slower clock shows what this one has shown three seconds ago.
    longest = DictionaryDHTValue()
    for subkey, item in dictionary.items():
        longest.store(subkey, item.value, item.expiration_time + 3)
    found, _ = slow.read(key, Found.DICTIONARY, longest.packb(), later(100))
    assert {subkey for subkey, _ in found.items()} == {"honest", "longest"}
    assert slow.keep(NewRecord(key, WHOLE_DICTIONARY, longest.packb(), later(100)))
    assert slow.read(key, Found.PLAIN, b"value", later(MAX_LIFETIME_SECONDS + 63))[0] == b"value"


@in_virtual_time
async def test_too_long_lifetime_is_warned_of_once(caplog, monkeypatch):
    # Another test may have caused that line already.
    monkeypatch.setattr(store, "warn_seldom", Seldom(store.logger.warning))
    made = [make_record("key", None, 1, get_dht_time() + 1e9, CompositeValidator()) for _ in range(3)]
    assert {record.expiration_time for record in made} == {get_dht_time() + MAX_LIFETIME_SECONDS}
    [line] = [record.getMessage() for record in caplog.records]
    assert "the record for key 'key' would live 1000000000 s, over the limit of a day" in line
    assert make_record("key", None, 1, get_dht_time() + 60, CompositeValidator()).expiration_time == get_dht_time() + 60
