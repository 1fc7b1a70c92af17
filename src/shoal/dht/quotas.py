"""How much memory the records of one node take, whose records they are, and which go first when there is no room.

Every record is charged to the peer that stored it, at its bytes plus Python's overhead. As long as at most half of the
room is taken, no record is refused. Beyond that, each peer gets only a share, and so does each public network, because
a stranger may have many peers but has few networks. When everything is full, records with keys farthest from this node
go first, since other nodes are there to hold them. Among those, the records that would live longest go first, since
shoal's own records live for minutes and are stored again.

Every operation here takes constant or logarithmic time per record.
"""

from __future__ import annotations

import functools
import heapq
import logging
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shoal.base.clock import DHTExpiration, get_dht_time
from shoal.base.logs import Seldom
from shoal.dht.routing import DHTID, ID_BITS
from shoal.dht.storage import DHTLocalStorage, DictionaryDHTValue, StoredValue, Subkey, ValueWithExpiration
from shoal.metrics import Metrics

logger = logging.getLogger(__name__)
warn_seldom = Seldom(logger.warning)

# Overhead of a record in storage and here, besides its value and its subkey: entries of dictionaries and heaps, some of
# them outdated, tuples, numbers. A test measures it.
BYTES_PER_RECORD = 1000
# Where a record is replaced again and again, outdated entries of heaps keep about so many equal subkeys.
COPIES_OF_SUBKEY = 3
# Overhead of a dictionary besides its entries; each entry is charged its part when it is stored.
BYTES_PER_DICTIONARY = 600

OVER_PEER_QUOTA = "over the quota of a peer"
OVER_HOST_QUOTA = "over the quota of a network"
CROWDED_KEY = "one of too many of a peer or a network under one key"
WRONG_SIGNATURE = "wrong signature"


@dataclass(frozen=True)
class Room:
    """How much the records of one node may take."""

    nbytes: int = 2**28
    """For all records together. The other limits apply only beyond half of it."""
    bytes_per_peer: int = 2**23
    records_per_peer: int = 2**13
    bytes_per_host: int = 2**25
    records_per_host: int = 2**15
    entries_per_key: int = 2**11
    """Entries of one dictionary from which on the next two limits apply to it. It is about what an answer can carry."""
    entries_per_key_and_peer: int = 16
    entries_per_key_and_host: int = 256


DEFAULT_ROOM = Room()


class Payer(NamedTuple):
    """The peer and the host to which a record is charged."""

    peer: Hashable
    host: Hashable
    """The same for all peers of a public network; the peer itself if it has no public address."""


class Place(NamedTuple):
    """Where a record is stored."""

    in_cache: bool
    key_id: DHTID
    subkey: Subkey | None
    """``None`` for a plain value."""


def _names_of(payer: Payer | None) -> set[Hashable]:
    return set() if payer is None else {payer.peer, payer.host}


class _Charge:
    """The size of one record, and its payer."""

    __slots__ = ("expiration_time", "payer", "place", "size")

    def __init__(self, place: Place, size: int, expiration_time: DHTExpiration, payer: Payer | None) -> None:
        self.place, self.size, self.expiration_time, self.payer = place, size, expiration_time, payer

    def __lt__(self, other: _Charge) -> bool:
        return self.expiration_time < other.expiration_time


def size_of_record(subkey: Subkey | None, value: bytes) -> int:
    """Bytes of memory that a record takes."""
    return BYTES_PER_RECORD + len(value) + COPIES_OF_SUBKEY * size_of(subkey)


def size_of(subkey: Subkey | None) -> int:
    """Bytes of memory that a subkey takes: a tuple may take many times the size of its packed form."""
    if not isinstance(subkey, (tuple, frozenset)):
        return sys.getsizeof(subkey)
    size, waiting = 0, [subkey]
    while waiting:
        one = waiting.pop()
        size += sys.getsizeof(one)
        if isinstance(one, (tuple, frozenset)):
            waiting += one
    return size


