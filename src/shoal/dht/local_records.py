"""The records that one node keeps: which ones it accepts, what it answers, and how much memory each peer may take.

A node checks each record with its validators, before it keeps one and before it believes one from another node.

Every record is charged to the peer that stored it: its bytes plus Python's overhead. While at most half of the room is
taken, no record is refused for its size. Beyond that, each peer gets only a share, and so does each public network,
because a stranger may run many peers but has few networks. When all room is taken, the records farthest from this node
are evicted first, because other nodes hold them too. Among those, the records that would live longest are evicted
first, because shoal's own records live for minutes and are stored again.

Keeping a record takes constant or logarithmic time.
"""

from __future__ import annotations

import functools
import heapq
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.base.clock import DHTExpiration, get_dht_time
from shoal.base.logs import Seldom, quoted, words_of
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.records import (
    MAX_ANSWER_BYTES,
    NOTHING_KNOWN,
    Entry,
    FindResult,
    Found,
    FoundRecord,
    HaveSet,
    NewRecord,
    pack_value,
)
from shoal.dht.routing import DHTID, ID_BITS, RoutingTable
from shoal.dht.storage import (
    DHTLocalStorage,
    DictionaryDHTValue,
    ExpiryHeap,
    StoredValue,
    Subkey,
    Unproven,
    ValueWithExpiration,
)
from shoal.dht.validation import (
    KEPT,
    PLAIN_VALUE,
    WHOLE_DICTIONARY,
    CompositeValidator,
    DHTRecord,
    Outcome,
    Reason,
    RecordError,
    RecordValidatorBase,
    check_lifetime,
    check_subkey,
    has_owned_entries,
)
from shoal.metrics import Metrics
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)
warn_seldom = Seldom(logger.warning)

# --- memory -----------------------------------------------------------------------------------------------------------

# Measured by a test: the overhead of a record in storage and here besides its value and subkey: entries of dictionaries
# and heaps (some outdated), tuples, and numbers.
BYTES_PER_RECORD = 1000
# Measured: equal subkeys that outdated heap entries keep in memory while a record is replaced repeatedly.
COPIES_OF_SUBKEY = 3
# Measured: overhead of a dictionary besides its entries; each entry is charged its part when it is stored.
BYTES_PER_DICTIONARY = 600


