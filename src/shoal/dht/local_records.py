"""The records that one node keeps, and what it makes of those of others."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Hashable, Sequence

from shoal.base.clock import DHTExpiration
from shoal.base.logs import quoted
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.have_set import Entry, HaveSet
from shoal.dht.quotas import DEFAULT_ROOM, Payer, Place, Room, Shelves
from shoal.dht.records import MAX_ANSWER_BYTES, NOTHING_KNOWN, FindResult, Found, FoundRecord, NewRecord, pack_value
from shoal.dht.routing import DHTID
from shoal.dht.storage import DHTLocalStorage, DictionaryDHTValue, StoredValue, Unproven
from shoal.dht.validation import (
    PLAIN_VALUE,
    WHOLE_DICTIONARY,
    CompositeValidator,
    DHTRecord,
    RecordValidatorBase,
    check_lifetime,
    check_subkey,
    has_owned_entries,
)
from shoal.metrics import Metrics
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)

# A peer, or a host, with more records here must prove each of them when it brings it. A trainer has about ten.
MOST_RECORDS_OF_THE_TRUSTED, MOST_RECORDS_OF_A_TRUSTED_HOST = 16, 256

_OWN = Payer("this node", "this node")  # of its own entries, for which nobody pays


class LocalRecords:
    """Storage, cache and the validator that guards both.

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
        self.shelves = Shelves(cache_size, own_id, metrics or Metrics(), room)
        """What is stored and what is cached, and who pays for it."""
        self.storage, self.cache = self.shelves.storage, self.shelves.cache
        self.record_validator = record_validator

    @property
    def nbytes(self) -> int:
        """Bytes of memory that storage and cache take."""
        return self.shelves.ledger.nbytes

    def is_valid(self, record: DHTRecord) -> bool:
        """Whether the validator accepts a record."""
        return self.record_validator is None or self.record_validator.validate(record)

    def keep(self, record: NewRecord, payer: Payer | None = None) -> bool:
        """Put a record into storage or cache if it is valid, newer than the present one, and there is room for it.

        Args:
            payer: the peer that asks to store it; ``None``: this node itself.
        """
        key_id, packed_subkey, value, expiration_time, in_cache = record
        try:
            if packed_subkey == WHOLE_DICTIONARY:
                entries = self.unpack_dictionary(key_id, value)
                how = payer, has_owned_entries(self.record_validator, key_id.to_bytes(), entries)
                kept = [self.shelves.put(Place(in_cache, key_id, name), *item, *how) for name, item in entries.items()]
                return any(kept)
            checked = DHTRecord(key_id.to_bytes(), packed_subkey, value, check_lifetime(expiration_time))
            is_entry = packed_subkey != PLAIN_VALUE
            if is_entry and not in_cache and self._is_on_trust(checked, payer):
                value = Unproven(value)
            elif not self.is_valid(checked):
                return False
            subkey, is_owned = None, False
            if is_entry:
                subkey = MSGPackSerializer.loads(packed_subkey)
                check_subkey(subkey, packed_subkey)
                is_owned = self.record_validator is not None and self.record_validator.is_owned(checked)
            elif self._has_owned_entries(key_id, self.storage) or self._has_owned_entries(key_id, self.cache):
                return False
        except (ValueError, TypeError) as e:
            logger.debug("refused a record for key %s: %s", key_id, e)
            return False
        return self.shelves.put(Place(in_cache, key_id, subkey), value, expiration_time, payer, is_owned)

    def _has_owned_entries(self, key_id: DHTID, storage: DHTLocalStorage) -> bool:
        present = storage.get(key_id)
        return present is not None and has_owned_entries(self.record_validator, key_id.to_bytes(), present.value)

    def _is_on_trust(self, record: DHTRecord, payer: Payer | None) -> bool:
        """Whether an entry is kept without a look at its signature, because its owner has brought it.

        The connection has proved who that is. Other nodes want the signature, so it is checked before any of them gets
        the entry. Most entries are replaced before that: who finds a group withdraws at once, and who is told an entry
        often has it already.
        """
        validator = self.record_validator
        if payer is None or not isinstance(payer.peer, PeerID) or not isinstance(validator, CompositeValidator):
            return False
        of_peer, of_host = self.shelves.ledger.counts_of(payer)
        # Else somebody could bring thousands, and have them all checked at once.
        if of_peer >= MOST_RECORDS_OF_THE_TRUSTED or of_host >= MOST_RECORDS_OF_A_TRUSTED_HOST:
            return False
        return validator.is_proven_by_peer(record, payer.peer) and validator.validate(record, payer.peer)

    def prove(self, key_id: DHTID, value: StoredValue) -> None:
        """Look at all signatures in a value that nobody here has looked at; entries with wrong ones go.

        Args:
            value: of this key, or a part of it, that somebody else is to get.
        """
        if isinstance(value, bytes):
            return
        for subkey, item in value.items():
            if not isinstance(item.value, Unproven):
                continue
            proven = bytes(item.value)
            packed_subkey = MSGPackSerializer.dumps(subkey)
            if self.is_valid(DHTRecord(key_id.to_bytes(), packed_subkey, proven, item.expiration_time)):
                value.replace_value(subkey, proven)
                continue
            stored = self.storage.get(key_id)
            if stored is not None and not isinstance(stored.value, bytes) and stored.value.get(subkey) == item:
                self.shelves.remove_forged(Place(False, key_id, subkey))
            value.drop(subkey)

    def copy_for_others(
        self, key_id: DHTID, value: StoredValue, expiration_time: float, *, in_cache: bool = False
    ) -> NewRecord:
        """The record to send so that another node has what is stored here."""
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

    def read(self, key_id: DHTID, found: Found, value: bytes, expiration_time: float) -> StoredValue | None:
        """The checked value that another node found; ``None`` if there is none, or it is malformed or invalid."""
        try:
            if found is Found.DICTIONARY:
                return self.unpack_dictionary(key_id, value)
            if found is Found.PLAIN:
                expires = check_lifetime(expiration_time, is_kept=True)
                record = DHTRecord(key_id.to_bytes(), PLAIN_VALUE, value, expires)
                return value if self.is_valid(record) else None
        except (ValueError, TypeError) as e:
            logger.debug("ignored what another node found for key %s: %s", key_id, e)
        return None

    def read_result(self, key_id: DHTID, result: FindResult, node_ids: Sequence[int]) -> FoundRecord:
        """Another node's answer about a key, checked.

        Args:
            node_ids: all nodes of that node's answer.
        """
        neighbors = [node_ids[position] for position in result.nearest if position < len(node_ids)]
        value = self.read(key_id, result.found, result.value, result.expiration)
        if value is None:
            return FoundRecord(None, -math.inf, neighbors)
        expiration_time = result.expiration if isinstance(value, bytes) else value.latest_expiration_time
        return FoundRecord(value, expiration_time, neighbors)

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

        The entries of one network take turns by peer. So a stranger that stores thousands under the key of a run
        cannot crowd out the others. Within a turn, the given order holds.
        """
        cached = self.cache.get(key_id)
        in_cache, payer_of = cached is not None and cached.value is dictionary, self.shelves.ledger.payer_of
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

        Entries that only the rules of this run refuse are left out: that node need not know these rules.

        Raises:
            ValueError, TypeError: the dictionary is malformed, or an entry is forged, which every node would notice.
        """
        dictionary = DictionaryDHTValue.unpackb(packed)
        dictionary.maxsize = math.inf  # else its sender would limit what others tell of the same key
        left_out = []
        with dictionary.freeze():
            for subkey, item in dictionary.items():
                expiration_time = check_lifetime(item.expiration_time, is_kept=True)
                packed_subkey = MSGPackSerializer.dumps(subkey)
                check_subkey(subkey, packed_subkey)
                if not isinstance(item.value, bytes):
                    raise ValueError(f"entry {quoted(subkey)} of a dictionary is not bytes")
                record = DHTRecord(key_id.to_bytes(), packed_subkey, item.value, expiration_time)
                if not self.is_valid(record):
                    if self.record_validator is not None and self.record_validator.is_forged(record):
                        raise ValueError(f"entry {quoted(subkey)} of a dictionary is forged")
                    left_out.append(subkey)
        if left_out:
            dictionary.leave_out(left_out)
        return dictionary