class _Quota:
    """How much each peer, or each host, takes and may take.

    Args:
        nbytes: most bytes.
        records: most records.
        reason: why more is refused, in words.
    """

    def __init__(self, nbytes: int, records: int, reason: str) -> None:
        self._nbytes, self._records, self.reason = nbytes, records, reason
        self._uses: dict[Hashable, list[int]] = {}  # bytes and records

    def bytes_of(self, who: Hashable) -> int:
        return self._uses.get(who, (0, 0))[0]

    def count_of(self, who: Hashable) -> int:
        return self._uses.get(who, (0, 0))[1]

    def allows(self, who: Hashable, more_bytes: int, more_records: int) -> bool:
        nbytes, records = self._uses.get(who, (0, 0))
        return nbytes + more_bytes <= self._nbytes and records + more_records <= self._records

    def take(self, who: Hashable, size: int) -> None:
        use = self._uses.get(who)
        if use is None:
            self._uses[who] = [size, 1]
        else:
            use[0] += size
            use[1] += 1

    def give_back(self, who: Hashable, size: int) -> None:
        use = self._uses[who]
        use[0] -= size
        use[1] -= 1
        if not use[1]:
            del self._uses[who]


class Ledger:
    """Keeps account of the memory of every record of a node.

    Args:
        room: how much there is.
        own_id: the id of the node.
        drop: removes a record that has expired, or must make room.
    """

    def __init__(self, room: Room, own_id: int, drop: Callable[[Place], None]) -> None:
        self.room = room
        self.nbytes = 0
        """The size of all records."""
        self._own_id, self._drop = own_id, drop
        self._charges: dict[Place, _Charge] = {}
        # Of keys with very many entries: how many each peer, and each host, has brought.
        self._crowds: dict[tuple[bool, DHTID], Counter[Hashable]] = {}
        # Entries that no longer match _charges are skipped.
        self._by_expiration: list[_Charge] = []
        # Nobody needs this order while there is room.
        self._worst_first: list[tuple[bool, int, float, _Charge]] | None = None
        self.quotas = (
            _Quota(room.bytes_per_peer, room.records_per_peer, OVER_PEER_QUOTA),
            _Quota(room.bytes_per_host, room.records_per_host, OVER_HOST_QUOTA),
        )
        """What each peer takes, and each host."""

    def __len__(self) -> int:
        return len(self._charges)

    def bytes_of(self, payer: Payer) -> int:
        """The size of a peer's records."""
        return self.quotas[0].bytes_of(payer.peer)

    def payer_of(self, place: Place) -> Payer | None:
        """The peer that has brought a record; ``None``: this node itself, or there is none."""
        charge = self._charges.get(place)
        return None if charge is None else charge.payer

    def counts_of(self, payer: Payer) -> tuple[int, int]:
        """How many records a peer has here, and how many all peers of its host."""
        of_peers, of_hosts = self.quotas
        return of_peers.count_of(payer.peer), of_hosts.count_of(payer.host)

    def crowd_under(self, place: Place, subkeys: Iterable[Subkey]) -> Counter[Hashable]:
        """How many entries each peer, and each host, has brought under the key of a place.

        Args:
            subkeys: all that are there.
        """
        key = place[:2]
        if key not in self._crowds:
            crowd = self._crowds[key] = Counter()
            for subkey in subkeys:
                crowd.update(_names_of(self.payer_of(Place(*key, subkey))))
        return self._crowds[key]

    def reason_to_refuse(self, place: Place, size: int, payer: Payer | None) -> str | None:
        """The reason to refuse a record of this size, or ``None``. Records of this node (payer ``None``) never are."""
        present = self._charges.get(place)
        if payer is None or self.nbytes + size - (0 if present is None else present.size) <= self.room.nbytes // 2:
            return None
        former: tuple[Hashable, Hashable] = (None, None)
        if present is not None and present.payer is not None:
            former = present.payer
        for quota, who, before in zip(self.quotas, payer, former, strict=True):
            replaces_own = present is not None and who == before
            more = size - present.size if present is not None and replaces_own else size
            if not quota.allows(who, more, 0 if replaces_own else 1):
                return quota.reason
        return None

    def note(self, place: Place, size: int, expiration_time: DHTExpiration, payer: Payer | None) -> int:
        """Charge a stored record, and make room if need be; the new record itself may go. Returns how many went."""
        self.release(place)
        charge = self._charges[place] = _Charge(place, size, expiration_time, payer)
        self.nbytes += size
        if payer is not None:
            of_peers, of_hosts = self.quotas
            of_peers.take(payer.peer, size)
            of_hosts.take(payer.host, size)
        if self._crowds and (crowd := self._crowds.get(place[:2])) is not None:
            crowd.update(_names_of(payer))
        heapq.heappush(self._by_expiration, charge)
        most = 3 * len(self._charges) // 2 + 16
        if len(self._by_expiration) > most:
            self._by_expiration = list(self._charges.values())
            heapq.heapify(self._by_expiration)
        if self._worst_first is not None:
            heapq.heappush(self._worst_first, self._rank(charge))
            if len(self._worst_first) > most:  # in order again when there is no room the next time
                self._worst_first = None
        return self._make_room() if self.nbytes > self.room.nbytes else 0

    def _rank(self, charge: _Charge) -> tuple[bool, int, float, _Charge]:
        """The order of eviction: cached copies first, then far keys (by bits of distance), then late expirations."""
        in_cache, key_id, _ = charge.place
        bits = (key_id ^ self._own_id).bit_length()
        return not in_cache, ID_BITS - bits, -charge.expiration_time, charge

    def _make_room(self) -> int:
        evicted = 0
        if self._worst_first is None:
            self._worst_first = [self._rank(each) for each in self._charges.values()]
            heapq.heapify(self._worst_first)
        while self.nbytes > self.room.nbytes:
            charge = heapq.heappop(self._worst_first)[-1]
            if self._charges.get(charge.place) is charge:
                self.forget(charge.place)
                evicted += 1
        return evicted

    def drop_expired(self) -> None:
        """Remove expired records, which would take memory until somebody touches them."""
        now = get_dht_time()
        while self._by_expiration and self._by_expiration[0].expiration_time < now:
            charge = heapq.heappop(self._by_expiration)
            if self._charges.get(charge.place) is charge:
                self.forget(charge.place)

    def forget(self, place: Place) -> None:
        """Remove a record."""
        self.release(place)
        self._drop(place)

    def release(self, place: Place) -> None:
        """Stop charging a record that is gone."""
        charge = self._charges.pop(place, None)
        if charge is None:
            return
        self.nbytes -= charge.size
        if charge.payer is not None:
            of_peers, of_hosts = self.quotas
            of_peers.give_back(charge.payer.peer, charge.size)
            of_hosts.give_back(charge.payer.host, charge.size)
        if self._crowds and (crowd := self._crowds.get(place[:2])) is not None:
            for name in _names_of(charge.payer):
                crowd[name] -= 1
                if not crowd[name]:
                    del crowd[name]
            if not crowd:
                del self._crowds[place[:2]]

    def __contains__(self, place: Place) -> bool:
        return place in self._charges


