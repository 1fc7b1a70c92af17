"""What a node stores: values that live until their expiration, and dictionaries whose entries expire one by one.

All times are DHT times. A value with a later expiration replaces one with an earlier expiration, never the other way
round; a tie is refused. In normal operation nothing is deleted explicitly.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from shoal.base.clock import DHTExpiration, get_dht_time
from shoal.base.logs import quoted
from shoal.base.serializer import MSGPackSerializer, check_keys
from shoal.dht.routing import DHTID as DHTID

KeyType = TypeVar("KeyType")
ValueType = TypeVar("ValueType")

Subkey = Any
"""A key inside a dictionary value: anything hashable that msgpack can pack, except ``None``."""
MAX_SUBKEY_REMEMBERED = 128
"""Caches skip longer subkeys, because strangers can make up any number of them. Chosen: an owner tag has 90 bytes."""
DHTValue = Any
"""A user's value: anything that msgpack can pack."""
BinaryDHTValue = bytes


class Unproven(bytes):
    """The value of an entry whose signature has not been checked yet, because the owner itself has sent it.

    msgpack refuses to pack it, so it cannot reach another node by mistake.
    """


class ValueWithExpiration(tuple[ValueType, DHTExpiration], Generic[ValueType]):
    """A value and its expiration; unpacks and compares like a tuple of two."""

    __slots__ = ()

    def __new__(cls, value: ValueType, expiration_time: DHTExpiration) -> ValueWithExpiration[ValueType]:
        return super().__new__(cls, (value, expiration_time))

    def __getnewargs__(self) -> tuple[ValueType, DHTExpiration]:
        return self[0], self[1]

    @property
    def value(self) -> ValueType:
        return self[0]

    @property
    def expiration_time(self) -> DHTExpiration:
        return self[1]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(value={self[0]!r}, expiration_time={self[1]!r})"


class HeapEntry(Generic[KeyType]):
    """A key that sorts by its expiration."""

    __slots__ = ("expiration_time", "key")

    def __init__(self, expiration_time: DHTExpiration, key: KeyType) -> None:
        self.expiration_time = expiration_time
        self.key = key

    def __lt__(self, other: HeapEntry[KeyType]) -> bool:
        return self.expiration_time < other.expiration_time

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeapEntry) and self.expiration_time == other.expiration_time

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(expiration_time={self.expiration_time}, key={self.key!r})"


class Expiring(Protocol):
    """Something with an expiration."""

    @property
    def expiration_time(self) -> DHTExpiration: ...


class ExpiryHeap(Generic[KeyType]):
    """Finds the items of a dictionary that expire first.

    Args:
        items: the dictionary. Heap entries are skipped if their key is gone from it, or has another expiration by now.
    """

    def __init__(self, items: Mapping[KeyType, Expiring]) -> None:
        self._items = items
        self._entries: list[HeapEntry[KeyType]] = []

    def push(self, key: KeyType, expiration_time: DHTExpiration) -> None:
        """Note when a key expires."""
        heapq.heappush(self._entries, HeapEntry(expiration_time, key))

    def first(self) -> HeapEntry[KeyType] | None:
        """The entry that expires first."""
        while self._entries:
            first = self._entries[0]
            item = self._items.get(first.key)
            if item is not None and item.expiration_time == first.expiration_time:
                return first
            heapq.heappop(self._entries)
        return None

    @property
    def earliest(self) -> DHTExpiration:
        """A time before which no item expires; cheaper than :meth:`first`."""
        return self._entries[0].expiration_time if self._entries else math.inf

    def rebuild(self) -> None:
        """Forget outdated entries, which keep their keys in memory."""
        self._entries = [HeapEntry(item.expiration_time, key) for key, item in self._items.items()]
        heapq.heapify(self._entries)

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()

    def __len__(self) -> int:
        """How many entries there are, including outdated ones."""
        return len(self._entries)


