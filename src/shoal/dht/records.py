"""Records of the table: what nodes send each other about them, and what one node agrees to keep.

Lengths are limited by the types of the messages themselves: a message that breaks a limit is refused while it is being
decoded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from shoal.clock import DHTExpiration, get_dht_time
from shoal.dht.authorization import AuthorizedRequest, AuthorizedResponse
from shoal.dht.routing import DHTID, ID_BITS, RoutingTable
from shoal.dht.storage import DHTLocalStorage, DictionaryDHTValue, StoredValue
from shoal.dht.validation import (
    MAX_SUBKEY_BYTES,
    PLAIN_VALUE,
    WHOLE_DICTIONARY,
    DHTRecord,
    RecordValidatorBase,
    check_expiration,
    check_lifetime,
    check_subkey,
    has_owned_entries,
)
from shoal.errors import ProtocolError
from shoal.logs import quoted
from shoal.p2p import P2P, PeerID
from shoal.p2p.transport import Moment, PeerIDBytes
from shoal.serializer import MSGPackSerializer

logger = logging.getLogger(__name__)

# A node refuses records when it holds this much, so that nobody can fill its memory.
MAX_RECORD_BYTES_IN_MEMORY = 2**28

# Counting looks at every record, and a node that is full is asked again and again.
_SECONDS_BETWEEN_COUNTS = 5.0
# What a record takes besides its value, roughly.
_OVERHEAD_BYTES = 300

# Records for one node are sent in requests of about this size at most.
REQUEST_BYTES = 3 * 2**18

# Largest value of one record; the table is for small facts, tensors travel elsewhere.
MAX_VALUE_BYTES = 2**19

# What one call may carry, so that none keeps a node busy for long.
MAX_RECORDS_PER_STORE = 256
MAX_KEYS_PER_FIND = 64
# Most neighbors in one answer about one key.
MAX_NEIGHBORS = 128
# Most neighbors in one answer about all its keys, if the asker wants more about each than usual.
MAX_NEIGHBORS_TOLD = MAX_KEYS_PER_FIND * 20

MAX_ADDRESSES = 8
# More are not kept packed; a routing table has a few hundred nodes.
MAX_PACKED_CONTACTS = 4096
MAX_ADDRESS_LENGTH = 256

IDBytes = Annotated[bytes, Meta(min_length=20, max_length=20)]
NodeIDBytes = IDBytes | None
"""``None`` stands for a node in client mode, which must not enter anybody's routing table."""


class PingRequest(AuthorizedRequest):
    node_id: NodeIDBytes = None
    validate: bool = False
    """Please call me back and tell whether that worked."""


class PingResponse(AuthorizedResponse):
    node_id: NodeIDBytes = None
    dht_time: Moment = 0.0
    available: bool = False
    """The sender of the request can be called and has the id that it claims."""
    seen_at: Annotated[str, Meta(max_length=MAX_ADDRESS_LENGTH)] = ""
    """Where the sender of the request is seen from here, if that is known."""


class StoreRequest(AuthorizedRequest):
    """Parallel lists, one item for each record."""

    keys: Annotated[list[IDBytes], Meta(max_length=MAX_RECORDS_PER_STORE)]
    subkeys: Annotated[
        list[Annotated[bytes, Meta(max_length=MAX_SUBKEY_BYTES)]], Meta(max_length=MAX_RECORDS_PER_STORE)
    ]
    """In msgpack form, or one of the two markers of ``shoal.dht.validation``."""
    values: Annotated[list[bytes], Meta(max_length=MAX_RECORDS_PER_STORE)]
    expirations: Annotated[list[float], Meta(max_length=MAX_RECORDS_PER_STORE)]
    in_cache: Annotated[list[bool], Meta(max_length=MAX_RECORDS_PER_STORE)]
    node_id: NodeIDBytes = None

    @classmethod
    def of_records(cls, records: Sequence[NewRecord], node_id: NodeIDBytes) -> StoreRequest:
        """What asks another node to keep records; :func:`split_into_requests` sees to it that they fit."""
        return cls(
            keys=[record.key_id.to_bytes() for record in records],
            subkeys=[record.subkey for record in records],
            values=[record.value for record in records],
            expirations=[record.expiration_time for record in records],
            in_cache=[record.in_cache for record in records],
            node_id=node_id,
        )

    def unpack(self) -> list[NewRecord]:
        """The records.

        Raises:
            ProtocolError: the lists do not fit together, or a record is impossible.
        """
        columns: list[list[Any]] = [self.keys, self.subkeys, self.values, self.expirations, self.in_cache]
        lengths = [len(column) for column in columns]
        if len(set(lengths)) != 1:
            raise ProtocolError(f"a store request with lists of different lengths: {lengths}")
        try:
            for expiration_time in self.expirations:
                check_expiration(expiration_time)
        except ValueError as e:
            raise ProtocolError(f"a store request with an impossible expiration: {e}") from None
        largest = max(map(len, self.values), default=0)
        if largest > MAX_VALUE_BYTES:
            raise ProtocolError(f"a store request with a value of {largest} bytes, over the limit of {MAX_VALUE_BYTES}")
        return [NewRecord(*row) for row in zip(map(DHTID.from_bytes, self.keys), *columns[1:], strict=True)]