@dataclass(frozen=True)
class Room:
    """How much the records of one node may take. All are chosen: a trainer has about ten records of 300 bytes."""

    nbytes: int = 2**28
    """The limit for all records together. The other limits apply only beyond half of it."""
    bytes_per_peer: int = 2**23
    records_per_peer: int = 2**13
    bytes_per_host: int = 2**25
    records_per_host: int = 2**15
    entries_per_key: int = 2**11
    """The next two limits apply to dictionaries with more entries than this: about as many as an answer can carry."""
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
        reason: why more is refused.
    """

    def __init__(self, nbytes: int, records: int, reason: Reason) -> None:
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
        # By key with very many entries: how many each peer, and each host, has brought.
        self._crowds: dict[tuple[bool, DHTID], Counter[Hashable]] = {}
        self._by_expiration = ExpiryHeap(self._charges)
        # The order of eviction; ``None`` while there is room.
        self._worst_first: list[tuple[bool, int, float, _Charge]] | None = None
        self.quotas = (
            _Quota(room.bytes_per_peer, room.records_per_peer, Reason.PEER_QUOTA),
            _Quota(room.bytes_per_host, room.records_per_host, Reason.HOST_QUOTA),
        )
        """The quotas of peers, and of hosts."""

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

    def reason_to_refuse(self, place: Place, size: int, payer: Payer | None) -> Reason | None:
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
        """Charge a stored record, and make room if need be, perhaps by evicting it. Returns the number of evictions."""
        self.release(place)
        charge = self._charges[place] = _Charge(place, size, expiration_time, payer)
        self.nbytes += size
        if payer is not None:
            of_peers, of_hosts = self.quotas
            of_peers.take(payer.peer, size)
            of_hosts.take(payer.host, size)
        if self._crowds and (crowd := self._crowds.get(place[:2])) is not None:
            crowd.update(_names_of(payer))
        self._by_expiration.push(place, expiration_time)
        most = 3 * len(self._charges) // 2 + 16
        if len(self._by_expiration) > most:
            self._by_expiration.rebuild()
        if self._worst_first is not None:
            heapq.heappush(self._worst_first, self._rank(charge))
            if len(self._worst_first) > most:  # it is sorted again the next time there is no room
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
        """Remove expired records, which would take memory until the next access."""
        now = get_dht_time()
        while self._by_expiration.earliest < now:
            first = self._by_expiration.first()
            if first is None or first.expiration_time >= now:
                return
            self.forget(first.key)

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


# --- records ----------------------------------------------------------------------------------------------------------

# A peer or a host with more records than this must prove each new one. Chosen: a trainer has about ten records.
MOST_RECORDS_OF_THE_TRUSTED, MOST_RECORDS_OF_A_TRUSTED_HOST = 16, 256

_OWN = Payer("this node", "this node")  # stands for this node, which pays for nothing
_FOUND, _NOTHING = Outcome(Reason.FOUND), Outcome(Reason.NOTHING)


class LocalRecords:
    """Storage and cache of a node, the validator that guards both, and the ledger of their memory.

    Args:
        cache_size: most records in the cache, ``None`` = no limit.
        record_validator: decides which records may be stored and believed.
        own_id: the id of the node; when there is no room for all, records near it are kept longest.
        metrics: counts refused and evicted records.
        room: how much may be kept.
    """

    def __init__(
        self,
        cache_size: int | None,
        record_validator: RecordValidatorBase | None,
        own_id: int = 0,
        metrics: Metrics | None = None,
        room: Room = DEFAULT_ROOM,
    ) -> None:
        self.storage = DHTLocalStorage()
        """Records that this node was chosen to hold."""
        self.cache = DHTLocalStorage(maxsize=cache_size)
        """Copies of records that others hold."""
        self.record_validator = CompositeValidator.of(record_validator)
        self.ledger = Ledger(room, own_id, self._drop)
        self._metrics = metrics or Metrics()
        for in_cache, storage in ((False, self.storage), (True, self.cache)):
            storage.on_drop = functools.partial(self._release, in_cache)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that storage and cache take."""
        return self.ledger.nbytes

    # --- keeping ------------------------------------------------------------------------------------------------------

    def keep(self, record: NewRecord, payer: Payer | None = None) -> Outcome:
        """Put a record into storage or cache if it is valid, newer than the present one, and there is room for it.

        Args:
            payer: the peer that asks to store it; ``None``: this node itself.
        """
        outcome = self._keep(record, payer)
        if not outcome and payer is not None:
            self._note_refusal(outcome.reason, payer)
        return outcome

    def _keep(self, record: NewRecord, payer: Payer | None) -> Outcome:
        key_id, packed_subkey, value, expiration_time, in_cache = record
        try:
            if packed_subkey == WHOLE_DICTIONARY:
                return self._keep_dictionary(record, self.unpack_dictionary(key_id, value), payer)
            checked = DHTRecord(key_id.to_bytes(), packed_subkey, value, check_lifetime(expiration_time))
            is_entry = packed_subkey != PLAIN_VALUE
            if is_entry and not in_cache and self._is_on_trust(checked, payer):
                value = Unproven(value)
            elif (refusal := self._refusal(checked)) is not None:
                return refusal
            subkey, is_owned = None, False
            if is_entry:
                subkey = MSGPackSerializer.loads(packed_subkey)
                check_subkey(subkey, packed_subkey)
                is_owned = self.record_validator.is_owned(checked)
            elif self._has_owned_entries(key_id, self.storage) or self._has_owned_entries(key_id, self.cache):
                return Outcome(Reason.OWNED)
        except (ValueError, TypeError) as e:
            logger.debug("refused a record for key %s: %s", key_id, e)
            return Outcome(e.reason if isinstance(e, RecordError) else Reason.MALFORMED, words_of(e))
        return self._put(Place(in_cache, key_id, subkey), value, expiration_time, payer, is_owned)

    def _keep_dictionary(self, record: NewRecord, entries: DictionaryDHTValue[bytes], payer: Payer | None) -> Outcome:
        """Keep the entries one by one; the outcome is that of the first one that is kept, if any."""
        is_owned = has_owned_entries(self.record_validator, record.key_id.to_bytes(), entries)
        outcomes = [
            self._put(Place(record.in_cache, record.key_id, name), item.value, item.expiration_time, payer, is_owned)
            for name, item in entries.items()
        ]
        return next(filter(bool, outcomes), outcomes[0] if outcomes else Outcome(Reason.EXPIRED))

    def _put(
        self, place: Place, value: bytes, expiration_time: DHTExpiration, payer: Payer | None, is_owned: bool
    ) -> Outcome:
        """Keep a valid record if it is newer than the present one and there is room for it.

        Args:
            payer: the peer that asks to store it; ``None``: this node itself.
            is_owned: the record has an owner, or other entries of its dictionary have. A plain value, which anyone can
                write, makes way for it, however long that value would live.
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
        if reason is not None:
            return Outcome(reason)
        is_expired = expiration_time < get_dht_time()
        if is_owned and not is_expired:
            storage.drop(key_id, None)
        is_other_kind = present is not None and isinstance(present.value, DictionaryDHTValue) is (subkey is None)
        if not storage.store(key_id, value, expiration_time, subkey):
            if is_expired:
                return Outcome(Reason.EXPIRED)
            if present is None:
                return Outcome(Reason.NO_ROOM)
            return Outcome(Reason.OTHER_KIND if is_other_kind else Reason.NOT_NEWER)
        if present is not None and is_other_kind:
            # The old value was of the other kind (plain or dictionary), so the new one has replaced all of it.
            self._release(in_cache, key_id, present.value)
        evicted = self.ledger.note(place, size, expiration_time, payer)
        if evicted:
            self._note_eviction(evicted)
        return KEPT if not evicted or place in self.ledger else Outcome(Reason.NO_ROOM)

    def _reason_of_key(
        self, place: Place, present: ValueWithExpiration[StoredValue] | None, payer: Payer | None
    ) -> Reason | None:
        """The reason to refuse another entry of a dictionary that is too large to be read, or ``None``."""
        if payer is None or present is None or place in self.ledger:
            return None
        room = self.ledger.room
        if not isinstance(present.value, DictionaryDHTValue) or len(present.value) < room.entries_per_key:
            return None
        crowd = self.ledger.crowd_under(place, present.value.subkeys())
        is_own_host = payer.host == payer.peer
        is_over = crowd[payer.peer] >= room.entries_per_key_and_peer
        is_over |= not is_own_host and crowd[payer.host] >= room.entries_per_key_and_host
        return Reason.CROWDED_KEY if is_over else None

    def _note_refusal(self, reason: Reason, payer: Payer) -> None:
        self._metrics.records_refused[reason] += 1
        if reason in (Reason.PEER_QUOTA, Reason.HOST_QUOTA, Reason.CROWDED_KEY):
            warn_seldom(
                "refused a record of peer %s, which is %s: its records take %d bytes here, and all records %d of %d. "
                "The DHT is for few and small values",
                payer.peer,
                reason,
                self.ledger.bytes_of(payer),
                self.ledger.nbytes,
                self.ledger.room.nbytes,
            )

    def _note_eviction(self, evicted: int) -> None:
        self._metrics.records_evicted += evicted
        warn_seldom(
            "the records of others fill the %d bytes that they may take here: the farthest from this node are evicted. "
            "metrics.records_refused may show whose they are",
            self.ledger.room.nbytes,
        )

    def _drop(self, place: Place) -> None:
        (self.cache if place.in_cache else self.storage).drop(place.key_id, place.subkey)

    def _release(self, in_cache: bool, key_id: DHTID, value: StoredValue) -> None:
        """Stop charging everything that was stored under a key."""
        for subkey in value.subkeys() if isinstance(value, DictionaryDHTValue) else (None,):
            self.ledger.release(Place(in_cache, key_id, subkey))

    # --- checking -----------------------------------------------------------------------------------------------------

    def _refusal(self, record: DHTRecord, brought_by: PeerID | None = None) -> Outcome | None:
        """The validator's refusal of a record, if it refuses it."""
        validator = self.record_validator.refused_by(record, brought_by)
        if validator is None:
            return None
        return Outcome(validator.reason, type(validator).__name__ if validator.reason is Reason.INVALID else "")

    def _has_owned_entries(self, key_id: DHTID, storage: DHTLocalStorage) -> bool:
        present = storage.get(key_id)
        return present is not None and has_owned_entries(self.record_validator, key_id.to_bytes(), present.value)

    def _is_on_trust(self, record: DHTRecord, payer: Payer | None) -> bool:
        """Whether an entry is kept before its signature is checked, because its owner has brought it.

        The connection has proved the owner's identity. Other nodes need the signature, so it is checked before any of
        them gets the entry. Most entries are replaced earlier, such as declarations of peers that soon find a group.
        """
        if payer is None or not isinstance(payer.peer, PeerID):
            return False
        of_peer, of_host = self.ledger.counts_of(payer)
        # Otherwise a peer could bring thousands, which would all be checked at once.
        if of_peer >= MOST_RECORDS_OF_THE_TRUSTED or of_host >= MOST_RECORDS_OF_A_TRUSTED_HOST:
            return False
        is_proven = self.record_validator.is_proven_by_peer(record, payer.peer)
        return is_proven and self._refusal(record, payer.peer) is None

    def prove(self, key_id: DHTID, value: StoredValue) -> None:
        """Check all signatures in a value that have not been checked yet, and drop entries whose signature is wrong.

        Args:
            value: the value of this key, or a part of it, that another node is about to get.
        """
        if isinstance(value, bytes):
            return
        for subkey, item in value.items():
            if not isinstance(item.value, Unproven):
                continue
            proven = bytes(item.value)
            packed_subkey = MSGPackSerializer.dumps(subkey)
            if self._refusal(DHTRecord(key_id.to_bytes(), packed_subkey, proven, item.expiration_time)) is None:
                value.replace_value(subkey, proven)
                continue
            stored = self.storage.get(key_id)
            if stored is not None and not isinstance(stored.value, bytes) and stored.value.get(subkey) == item:
                self._remove_forged(Place(False, key_id, subkey))
            value.drop(subkey)

    def _remove_forged(self, place: Place) -> None:
        """Drop an entry that its owner has brought with a wrong signature."""
        payer = self.ledger.payer_of(place)
        self.ledger.forget(place)
        self._metrics.records_refused[Reason.WRONG_SIGNATURE] += 1
        if payer is not None:
            warn_seldom(
                "peer %s has stored a record with a wrong signature, which is dropped. It lies or is broken: if it "
                "is yours, install the version of the others",
                payer.peer,
                about=payer.peer,
            )

    # --- answering others, and reading their answers ------------------------------------------------------------------

    def copy_for_others(
        self, key_id: DHTID, value: StoredValue, expiration_time: float, *, in_cache: bool = False
    ) -> NewRecord:
        """The record that copies a value stored here to another node."""
        self.prove(key_id, value)
        marker, packed = pack_value(value, in_turns=functools.partial(self._in_turns, key_id, value))
        return NewRecord(key_id, marker, packed, float(expiration_time), in_cache)

    def find(self, key_id: DHTID) -> tuple[StoredValue, DHTExpiration] | None:
        """The value of a key in storage or cache: one with owned entries comes first, then the later expiration."""
        stored, cached = self.storage.get(key_id), self.cache.get(key_id)
        if stored is None or cached is None:
            return stored or cached
        if type(stored.value) is not type(cached.value):
            if self._has_owned_entries(key_id, self.storage):
                return stored
            if self._has_owned_entries(key_id, self.cache):
                return cached
        return cached if cached.expiration_time > stored.expiration_time else stored

    def read(
        self, key_id: DHTID, found: Found, value: bytes, expiration_time: float
    ) -> tuple[StoredValue | None, Outcome]:
        """The checked value that another node found, if any, or why there is none."""
        try:
            if found is Found.DICTIONARY:
                return self.unpack_dictionary(key_id, value), _FOUND
            if found is Found.PLAIN:
                expires = check_lifetime(expiration_time, is_kept=True)
                refusal = self._refusal(DHTRecord(key_id.to_bytes(), PLAIN_VALUE, value, expires))
                return (value, _FOUND) if refusal is None else (None, refusal)
        except (ValueError, TypeError) as e:
            logger.debug("ignored what another node found for key %s: %s", key_id, e)
            return None, Outcome(e.reason if isinstance(e, RecordError) else Reason.MALFORMED, words_of(e))
        return None, _NOTHING

    def read_result(self, key_id: DHTID, result: FindResult, node_ids: Sequence[int]) -> FoundRecord:
        """Another node's answer about a key, checked.

        Args:
            node_ids: all nodes of that node's answer.
        """
        neighbors = [node_ids[position] for position in result.nearest if position < len(node_ids)]
        value, outcome = self.read(key_id, result.found, result.value, result.expiration)
        if value is None:
            return FoundRecord(None, -math.inf, neighbors, outcome)
        expiration_time = result.expiration if isinstance(value, bytes) else value.latest_expiration_time
        return FoundRecord(value, expiration_time, neighbors, outcome)

    def answer(
        self, key_id: DHTID, nearest: list[int], room: int, known: HaveSet = NOTHING_KNOWN, most: int = 0
    ) -> FindResult:
        """This node's answer about a key.

        Args:
            nearest: positions of the nearest nodes in the answer.
            room: bytes that are left in the answer.
            known: entries that the asker has.
            most: as in :class:`FindRequest`.
        """
        item = self.find(key_id)
        if item is None:
            return FindResult(Found.NOTHING, b"", 0.0, nearest)
        in_turns = functools.partial(self._in_turns, key_id, item[0])
        value = item[0] if isinstance(item[0], bytes) else known.without_known(key_id, item[0], most, in_turns)
        self.prove(key_id, value)
        marker, packed = pack_value(value, MAX_ANSWER_BYTES, in_turns)
        if len(packed) > room:
            return FindResult(Found.TOO_MUCH, b"", 0.0, nearest)
        found = Found.DICTIONARY if marker == WHOLE_DICTIONARY else Found.PLAIN
        return FindResult(found, packed, float(item[1]), nearest)

    def _in_turns(self, key_id: DHTID, dictionary: StoredValue, entries: list[Entry]) -> list[Entry]:
        """Entries of one key in another order: one of each network that has brought any, then the second one of each.

        The entries of one network take turns by peer, so a stranger that stores thousands of entries under the key of a
        run cannot crowd out the others. Within a turn, the given order holds.
        """
        cached = self.cache.get(key_id)
        in_cache, payer_of = cached is not None and cached.value is dictionary, self.ledger.payer_of
        of_peer, of_host = Counter[Hashable](), Counter[Hashable]()
        by_peer: list[tuple[int, Hashable, Entry]] = []
        for entry in entries:
            payer = payer_of(Place(in_cache, key_id, entry[0])) or _OWN
            by_peer.append((of_peer[payer.peer], payer.host, entry))
            of_peer[payer.peer] += 1
        if len(by_peer) == len(of_peer) == len({host for _, host, _ in by_peer}):
            return entries  # the usual case: each has one
        in_order: list[tuple[int, Entry]] = []
        for _, host, entry in sorted(by_peer, key=lambda each: each[0]):
            in_order.append((of_host[host], entry))
            of_host[host] += 1
        return [entry for _, entry in sorted(in_order, key=lambda each: each[0])]

    def unpack_dictionary(self, key_id: DHTID, packed: bytes) -> DictionaryDHTValue[bytes]:
        """Read and check a dictionary from another node.

        Entries that only the rules of this run refuse are left out, because that node need not know these rules.

        Raises:
            ValueError, TypeError: the dictionary is malformed, or an entry is forged, which every node would notice.
        """
        dictionary = DictionaryDHTValue.unpackb(packed)
        dictionary.maxsize = math.inf  # otherwise its sender would limit the answers of others for the same key
        left_out = []
        with dictionary.freeze():
            for subkey, item in dictionary.items():
                expiration_time = check_lifetime(item.expiration_time, is_kept=True)
                packed_subkey = MSGPackSerializer.dumps(subkey)
                check_subkey(subkey, packed_subkey)
                if not isinstance(item.value, bytes):
                    raise ValueError(f"entry {quoted(subkey)} of a dictionary is not bytes")
                record = DHTRecord(key_id.to_bytes(), packed_subkey, item.value, expiration_time)
                if self._refusal(record) is not None:
                    if self.record_validator.is_forged(record):
                        raise RecordError(Reason.WRONG_SIGNATURE, f"entry {quoted(subkey)} of a dictionary is forged")
                    left_out.append(subkey)
        if left_out:
            dictionary.leave_out(left_out)
        return dictionary