class TimedStorage(Generic[KeyType, ValueType]):
    """A dictionary whose items vanish at their expiration.

    Args:
        maxsize: when there are more items, the one that expires first is dropped; ``None`` = no limit.
    """

    def __init__(self, maxsize: int | None = None) -> None:
        if maxsize is not None and maxsize < 0:
            raise ValueError(f"maxsize must be None or at least 0, got {maxsize}")
        self.maxsize = math.inf if maxsize is None else maxsize
        self._data: dict[KeyType, ValueWithExpiration[ValueType]] = {}
        self._by_expiration = ExpiryHeap(self._data)
        self._freezes = 0

    @property
    def frozen(self) -> bool:
        """Whether a :meth:`freeze` block is running, so that nothing expires and nothing is dropped."""
        return self._freezes > 0

    @contextmanager
    def freeze(self) -> Iterator[None]:
        """Within this block nothing expires and nothing is dropped for lack of room."""
        self._freezes += 1
        try:
            yield
        finally:
            self._freezes -= 1

    def store(self, key: KeyType, value: ValueType, expiration_time: DHTExpiration) -> bool:
        """Keep a value if it has not expired and outlives the present one.

        Returns:
            Whether the value is now in the storage.

        Raises:
            ValueError: the expiration is not a number.
        """
        now = get_dht_time()
        if not self._would_accept(key, expiration_time, now):
            return False
        self._put(key, value, expiration_time)
        self._drop_outdated(now)
        return key in self._data

    def _would_accept(self, key: KeyType, expiration_time: DHTExpiration, now: DHTExpiration) -> bool:
        if math.isnan(expiration_time):
            raise ValueError("expiration_time is not a number")
        self._drop_outdated(now)
        if not self._freezes and expiration_time < now:
            return False
        present = self._data.get(key)
        return present is None or present.expiration_time < expiration_time

    def _put(self, key: KeyType, value: ValueType, expiration_time: DHTExpiration) -> None:
        # Remove the key first: 0, 0.0 and False are equal as keys, and the latest spelling counts.
        self._data.pop(key, None)
        self._data[key] = ValueWithExpiration(value, expiration_time)
        self._by_expiration.push(key, expiration_time)
        if len(self._by_expiration) > 2 * len(self._data) + 1:
            self._by_expiration.rebuild()

    def _drop_outdated(self, now: DHTExpiration | None = None) -> None:
        if self._freezes or not self._data:
            return
        if now is None:
            now = get_dht_time()
        if self._by_expiration.earliest >= now and len(self._data) <= self.maxsize:
            return
        while (first := self._by_expiration.first()) is not None:
            if first.expiration_time >= now and len(self._data) <= self.maxsize:
                break
            del self[first.key]

    def get(self, key: KeyType) -> ValueWithExpiration[ValueType] | None:
        """The value and its expiration, or ``None`` if it is missing or has expired."""
        if key not in self._data:
            return None
        self._drop_outdated()
        return self._data.get(key)

    def items(self) -> Iterator[tuple[KeyType, ValueWithExpiration[ValueType]]]:
        """A snapshot of the keys with their values and expirations."""
        self._drop_outdated()
        return iter(list(self._data.items()))

    def values(self) -> list[ValueWithExpiration[ValueType]]:
        """A snapshot of the values with their expirations."""
        self._drop_outdated()
        return list(self._data.values())

    def top(self) -> tuple[KeyType, ValueWithExpiration[ValueType]] | tuple[None, None]:
        """The item that expires first, or ``(None, None)``."""
        self._drop_outdated()
        first = self._by_expiration.first()
        return (None, None) if first is None else (first.key, self._data[first.key])

    def clear(self) -> None:
        """Forget everything."""
        for key in list(self._data):
            del self[key]
        self._by_expiration.clear()

    def __contains__(self, key: object) -> bool:
        if key not in self._data:
            return False
        self._drop_outdated()
        return key in self._data

    def __len__(self) -> int:
        self._drop_outdated()
        return len(self._data)

    def __delitem__(self, key: KeyType) -> None:
        del self._data[key]

    def __bool__(self) -> bool:
        return len(self) > 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._data})"