class StoreResponse(AuthorizedResponse):
    accepted: Annotated[list[bool], Meta(max_length=MAX_RECORDS_PER_STORE)]
    node_id: NodeIDBytes = None


class FindRequest(AuthorizedRequest):
    keys: Annotated[list[IDBytes], Meta(max_length=MAX_KEYS_PER_FIND)]
    node_id: NodeIDBytes = None
    neighbors: Annotated[int, Meta(ge=0, le=MAX_NEIGHBORS)] = 0
    """How many about each key the sender wants to hear of, if more than a node usually tells."""
    neighbors_only: bool = False
    """The values do not matter, as on the way to a store: leave them out."""


class NodeContact(msgspec.Struct, frozen=True, array_like=True):
    """How to reach a node."""

    peer_id: PeerIDBytes
    addresses: Annotated[list[Annotated[str, Meta(max_length=MAX_ADDRESS_LENGTH)]], Meta(max_length=MAX_ADDRESSES)]


class Found(IntEnum):
    """What an answer holds about one key."""

    NOTHING = 0
    PLAIN = 1
    DICTIONARY = 2
    # There is a value, but this answer is full: ask again for this key alone.
    TOO_MUCH = 3


class FindResult(msgspec.Struct, frozen=True, array_like=True):
    found: Found
    value: bytes
    expiration: float
    nearest: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_NEIGHBORS)]
    """Positions in the answer's list of nodes, nearest to the key first."""


class FindResponse(AuthorizedResponse):
    results: Annotated[list[FindResult], Meta(max_length=MAX_KEYS_PER_FIND)]
    """One for each key of the request."""
    node_ids: Annotated[bytes, Meta(max_length=20 * MAX_KEYS_PER_FIND * MAX_NEIGHBORS)]
    """The ids of all nodes that occur in the results, 20 bytes each."""
    contacts: list[msgspec.Raw]
    """A packed :class:`NodeContact` for each of these nodes. Most are never read: the asker knows the node already."""
    node_id: NodeIDBytes = None


_contact_encoder = msgspec.msgpack.Encoder()
_contact_decoder = msgspec.msgpack.Decoder(NodeContact)


def pack_contact(contact: NodeContact) -> msgspec.Raw:
    """The form in which a contact travels."""
    return msgspec.Raw(_contact_encoder.encode(contact))