# --- replicas ---------------------------------------------------------------------------------------------------------


def records_for_newcomer(
    newcomer: DHTID, storage: DHTLocalStorage, table: RoutingTable, num_replicas: int
) -> Iterator[tuple[DHTID, StoredValue, DHTExpiration]]:
    """The records to pass on to a new neighbor: those that it should hold, and to which this node is nearest."""
    own_id = table.node_id
    bits_not_shared = ID_BITS - _bits_shared_by_neighborhood(newcomer, table, num_replicas)
    newcomer_is_near = not (own_id ^ newcomer) >> bits_not_shared
    for key, item in storage.items():
        # All replicas of a key in this node's neighborhood are inside it, so a newcomer from outside is none of them.
        if not newcomer_is_near and not (own_id ^ key) >> bits_not_shared:
            continue
        if _should_pass_on(key, newcomer, table, num_replicas):
            yield key, item.value, item.expiration_time


def _bits_shared_by_neighborhood(newcomer: DHTID, table: RoutingTable, num_replicas: int) -> int:
    """Leading bits that this node has in common with its ``num_replicas`` nearest neighbors; 0 if it has fewer."""
    nearest = table.get_nearest_neighbors(table.node_id, num_replicas, exclude=newcomer)
    if len(nearest) < num_replicas:
        return 0
    return DHTID.longest_common_prefix_length(table.node_id, *(node_id for node_id, _ in nearest))


def _should_pass_on(key: DHTID, newcomer: DHTID, table: RoutingTable, num_replicas: int) -> bool:
    neighbors = table.get_nearest_neighbors(key, num_replicas, exclude=newcomer)
    if not neighbors:
        return True
    nearest, farthest = (table.rank(node_id, key) for node_id, _ in (neighbors[0], neighbors[-1]))
    is_replica = len(neighbors) < num_replicas or table.rank(newcomer, key) < farthest
    return is_replica and table.rank(table.node_id, key) < nearest