# Most entries in one dictionary from the network. Chosen: far more than an answer can carry.
MAX_DICTIONARY_ENTRIES = 2**16


@MSGPackSerializer.ext_serializable(0x50)
class DictionaryDHTValue(TimedStorage[Subkey, ValueType]):
    """A value that is a dictionary: each entry has an expiration of its own."""

    def __init__(self, maxsize: int | None = None) -> None:
        super().__init__(maxsize)
        self.latest_expiration_time = -math.inf
        """The latest expiration of any entry ever accepted here."""

    def store(self, key: Subkey, value: ValueType, expiration_time: DHTExpiration) -> bool:
        accepted = super().store(key, value, expiration_time)
        if accepted:
            self.latest_expiration_time = max(self.latest_expiration_time, expiration_time)
        return accepted

    def drop(self, key: Subkey) -> None:
        """Remove an entry if it is there, whether or not it has expired."""
        self._data.pop(key, None)

    def replace_value(self, key: Subkey, value: ValueType) -> None:
        """Replace the value of an entry and keep its expiration.

        Raises:
            KeyError: there is no such entry.
        """
        self._data[key] = ValueWithExpiration(value, self._data[key].expiration_time)

    def leave_out(self, keys: Iterable[Subkey]) -> None:
        """Remove entries as if they had never been here: the dictionary lives only as long as the others."""
        for key in keys:
            self.drop(key)
        self.latest_expiration_time = max((item.expiration_time for item in self._data.values()), default=-math.inf)

    @property
    def is_empty(self) -> bool:
        """Whether there are no entries, not even expired ones."""
        return not self._data

    def subkeys(self) -> list[Subkey]:
        """Keys of all entries, including expired ones."""
        return list(self._data)

    def copy(self) -> DictionaryDHTValue[ValueType]:
        """Another dictionary with the same entries."""
        duplicate: DictionaryDHTValue[ValueType] = DictionaryDHTValue()
        duplicate.maxsize = self.maxsize
        duplicate._data.update(self._data)
        duplicate._by_expiration.rebuild()
        duplicate.latest_expiration_time = self.latest_expiration_time
        return duplicate

    def packb(self) -> bytes:
        """The wire form: size limit, latest expiration, and the entries."""
        with self.freeze():
            entries = [[key, item.value, item.expiration_time] for key, item in self._data.items()]
            maxsize = None if math.isinf(self.maxsize) else self.maxsize
            # Not self.latest_expiration_time, because that entry may have been dropped for lack of room.
            latest = max((entry[2] for entry in entries), default=self.latest_expiration_time)
            return MSGPackSerializer.dumps([maxsize, latest, entries])

    @classmethod
    def unpackb(cls, data: bytes) -> DictionaryDHTValue[Any]:
        """Read what :meth:`packb` made. Expired entries stay until the first access outside :meth:`freeze`.

        Raises:
            ValueError: the bytes are not such a dictionary.
        """
        maxsize, latest, entries = _check_wire_form(MSGPackSerializer.loads(data))
        if entries and latest > max(expiration_time for *_, expiration_time in entries):
            raise ValueError("a dictionary that claims to outlive all of its entries")
        dictionary: DictionaryDHTValue[Any] = cls(maxsize)
        dictionary._fill(entries)
        dictionary.latest_expiration_time = latest
        return dictionary

    def _fill(self, entries: Iterable[Sequence[Any]]) -> None:
        """Store entries in this empty dictionary, expired or not: faster than one by one."""
        data = self._data
        for subkey, value, expiration_time in entries:
            present = data.get(subkey)
            if present is None or present.expiration_time < expiration_time:
                data.pop(subkey, None)  # the latest spelling of a key counts
                data[subkey] = ValueWithExpiration(value, expiration_time)
        self._by_expiration.rebuild()


