"""Values that expire, dictionaries, and the blacklist."""

from __future__ import annotations

import asyncio
import contextlib
import math

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.routing import DHTID
from shoal.dht.storage import (
    DHTLocalStorage,
    DictionaryDHTValue,
    HeapEntry,
    TimedStorage,
    ValueWithExpiration,
)
from shoal.testing import VirtualTimeLoop
from tests.dht.virtual_time import in_virtual_time

pytestmark = pytest.mark.oldest

KEY = DHTID.generate("key")


def later(seconds: float) -> float:
    return get_dht_time() + seconds


# --- values with expirations ------------------------------------------------------------------------------------------


def test_value_with_expiration_is_a_pair():
    item = ValueWithExpiration("v", 1.5)
    value, expiration_time = item
    assert (value, expiration_time) == ("v", 1.5) == (item.value, item.expiration_time) == (item[0], item[1])
    assert item == ("v", 1.5)
    assert item == ValueWithExpiration("v", 1.5)
    assert item != ValueWithExpiration("v", 1.6)
    assert hash(item) == hash(("v", 1.5))
    assert "v" in repr(item)
    with pytest.raises(AttributeError):
        item.value = 2  # type: ignore[misc]


def test_heap_entries_are_ordered_by_expiration():
    assert HeapEntry(1.0, object()) < HeapEntry(2.0, object())
    assert HeapEntry(1.0, "a") == HeapEntry(1.0, 5)


# --- timed storage ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_items_vanish_when_they_expire():
    storage: TimedStorage[str, str] = TimedStorage()
    assert storage.store("short", "a", later(1))
    assert storage.store("long", "b", later(2))
    assert storage.top() == ("short", ("a", later(1)))
    await asyncio.sleep(1)
    assert "short" in storage, "expirations are inclusive"
    await asyncio.sleep(0.001)
    assert storage.get("short") is None
    assert list(storage.items()) == [("long", ("b", later(0.999)))]
    await asyncio.sleep(1)
    assert len(storage) == 0
    assert not storage
    assert storage.top() == (None, None)


@in_virtual_time
async def test_only_later_expirations_replace():
    storage: TimedStorage[str, int] = TimedStorage()
    assert storage.store("k", 1, later(10))
    assert not storage.store("k", 2, later(10)), "a tie"
    assert not storage.store("k", 2, later(9))
    assert storage.get("k") == (1, later(10))
    assert storage.store("k", 2, later(11))
    assert storage.get("k") == (2, later(11))
    assert not storage.store("other", 1, get_dht_time() - 0.001), "expired"
    assert storage.store("other", 1, get_dht_time())


@in_virtual_time
async def test_rejected_store_shortens_no_life():
    storage: TimedStorage[str, int] = TimedStorage()
    storage.store("k", 1, later(10))
    assert not storage.store("k", 2, later(1))
    await asyncio.sleep(5)
    assert storage.get("k") == (1, later(5))


@in_virtual_time
async def test_overflow_drops_what_expires_first():
    storage: TimedStorage[str, int] = TimedStorage(maxsize=2)
    assert storage.store("a", 1, later(3))
    assert storage.store("b", 2, later(1))
    assert storage.store("c", 3, later(2))
    assert sorted(key for key, _ in storage.items()) == ["a", "c"]
    assert not storage.store("d", 4, later(1)), "the newcomer itself expires first"
    assert storage.store("a", 5, later(4)), "no room is needed for what is there already"
    assert len(storage) == 2


@in_virtual_time
async def test_frozen_storage_neither_expires_nor_overflows():
    storage: TimedStorage[str, int] = TimedStorage(maxsize=1)
    storage.store("a", 1, later(1))
    with storage.freeze():
        with storage.freeze():
            await asyncio.sleep(5)
        assert storage.get("a") is not None
        assert storage.store("b", 2, later(-4.5)), "even what has expired is taken"
        assert len(storage) == 2
        assert storage.top()[0] == "b"
    assert len(storage) == 0
    with pytest.raises(RuntimeError, match="inside"), storage.freeze():
        raise RuntimeError("inside")
    assert not storage.frozen


@in_virtual_time
async def test_deleting_and_clearing():
    storage: TimedStorage[str, int] = TimedStorage()
    storage.store("a", 1, later(5))
    storage.store("b", 2, later(6))
    del storage["a"]
    assert storage.top()[0] == "b"
    assert storage.store("a", 3, later(1)), "what is deleted does not compete"
    storage.clear()
    assert len(storage) == 0
    with pytest.raises(KeyError):
        del storage["a"]


def test_an_infinite_expiration_never_comes():
    storage: TimedStorage[str, int] = TimedStorage()
    assert storage.store("k", 1, math.inf)
    assert storage.get("k") == (1, math.inf)


