"""The messages that carry records of the DHT.

The types of the messages limit all lengths: a message that breaks a limit is refused while it is being decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from shoal.base.clock import DHTExpiration
from shoal.base.logs import Seldom, one_line
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.authorization import AuthorizedRequest, AuthorizedResponse
from shoal.dht.have_set import MAX_KNOWN_BYTES, Entry, HaveSet
from shoal.dht.routing import DHTID, id_of
from shoal.dht.storage import MAX_DICTIONARY_ENTRIES, DictionaryDHTValue, StoredValue
from shoal.dht.validation import (
    MAX_SUBKEY_BYTES,
    PLAIN_VALUE,
    WHOLE_DICTIONARY,
    check_expiration,
)
from shoal.errors import ProtocolError
from shoal.net.addresses import is_private
from shoal.net.transport import Moment, PeerIDBytes
from shoal.p2p import P2P, PeerID

logger = logging.getLogger(__name__)
warn_seldom = Seldom(logger.warning)

# Approximate maximum size of one store request.
REQUEST_BYTES = 3 * 2**18

NOTHING_KNOWN = HaveSet(b"")

# Largest value of one record; the DHT is for small facts, tensors travel elsewhere.
MAX_VALUE_BYTES = 2**19

# Most bytes of values in one answer, and so of one dictionary in it.
MAX_ANSWER_BYTES = 3 * 2**18

# Limits of one call, so that no call keeps a node busy for long.
MAX_RECORDS_PER_STORE = 256
MAX_KEYS_PER_FIND = 64
# Most neighbors per key in one answer.
MAX_NEIGHBORS = 128
# Most neighbors for all keys of one answer, if the asker wants more per key than usual.
MAX_NEIGHBORS_TOLD = MAX_KEYS_PER_FIND * 20

MAX_ADDRESSES = 8
# Most contacts kept in packed form; a routing table has a few hundred nodes.
MAX_PACKED_CONTACTS = 4096
MAX_ADDRESS_LENGTH = 256

IDBytes = Annotated[bytes, Meta(min_length=20, max_length=20)]
NodeIDBytes = IDBytes | None
"""``None`` stands for a node in client mode, which must not enter anybody's routing table."""


class PingRequest(AuthorizedRequest):
    node_id: NodeIDBytes = None
    validate: bool = False
    """Asks the receiver to call back, and to tell whether that worked."""


class PingResponse(AuthorizedResponse):
    node_id: NodeIDBytes = None
    dht_time: Moment = 0.0
    available: bool = False
    """The sender of the request can be called and has the id that it claims."""
    seen_at: Annotated[str, Meta(max_length=MAX_ADDRESS_LENGTH)] = ""
    """The address from which the sender of the request came, if it is known."""


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
        """A request to keep records; :func:`split_into_requests` makes sure that they fit."""
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
        return [NewRecord(*row) for row in zip(map(id_of, self.keys), *columns[1:], strict=True)]


class StoreResponse(AuthorizedResponse):
    accepted: Annotated[list[bool], Meta(max_length=MAX_RECORDS_PER_STORE)]
    node_id: NodeIDBytes = None


class FindRequest(AuthorizedRequest):
    keys: Annotated[list[IDBytes], Meta(max_length=MAX_KEYS_PER_FIND)]
    node_id: NodeIDBytes = None
    neighbors: Annotated[int, Meta(ge=0, le=MAX_NEIGHBORS)] = 0
    """How many nodes per key the sender wants, if more than a node usually tells."""
    neighbors_only: bool = False
    """Leave the values out: the sender does not need them, as on the way to a store."""
    known: Annotated[bytes, Meta(max_length=MAX_KNOWN_BYTES)] = b""
    """Nodes and entries that the sender has: these may be left out, see :mod:`shoal.dht.have_set`."""
    most: Annotated[int, Meta(ge=0, le=MAX_DICTIONARY_ENTRIES)] = 0
    """The sender wants only so many entries of a dictionary, drawn at random; 0: all of them."""


class NodeContact(msgspec.Struct, frozen=True, array_like=True):
    """How to reach a node."""

    peer_id: PeerIDBytes
    addresses: Annotated[list[Annotated[str, Meta(max_length=MAX_ADDRESS_LENGTH)]], Meta(max_length=MAX_ADDRESSES)]


class Found(IntEnum):
    """The kind of value that an answer holds for one key."""

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
    """The wire form of a contact."""
    return msgspec.Raw(_contact_encoder.encode(contact))