def _check_wire_form(content: Any) -> tuple[int | None, float, list[list[Any]]]:
    if not isinstance(content, list) or len(content) != 3:
        raise ValueError("a dictionary travels as a list of three")
    maxsize, latest, entries = content
    if not (maxsize is None or (type(maxsize) is int and maxsize >= 0)):
        raise ValueError(f"size limit of a dictionary must be None or a number of entries, got {quoted(maxsize)}")
    if type(latest) not in (int, float) or math.isnan(latest):
        raise ValueError(f"latest expiration of a dictionary must be a number, got {quoted(latest)}")
    if not isinstance(entries, list) or len(entries) > MAX_DICTIONARY_ENTRIES:
        raise ValueError(f"entries of a dictionary must be a list of at most {MAX_DICTIONARY_ENTRIES}")
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 3:
            raise ValueError("an entry of a dictionary is a list of three")
        subkey, _, expiration_time = entry
        if type(expiration_time) not in (int, float) or math.isnan(expiration_time):
            raise ValueError(f"expiration of a dictionary entry must be a number, got {quoted(expiration_time)}")
        try:
            hash(subkey)
        except TypeError:
            raise ValueError(f"a {type(subkey).__name__} cannot be a subkey") from None
    check_keys([subkey for subkey, _, _ in entries])
    return maxsize, latest, entries


StoredValue = BinaryDHTValue | DictionaryDHTValue[BinaryDHTValue]


class DHTLocalStorage(TimedStorage["DHTID", StoredValue]):
    """The records of one node: plain values and dictionaries by key id.

    Attributes:
        on_drop: called with a key and its value when the value expires or is dropped.
    """

    def __init__(self, maxsize: int | None = None) -> None:
        super().__init__(maxsize)
        self.on_drop: Callable[[DHTID, StoredValue], object] | None = None

    def store(
        self,
        key: DHTID,
        value: StoredValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
    ) -> bool:
        """Keep a plain value, a whole dictionary, or (with ``subkey``) one entry of a dictionary.

        Returns:
            Whether it was accepted; for a whole dictionary, whether any of its entries was accepted.
        """
        if subkey is not None:
            assert not isinstance(value, DictionaryDHTValue), "a dictionary cannot be an entry of a dictionary"
            return self.store_subkey(key, subkey, value, expiration_time)
        if isinstance(value, DictionaryDHTValue):
            accepted = [self.store_subkey(key, name, item.value, item.expiration_time) for name, item in value.items()]
            return any(accepted)
        return super().store(key, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: Subkey, value: BinaryDHTValue, expiration_time: DHTExpiration) -> bool:
        """Keep one entry of a dictionary; a new dictionary replaces a plain value that expires earlier."""
        present, now = self.get(key), get_dht_time()
        if present is not None and isinstance(present.value, DictionaryDHTValue):
            dictionary = present.value
        elif self._would_accept(key, expiration_time, now):
            dictionary = DictionaryDHTValue()
        else:
            return False
        if not dictionary.store(subkey, value, expiration_time):
            return False
        if present is None or present.value is not dictionary or present.expiration_time < expiration_time:
            self._put(key, dictionary, dictionary.latest_expiration_time)
            self._drop_outdated(now)
        return key in self._data

    def __delitem__(self, key: DHTID) -> None:
        item = self._data.pop(key)
        if self.on_drop is not None:
            self.on_drop(key, item.value)

    def drop(self, key: DHTID, subkey: Subkey | None) -> None:
        """Remove a plain value, or one entry of a dictionary, if it is there."""
        item = self._data.get(key)
        if item is None or isinstance(item.value, DictionaryDHTValue) is (subkey is None):
            return
        if isinstance(item.value, DictionaryDHTValue):
            item.value.drop(subkey)
            if item.value.is_empty:
                del self[key]
        else:
            del self[key]