class PackedContacts:
    """Contacts of many nodes in the form in which they travel, each packed once until addresses change."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p
        self._packed: dict[PeerID, msgspec.Raw] = {}
        self._address_changes = 0  # those that the packed contacts contain

    def pack(self, peer: PeerID) -> msgspec.Raw:
        """How to reach a peer."""
        if self._address_changes != self._p2p.address_changes or len(self._packed) > MAX_PACKED_CONTACTS:
            self._packed.clear()
            self._address_changes = self._p2p.address_changes
        packed = self._packed.get(peer)
        if packed is None:
            addresses = [str(address) for address in self._p2p.get_addresses(peer)[:MAX_ADDRESSES]]
            packed = self._packed[peer] = pack_contact(NodeContact(peer.to_bytes(), addresses))
        return packed


def unpack_contact(packed: msgspec.Raw) -> NodeContact:
    """Read what :func:`pack_contact` made.

    Raises:
        ValueError: not a contact.
    """
    try:
        return _contact_decoder.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ValueError(f"not a contact: {e}") from None


class FoundRecord(NamedTuple):
    """What a node answered about one key."""

    value: StoredValue | None
    expiration_time: DHTExpiration
    """Minus infinity if there is no value."""
    neighbors: list[int]
    """Ids of nodes near the key."""


class FindAnswer(NamedTuple):
    """What a node answered to a find request."""

    records: dict[DHTID, FoundRecord]
    contacts: dict[int, msgspec.Raw]
    """How to reach the nodes that it told of; see :func:`unpack_contact`."""
    node_id: bytes | None
    """Who it says it is."""


class NewRecord(NamedTuple):
    """A record on its way to a node that shall keep it."""

    key_id: DHTID
    subkey: bytes
    """In msgpack form, or one of the two markers of ``shoal.dht.validation``."""
    value: bytes
    expiration_time: DHTExpiration
    in_cache: bool = False

    @classmethod
    def of_stored(cls, key_id: DHTID, value: StoredValue, expiration_time: float, in_cache: bool = False) -> NewRecord:
        """What to send so that another node has what is stored here."""
        marker, packed = pack_value(value)
        return cls(key_id, marker, packed, float(expiration_time), in_cache)


def split_into_requests(records: Sequence[NewRecord]) -> Iterator[list[NewRecord]]:
    """Batches that each fit into one request."""
    batch: list[NewRecord] = []
    size = 0
    for record in records:
        record_size = len(record.value) + len(record.subkey) + 64
        if batch and (size + record_size > REQUEST_BYTES or len(batch) == MAX_RECORDS_PER_STORE):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += record_size
    if batch:
        yield batch


def pack_value(value: StoredValue) -> tuple[bytes, bytes]:
    """The marker that stands for the subkey, and the bytes, of a plain value or of a whole dictionary.

    A dictionary that is too large for a message loses the entries that expire first.
    """
    if isinstance(value, bytes):
        return PLAIN_VALUE, value
    packed = value.packb()
    if len(packed) > MAX_VALUE_BYTES:
        logger.warning("a dictionary of %d entries is over %d bytes: only a part is sent", len(value), MAX_VALUE_BYTES)
        packed = _largest_part(value).packb()
    return WHOLE_DICTIONARY, packed


def _largest_part(dictionary: DictionaryDHTValue[bytes]) -> DictionaryDHTValue[bytes]:
    part: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    size = 64
    for subkey, item in sorted(dictionary.items(), key=lambda entry: -entry[1].expiration_time):
        size += len(item.value) + len(MSGPackSerializer.dumps(subkey)) + 20
        if size > MAX_VALUE_BYTES:
            break
        part.store(subkey, item.value, item.expiration_time)
    return part


def _count_bytes(storage: DHTLocalStorage) -> int:
    size = 0
    for item in storage.values():
        entries = [item] if isinstance(item.value, bytes) else item.value.values()
        size += sum(len(entry.value) + _OVERHEAD_BYTES for entry in entries)
    return size


class LocalRecords:
    """Storage, cache and the validator that guards both.

    Args:
        cache_size: most records in the cache, ``None`` = no limit.
        record_validator: decides what may be stored and believed.
    """

    def __init__(self, cache_size: int | None, record_validator: RecordValidatorBase | None) -> None:
        self.storage = DHTLocalStorage()
        self.cache = DHTLocalStorage(maxsize=cache_size)
        self.record_validator = record_validator
        # At least as much as there is: replaced and expired records are still counted.
        self._bytes = 0
        self._next_count = -math.inf

    def is_valid(self, record: DHTRecord) -> bool:
        """Whether the validator accepts a record."""
        return self.record_validator is None or self.record_validator.validate(record)

    def keep(self, record: NewRecord) -> bool:
        """Put a record into storage or cache, if it is valid and newer than what is there."""
        size = len(record.value) + len(record.subkey) + _OVERHEAD_BYTES
        if not self._has_room_for(size):
            return False
        is_kept = self._keep(record)
        self._bytes += size * is_kept
        return is_kept

    def _has_room_for(self, size: int) -> bool:
        if self._bytes + size > MAX_RECORD_BYTES_IN_MEMORY and get_dht_time() >= self._next_count:
            self._bytes = _count_bytes(self.storage) + _count_bytes(self.cache)
            if self._bytes + size > MAX_RECORD_BYTES_IN_MEMORY:
                self._next_count = get_dht_time() + _SECONDS_BETWEEN_COUNTS
                logger.warning("this node holds %d bytes of records and refuses more until some expire", self._bytes)
        return self._bytes + size <= MAX_RECORD_BYTES_IN_MEMORY

    def _keep(self, record: NewRecord) -> bool:
        storage = self.cache if record.in_cache else self.storage
        key_id, packed_subkey, value, expiration_time, _ = record
        try:
            if packed_subkey == WHOLE_DICTIONARY:
                dictionary = self.unpack_dictionary(key_id, value)
                return storage.store(key_id, dictionary, dictionary.latest_expiration_time)
            check_lifetime(expiration_time)
            if not self.is_valid(DHTRecord(key_id.to_bytes(), packed_subkey, value, expiration_time)):
                return False
            if packed_subkey == PLAIN_VALUE:
                if any(self._has_owned_entries(key_id, present) for present in (self.storage, self.cache)):
                    return False
                return storage.store(key_id, value, expiration_time)
            subkey = MSGPackSerializer.loads(packed_subkey)
            check_subkey(subkey, packed_subkey)
        except (ValueError, TypeError) as e:
            logger.debug("refused a record for key %s: %s", key_id, e)
            return False
        return storage.store_subkey(key_id, subkey, value, expiration_time)

    def _has_owned_entries(self, key_id: DHTID, storage: DHTLocalStorage) -> bool:
        present = storage.get(key_id)
        return present is not None and has_owned_entries(self.record_validator, key_id.to_bytes(), present.value)

    def find(self, key_id: DHTID) -> tuple[StoredValue, DHTExpiration] | None:
        """What is here about a key, in storage or cache, whichever expires later; what somebody owns goes first."""
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
        """Check what another node found; ``None`` if it is nothing, malformed or invalid."""
        try:
            if found is Found.DICTIONARY:
                return self.unpack_dictionary(key_id, value)
            if found is Found.PLAIN:
                record = DHTRecord(key_id.to_bytes(), PLAIN_VALUE, value, check_lifetime(expiration_time))
                return value if self.is_valid(record) else None
        except (ValueError, TypeError) as e:
            logger.debug("ignored what another node found for key %s: %s", key_id, e)
        return None

    def read_result(self, key_id: DHTID, result: FindResult, node_ids: Sequence[int]) -> FoundRecord:
        """What another node answered about a key, checked.

        Args:
            node_ids: all nodes of its answer.
        """
        neighbors = [node_ids[position] for position in result.nearest if position < len(node_ids)]
        value = self.read(key_id, result.found, result.value, result.expiration)
        if value is None:
            return FoundRecord(None, -math.inf, neighbors)
        expiration_time = result.expiration if isinstance(value, bytes) else value.latest_expiration_time
        return FoundRecord(value, expiration_time, neighbors)

    def answer(self, key_id: DHTID, nearest: list[int], room: int) -> FindResult:
        """What to tell another node about a key.

        Args:
            nearest: positions of the nearest nodes in the answer.
            room: bytes that are left in it.
        """
        item = self.find(key_id)
        if item is None:
            return FindResult(Found.NOTHING, b"", 0.0, nearest)
        marker, packed = pack_value(item[0])
        if len(packed) > room:
            return FindResult(Found.TOO_MUCH, b"", 0.0, nearest)
        found = Found.DICTIONARY if marker == WHOLE_DICTIONARY else Found.PLAIN
        return FindResult(found, packed, float(item[1]), nearest)

    def unpack_dictionary(self, key_id: DHTID, packed: bytes) -> DictionaryDHTValue[bytes]:
        """Read a dictionary that came from elsewhere.

        Raises:
            ValueError, TypeError: malformed, or one of its entries is invalid.
        """
        dictionary = DictionaryDHTValue.unpackb(packed)
        with dictionary.freeze():
            for subkey, item in dictionary.items():
                expiration_time, packed_subkey = check_lifetime(item.expiration_time), MSGPackSerializer.dumps(subkey)
                check_subkey(subkey, packed_subkey)
                if not isinstance(item.value, bytes):
                    raise ValueError(f"entry {quoted(subkey)} of a dictionary is not bytes")
                if not self.is_valid(DHTRecord(key_id.to_bytes(), packed_subkey, item.value, expiration_time)):
                    raise ValueError(f"entry {quoted(subkey)} of a dictionary was refused by the validator")
        return dictionary


def records_for_newcomer(
    newcomer: DHTID, storage: DHTLocalStorage, table: RoutingTable, num_replicas: int
) -> Iterator[tuple[DHTID, StoredValue, DHTExpiration]]:
    """The records that a newcomer should hold and that nobody is nearer to pass on than this node."""
    own_id = table.node_id
    bits_not_shared = ID_BITS - _bits_shared_by_neighborhood(newcomer, table, num_replicas)
    newcomer_is_near = not (own_id ^ newcomer) >> bits_not_shared
    for key, item in storage.items():
        # Keys from the own neighborhood have all their replicas in it: a newcomer from elsewhere is none of them.
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
    nearest, farthest = neighbors[0][0], neighbors[-1][0]
    is_replica = len(neighbors) < num_replicas or newcomer ^ key < farthest ^ key
    return is_replica and table.node_id ^ key < nearest ^ key