class PackedContacts:
    """Contacts of many nodes in wire form, each packed once until addresses change."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p
        # By peer, and whether it is for somebody on the internet.
        self._packed: dict[tuple[PeerID, bool], msgspec.Raw | None] = {}
        self._address_changes = 0  # the count that the packed contacts reflect

    def pack(self, peer: PeerID, asker_host: str = "") -> msgspec.Raw | None:
        """The packed contact of a peer.

        Args:
            asker_host: where on the internet the contact is for. Private addresses are left out there, unless the peer
                itself is behind the same router; ``None`` is returned if there are no others.
        """
        if self._address_changes != self._p2p.address_changes or len(self._packed) > MAX_PACKED_CONTACTS:
            self._packed.clear()
            self._address_changes = self._p2p.address_changes
        is_far = bool(asker_host) and asker_host != self._p2p.far_host_of(peer)
        if (peer, is_far) not in self._packed:
            known = self._p2p.get_addresses(peer)
            told = [str(address) for address in known if not is_far or not is_private(address)][:MAX_ADDRESSES]
            is_useless = is_far and not told
            self._packed[peer, is_far] = None if is_useless else pack_contact(NodeContact(peer.to_bytes(), told))
        return self._packed[peer, is_far]


def unpack_contact(packed: msgspec.Raw) -> NodeContact:
    """Read the wire form of a contact.

    Raises:
        ValueError: not a contact.
    """
    try:
        return _contact_decoder.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ValueError(f"not a contact: {one_line(str(e))}") from None


def peer_of_contact(packed: msgspec.Raw) -> bytes:
    """The peer id in a packed contact, read without the rest; empty if this is no usual contact."""
    raw = memoryview(packed)
    # 0x92: a list of two; 0xC4: bytes whose length takes one byte.
    is_usual = len(raw) > 3 and raw[0] == 0x92 and raw[1] == 0xC4
    return bytes(raw[3 : 3 + raw[2]]) if is_usual else b""


class FoundRecord(NamedTuple):
    """A node's answer about one key."""

    value: StoredValue | None
    expiration_time: DHTExpiration
    """Minus infinity if there is no value."""
    neighbors: list[int]
    """Ids of nodes near the key."""


class FindAnswer(NamedTuple):
    """A node's answer to a find request."""

    records: dict[DHTID, FoundRecord]
    contacts: dict[int, msgspec.Raw]
    """Packed contacts of the nodes in the answer; see :func:`unpack_contact`."""
    node_id: bytes | None
    """The id that the node claims."""


class NewRecord(NamedTuple):
    """A record on its way to a node that is to keep it."""

    key_id: DHTID
    subkey: bytes
    """In msgpack form, or one of the two markers of ``shoal.dht.validation``."""
    value: bytes
    expiration_time: DHTExpiration
    in_cache: bool = False


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


def pack_value(
    value: StoredValue, room: int = MAX_VALUE_BYTES, in_turns: Callable[[list[Entry]], list[Entry]] = list
) -> tuple[bytes, bytes]:
    """A plain value or a whole dictionary as bytes, and the marker that takes the place of its subkey.

    A dictionary that is too large loses some of its entries: some are better than none. The newest ones are kept,
    except that a peer with many entries does not keep out those of others.

    Args:
        room: most bytes of a dictionary.
        in_turns: puts entries into the order in which they are chosen; it gets the newest one first.
    """
    if isinstance(value, bytes):
        return PLAIN_VALUE, value
    # Packing what will be thrown away could take a second, and as much memory as all records.
    packed = None if sum(len(item.value) for _, item in value.items()) > room else value.packb()
    if packed is None or len(packed) > room:
        warn_seldom("a dictionary of %d entries is over %d bytes: only some of them are sent", len(value), room)
        packed = _part(value, room, in_turns).packb()
    return WHOLE_DICTIONARY, packed


def _part(
    dictionary: DictionaryDHTValue[bytes], room: int, in_turns: Callable[[list[Entry]], list[Entry]]
) -> DictionaryDHTValue[bytes]:
    entries, size = [], 64
    for subkey, item in in_turns([*dictionary.items()][::-1]):
        size += len(item.value) + len(MSGPackSerializer.dumps(subkey)) + 20
        if size > room:
            break
        entries.append((subkey, item))
    part: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    for subkey, item in reversed(entries):
        part.store(subkey, item.value, item.expiration_time)
    return part