def test_expirations_must_be_numbers():
    with pytest.raises(ValueError, match="not a number"):
        TimedStorage().store("k", 1, math.nan)
    with pytest.raises(ValueError, match="maxsize"):
        TimedStorage(-1)


def test_bookkeeping_does_not_grow_with_updates():
    storage: TimedStorage[str, int] = TimedStorage()
    start = get_dht_time() + 100
    for i in range(10_000):
        assert storage.store("k", i, start + i)
    assert len(storage._by_expiration) < 100


class TimedStorageMachine(RuleBasedStateMachine):
    """The storage against a model that forgets nothing and looks at everything each time."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.storage: TimedStorage[int, int] = TimedStorage(maxsize=3)
        self.model: dict[int, tuple[int, float]] = {}
        self.counter = 0

    def now(self) -> float:
        return self.loop.dht_time()

    def in_loop(self, function):
        async def call():
            return function()

        return self.loop.run_until_complete(call())

    def clean_model(self) -> None:
        self.model = {k: v for k, v in self.model.items() if v[1] >= self.now()}
        while len(self.model) > 3:
            del self.model[min(self.model, key=lambda k: self.model[k][1])]

    @rule(key=st.integers(0, 6), seconds=st.integers(-1, 8))
    def store(self, key: int, seconds: int) -> None:
        self.clean_model()
        self.counter += 1
        expires = self.now() + seconds + self.counter * 1e-3  # no ties among different keys
        expected = expires >= self.now() and (key not in self.model or self.model[key][1] < expires)
        if expected:
            self.model[key] = (self.counter, expires)
            self.clean_model()
            expected = key in self.model
        assert self.in_loop(lambda: self.storage.store(key, self.counter, expires)) == expected

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule(key=st.integers(0, 6))
    def delete(self, key: int) -> None:
        self.clean_model()
        if key in self.model:
            del self.model[key]
            self.in_loop(lambda: self.storage.__delitem__(key))

    @invariant()
    def same_content(self) -> None:
        self.clean_model()
        assert dict(self.in_loop(lambda: list(self.storage.items()))) == self.model
        first = min(self.model, key=lambda k: self.model[k][1], default=None)
        assert self.in_loop(self.storage.top)[0] == first

    def teardown(self) -> None:
        self.loop.close()


TestTimedStorageAgainstModel = TimedStorageMachine.TestCase
TestTimedStorageAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- dictionaries -----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_dictionary_survives_the_journey_with_expired_entries():
    dictionary: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    dictionary.store("short", b"1", later(1))
    dictionary.store(("long", 2), b"2", later(5))
    packed = MSGPackSerializer.dumps(dictionary)
    await asyncio.sleep(2)
    restored = MSGPackSerializer.loads(packed)
    assert isinstance(restored, DictionaryDHTValue)
    assert restored.latest_expiration_time == later(3)
    with restored.freeze():
        assert {key: item.value for key, item in restored.items()} == {"short": b"1", ("long", 2): b"2"}
    assert [key for key, _ in restored.items()] == [("long", 2)]
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps(restored)).get(("long", 2)) == (b"2", later(3))


@in_virtual_time
async def test_latest_expiration_counts_accepted_entries_only():
    dictionary: DictionaryDHTValue[int] = DictionaryDHTValue()
    dictionary.store("a", 1, later(5))
    with_earlier = dictionary.latest_expiration_time
    assert not dictionary.store("a", 2, later(4))
    assert dictionary.latest_expiration_time == with_earlier
    await asyncio.sleep(10)
    assert not dictionary.store("b", 1, later(-1)), "expired, but later than anything that was here"
    assert dictionary.latest_expiration_time == with_earlier


def test_equal_subkeys_keep_the_latest_spelling():
    dictionary: DictionaryDHTValue[int] = DictionaryDHTValue()
    dictionary.store(0, 1, later(5))
    dictionary.store(False, 2, later(6))
    [(subkey, item)] = dictionary.items()
    assert subkey is False
    assert item.value == 2


def test_a_copy_is_independent():
    dictionary: DictionaryDHTValue[int] = DictionaryDHTValue(maxsize=5)
    dictionary.store("a", 1, later(5))
    duplicate = dictionary.copy()
    duplicate.store("b", 2, later(9))
    assert [key for key, _ in dictionary.items()] == ["a"]
    assert dictionary.latest_expiration_time < duplicate.latest_expiration_time
    assert duplicate.maxsize == 5


hostile_content = [
    {},
    [],
    [None, 0.0],
    [None, 0.0, [], []],
    ["many", 0.0, []],
    [-1, 0.0, []],
    [True, 0.0, []],
    [None, "late", []],
    [None, math.nan, []],
    [None, 1e18, [["k", b"v", 1.0]]],
    [None, 0.0, {}],
    [None, 0.0, ["entry"]],
    [None, 0.0, [["k", b"v"]]],
    [None, 0.0, [["k", b"v", None]]],
    [None, 0.0, [["k", b"v", True]]],
    [None, 0.0, [["k", b"v", math.nan]]],
    [None, 0.0, [[["list"], b"v", 1.0]]],
    [None, 0.0, [[{}, b"v", 1.0]]],
]


@pytest.mark.parametrize("content", hostile_content, ids=repr)
def test_malformed_dictionaries_are_refused(content):
    with pytest.raises(ValueError, match=r"dictionary|subkey|entr"):
        DictionaryDHTValue.unpackb(MSGPackSerializer.dumps(content))


@in_virtual_time
async def test_last_expiring_duplicate_entry_counts():
    entries = [
        ["a", b"1", later(2)],
        ["b", b"2", later(3)],
        ["a", b"3", later(1)],
        [1, b"4", later(1)],
        [1.0, b"5", later(2)],
    ]
    dictionary = DictionaryDHTValue.unpackb(MSGPackSerializer.dumps([None, later(3), entries]))
    assert [(name, item.value) for name, item in dictionary.items()] == [("a", b"1"), ("b", b"2"), (1.0, b"5")]
    assert dictionary.top()[0] in ("a", 1.0)
    assert dictionary.latest_expiration_time == later(3)


@given(st.binary(max_size=100))
def test_any_bytes_unpack_or_raise_value_error(data):
    for attempt in (DictionaryDHTValue.unpackb, MSGPackSerializer.loads):
        with contextlib.suppress(ValueError):
            attempt(data if attempt is DictionaryDHTValue.unpackb else msgpack.packb(msgpack.ExtType(0x50, data)))


# --- the storage of a node --------------------------------------------------------------------------------------------


@in_virtual_time
async def test_plain_values_and_dictionaries_compete_by_expiration():
    storage = DHTLocalStorage()
    assert storage.store(KEY, b"plain", later(5))
    assert not storage.store(KEY, b"sub", later(5), subkey="s"), "a tie"
    assert storage.get(KEY).value == b"plain"
    assert storage.store(KEY, b"sub", later(6), subkey="s")
    assert isinstance(storage.get(KEY).value, DictionaryDHTValue)
    assert storage.store(KEY, b"other", later(3), subkey="t"), "an earlier entry may join a dictionary"
    assert storage.get(KEY).expiration_time == later(6)
    assert not storage.store(KEY, b"plain", later(6))
    assert storage.store(KEY, b"plain", later(7))
    assert storage.get(KEY) == (b"plain", later(7))


@in_virtual_time
async def test_entries_of_a_dictionary_live_their_own_lives():
    storage = DHTLocalStorage()
    assert storage.store(KEY, b"1", later(5), subkey="a")
    assert storage.store(KEY, b"2", later(10), subkey="b")
    assert storage.get(KEY).expiration_time == later(10)
    assert not storage.store(KEY, b"3", later(5), subkey="a"), "a tie"
    assert storage.store(KEY, b"3", later(6), subkey="a")
    await asyncio.sleep(7)
    dictionary = storage.get(KEY).value
    assert dict(dictionary.items()) == {"b": (b"2", later(3))}
    await asyncio.sleep(4)
    assert storage.get(KEY) is None


@in_virtual_time
async def test_a_rejected_entry_changes_nothing():
    storage = DHTLocalStorage()
    assert not storage.store(KEY, b"1", later(-1), subkey="a")
    assert KEY not in storage
    storage.store(KEY, b"1", later(5), subkey="a")
    assert not storage.store(KEY, b"2", later(4), subkey="a")
    assert not storage.store(KEY, b"2", later(-1), subkey="b")
    assert storage.get(KEY).expiration_time == later(5)
    await asyncio.sleep(4.5)
    assert storage.get(KEY).value.get("a") == (b"1", later(0.5))


@in_virtual_time
async def test_a_whole_dictionary_is_merged_entry_by_entry():
    storage = DHTLocalStorage()
    storage.store(KEY, b"old", later(5), subkey="a")
    storage.store(KEY, b"kept", later(9), subkey="b")
    incoming: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    incoming.store("a", b"new", later(6))
    incoming.store("b", b"older", later(8))
    incoming.store("c", b"added", later(7))
    assert storage.store(KEY, incoming, incoming.latest_expiration_time)
    held = {subkey: item.value for subkey, item in storage.get(KEY).value.items()}
    assert held == {"a": b"new", "b": b"kept", "c": b"added"}
    assert storage.get(KEY).expiration_time == later(9)
    assert not storage.store(KEY, incoming, incoming.latest_expiration_time), "nothing new in it"


def test_a_dictionary_is_no_entry_of_a_dictionary():
    with pytest.raises(AssertionError):
        DHTLocalStorage().store(KEY, DictionaryDHTValue(), later(5), subkey="s")