class Shelves:
    """Storage and cache of a node, and the ledger of their memory.

    Args:
        cache_size: most records in the cache, ``None`` = no limit.
        own_id: the id of the node.
        metrics: counts refused and evicted records.
        room: how much there is.
    """

    def __init__(self, cache_size: int | None, own_id: int, metrics: Metrics, room: Room) -> None:
        self.storage = DHTLocalStorage()
        self.cache = DHTLocalStorage(maxsize=cache_size)
        self.ledger = Ledger(room, own_id, self._drop)
        self._metrics = metrics
        for in_cache, storage in ((False, self.storage), (True, self.cache)):
            storage.on_drop = functools.partial(self._release, in_cache)

    def put(
        self, place: Place, value: bytes, expiration_time: DHTExpiration, payer: Payer | None, is_owned: bool = False
    ) -> bool:
        """Keep a valid record if it is newer than the present one and there is room for it.

        Args:
            payer: the peer that asks to store it; ``None``: this node itself.
            is_owned: it has an owner, or other entries of its dictionary have: a plain value, which is anybody's, makes
                way for it, however long it would live.
        """
        self.ledger.drop_expired()
        in_cache, key_id, subkey = place
        storage = self.cache if in_cache else self.storage
        present = storage.get(key_id)
        size = size_of_record(subkey, value)
        if subkey is not None:
            others = present.value if present is not None and isinstance(present.value, DictionaryDHTValue) else ()
            size += BYTES_PER_DICTIONARY // (len(others) + (subkey not in others))
        reason = self.ledger.reason_to_refuse(place, size, payer) or self._reason_of_key(place, present, payer)
        if reason is not None and payer is not None:
            self._note_refusal(reason, payer)
            return False
        if is_owned and expiration_time >= get_dht_time():
            storage.drop(key_id, None)
        if not storage.store(key_id, value, expiration_time, subkey):
            return False
        if present is not None and isinstance(present.value, DictionaryDHTValue) is (subkey is None):
            # The present value was of the other kind (plain or dictionary), so the new one has replaced all of it.
            self._release(in_cache, key_id, present.value)
        evicted = self.ledger.note(place, size, expiration_time, payer)
        if evicted:
            self._note_eviction(evicted)
        return not evicted or place in self.ledger

    def _reason_of_key(
        self, place: Place, present: ValueWithExpiration[StoredValue] | None, payer: Payer | None
    ) -> str | None:
        """The reason to refuse another entry of a dictionary that is larger than anybody can read, or ``None``."""
        if payer is None or present is None or place in self.ledger:
            return None
        if not isinstance(present.value, DictionaryDHTValue) or len(present.value) < self.ledger.room.entries_per_key:
            return None
        crowd = self.ledger.crowd_under(place, present.value.subkeys())
        room, is_own_host = self.ledger.room, payer.host == payer.peer
        is_over = crowd[payer.peer] >= room.entries_per_key_and_peer
        is_over |= not is_own_host and crowd[payer.host] >= room.entries_per_key_and_host
        return CROWDED_KEY if is_over else None

    def remove_forged(self, place: Place) -> None:
        """Drop an entry that its owner has brought with a wrong signature."""
        payer = self.ledger.payer_of(place)
        self.ledger.forget(place)
        self._metrics.records_refused[WRONG_SIGNATURE] += 1
        if payer is not None:
            warn_seldom(
                "peer %s has stored a record with a wrong signature, which nobody gets. It lies or is broken: if it "
                "is yours, install the version of the others",
                payer.peer,
                about=payer.peer,
            )

    def _note_refusal(self, reason: str, payer: Payer) -> None:
        self._metrics.records_refused[reason] += 1
        warn_seldom(
            "refused a record of peer %s, which is %s: its records take %d bytes here, and all records %d of %d. The "
            "DHT is for few and small values",
            payer.peer,
            reason,
            self.ledger.bytes_of(payer),
            self.ledger.nbytes,
            self.ledger.room.nbytes,
        )

    def _note_eviction(self, evicted: int) -> None:
        self._metrics.records_evicted += evicted
        warn_seldom(
            "the records of others fill the %d bytes that they may take here: the farthest from this node go first. "
            "metrics.records_refused may show whose they are",
            self.ledger.room.nbytes,
        )

    def _drop(self, place: Place) -> None:
        (self.cache if place.in_cache else self.storage).drop(place.key_id, place.subkey)

    def _release(self, in_cache: bool, key_id: DHTID, value: StoredValue) -> None:
        """Stop charging everything that was stored under a key."""
        for subkey in value.subkeys() if isinstance(value, DictionaryDHTValue) else (None,):
            self.ledger.release(Place(in_cache, key_id, subkey))
