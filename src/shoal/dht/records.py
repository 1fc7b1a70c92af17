"""The messages between nodes: their types, how records are packed, and the have-set that keeps answers short.

The types limit all lengths, so that a message over a limit is refused while it is decoded.

A walk asks several nodes near a key one after the other. They know mostly the same: contacts of the same nodes, entries
of the same dictionary. So a request carries a *have-set*: a four-byte fingerprint of each node and entry that the asker
has, and the answer leaves these out.

A fingerprint is the top of the product of the last 64 bits of a number and a random odd factor, which is drawn for each
request (multiply-shift hashing; Dietzfelbinger et al., A reliable randomized algorithm for the closest-pair problem,
Journal of Algorithms 1997). Two fingerprints collide in one of two billion requests. The numbers are hashes, so an
attacker would need 2^64 attempts to make up a node or an entry that hides another one.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from shoal.base.bounded import MOST
from shoal.base.clock import DHTExpiration
from shoal.base.logs import Seldom, one_line
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.authorization import AuthorizedRequest, AuthorizedResponse
from shoal.dht.routing import DHTID, ID_BITS, id_of
from shoal.dht.storage import (
    MAX_DICTIONARY_ENTRIES,
    MAX_SUBKEY_REMEMBERED,
    DictionaryDHTValue,
    StoredValue,
    Subkey,
    ValueWithExpiration,
)
from shoal.dht.validation import (
    KEPT,
    MAX_SUBKEY_BYTES,
    PLAIN_VALUE,
    WHOLE_DICTIONARY,
    Outcome,
)
from shoal.net.addresses import is_private
from shoal.net.transport import Moment, PeerIDBytes
from shoal.p2p import P2P, PeerID

logger = logging.getLogger(__name__)
warn_seldom = Seldom(logger.warning)

# Limits of one call, so that no call keeps a node busy for long. All are chosen.
# Largest value of one record; the DHT is for small facts, tensors travel elsewhere.
MAX_VALUE_BYTES = 2**19
# Most bytes of values in one answer or store request, and so of one dictionary: well under the longest message, 1 MiB.
MAX_ANSWER_BYTES = 3 * 2**18
MAX_RECORDS_PER_STORE = 256
MAX_KEYS_PER_FIND = 64
# Most neighbors per key in one answer.
MAX_NEIGHBORS = 128
# Most neighbors for all keys of one answer, if the asker wants more per key than usual: 20 each, the k of Kademlia.
MAX_NEIGHBORS_TOLD = MAX_KEYS_PER_FIND * 20
MAX_ADDRESSES = 8
MAX_ADDRESS_LENGTH = 256
# Longest name of a reason, and longest text with it: about a line.
MAX_DETAIL_LENGTH = 128

# From the method above: 32 bits of a product of 64.
_FACTOR_BYTES, _FINGERPRINT_BYTES = 8, 4
# Chosen: twenty times what a walk usually knows, in four kilobytes.
MAX_KNOWN = 1024
MAX_KNOWN_BYTES = _FACTOR_BYTES + MAX_KNOWN * _FINGERPRINT_BYTES


# --- messages ---------------------------------------------------------------------------------------------------------

IDBytes = Annotated[bytes, Meta(min_length=20, max_length=20)]
NodeIDBytes = IDBytes | None
"""``None`` stands for a node in client mode, which must not enter a routing table."""


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


class SentRecord(msgspec.Struct, frozen=True, array_like=True):
    """A record in flight."""

    key: IDBytes
    subkey: Annotated[bytes, Meta(max_length=MAX_SUBKEY_BYTES)]
    """In msgpack form, or one of the two markers of ``shoal.dht.validation``."""
    value: Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
    expiration: Moment
    in_cache: bool


class StoreRequest(AuthorizedRequest):
    records: Annotated[list[SentRecord], Meta(max_length=MAX_RECORDS_PER_STORE)]
    node_id: NodeIDBytes = None

    @classmethod
    def of_records(cls, records: Iterable[NewRecord], node_id: NodeIDBytes) -> StoreRequest:
        """A request to keep records; :func:`split_into_requests` makes sure that they fit."""
        sent = [
            SentRecord(each.key_id.to_bytes(), each.subkey, each.value, each.expiration_time, each.in_cache)
            for each in records
        ]
        return cls(records=sent, node_id=node_id)

    def unpack(self) -> list[NewRecord]:
        """The records."""
        return [
            NewRecord(id_of(each.key), each.subkey, each.value, each.expiration, each.in_cache) for each in self.records
        ]


class NotKept(msgspec.Struct, frozen=True, array_like=True):
    """Why a node does not keep a record."""

    reason: Annotated[str, Meta(max_length=MAX_DETAIL_LENGTH)]
    """A :class:`~shoal.dht.validation.Reason`, or one that only newer versions know."""
    detail: Annotated[str, Meta(max_length=MAX_DETAIL_LENGTH)] = ""


class StoreResponse(AuthorizedResponse):
    refusals: Annotated[list[NotKept | None], Meta(max_length=MAX_RECORDS_PER_STORE)]
    """One for each record; ``None``: the node keeps it."""
    node_id: NodeIDBytes = None

    @classmethod
    def of_outcomes(cls, outcomes: Iterable[Outcome], node_id: NodeIDBytes) -> StoreResponse:
        """The answer that a node gives."""
        refusals = [None if each else NotKept(str(each.reason), each.detail[:MAX_DETAIL_LENGTH]) for each in outcomes]
        return cls(refusals=refusals, node_id=node_id)

    def outcomes(self) -> list[Outcome]:
        """What the node did with each record."""
        return [KEPT if each is None else Outcome.named(each.reason, each.detail) for each in self.refusals]


class FindRequest(AuthorizedRequest):
    keys: Annotated[list[IDBytes], Meta(max_length=MAX_KEYS_PER_FIND)]
    node_id: NodeIDBytes = None
    neighbors: Annotated[int, Meta(ge=0, le=MAX_NEIGHBORS)] = 0
    """How many nodes per key the sender wants, if more than a node usually returns."""
    neighbors_only: bool = False
    """Leave the values out. The sender does not need them, for example on the walk before a store."""
    known: Annotated[bytes, Meta(max_length=MAX_KNOWN_BYTES)] = b""
    """Nodes and entries that the sender has: these may be left out, see :class:`HaveSet`."""
    most: Annotated[int, Meta(ge=0, le=MAX_DICTIONARY_ENTRIES)] = 0
    """Most entries of a dictionary that the sender wants, drawn at random; 0: all of them."""


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


# --- contacts ---------------------------------------------------------------------------------------------------------

_contact_encoder = msgspec.msgpack.Encoder()
_contact_decoder = msgspec.msgpack.Decoder(NodeContact)


def pack_contact(contact: NodeContact) -> msgspec.Raw:
    """The wire form of a contact."""
    return msgspec.Raw(_contact_encoder.encode(contact))


class PackedContacts:
    """Contacts of many nodes in wire form, each packed once until addresses change."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p
        # By peer, and whether the asker is elsewhere on the internet.
        # A plain dictionary, because it is read twenty times for each answer.
        self._packed: dict[tuple[PeerID, bool], msgspec.Raw | None] = {}
        self._address_changes = 0  # the count that the packed contacts reflect

    def pack(self, peer: PeerID, asker_host: str = "") -> msgspec.Raw | None:
        """The packed contact of a peer.

        Args:
            asker_host: the asker's host on the internet. Private addresses are then left out, unless the peer is behind
                the same router; ``None`` is returned if there are no others.
        """
        if self._address_changes != self._p2p.address_book.changes or len(self._packed) > MOST:
            self._packed.clear()
            self._address_changes = self._p2p.address_book.changes
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
        ValueError: it is not a contact.
    """
    try:
        return _contact_decoder.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ValueError(f"not a contact: {one_line(str(e))}") from None


def peer_of_contact(packed: msgspec.Raw) -> bytes:
    """The peer id in a packed contact, read without the rest; empty if the contact has an unusual form."""
    raw = memoryview(packed)
    # 0x92: a list of two; 0xC4: bytes whose length takes one byte.
    is_usual = len(raw) > 3 and raw[0] == 0x92 and raw[1] == 0xC4
    return bytes(raw[3 : 3 + raw[2]]) if is_usual else b""


# --- records ----------------------------------------------------------------------------------------------------------


class FoundRecord(NamedTuple):
    """A node's answer about one key."""

    value: StoredValue | None
    expiration_time: DHTExpiration
    """Minus infinity if there is no value."""
    neighbors: list[int]
    """Ids of nodes near the key."""
    outcome: Outcome
    """Whether there is a value, or why not."""


class FindAnswer(NamedTuple):
    """A node's answer to a find request."""

    records: dict[DHTID, FoundRecord]
    contacts: dict[int, msgspec.Raw]
    """Packed contacts of the nodes in the answer; see :func:`unpack_contact`."""
    node_id: bytes | None
    """The id that the node claims."""


class NewRecord(NamedTuple):
    """A record in flight to a node that should keep it."""

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
        if batch and (size + record_size > MAX_ANSWER_BYTES or len(batch) == MAX_RECORDS_PER_STORE):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += record_size
    if batch:
        yield batch


# --- the have-set -----------------------------------------------------------------------------------------------------

Entry = tuple[Subkey, ValueWithExpiration[bytes]]
"""One entry of a dictionary."""
_SHIFT, _MASK = 8 * (_FACTOR_BYTES - _FINGERPRINT_BYTES), (1 << 8 * _FACTOR_BYTES) - 1


def _factor_of(packed: bytes) -> int:
    return int.from_bytes(packed[:_FACTOR_BYTES], "big") | 1


def pack_known(numbers: Iterable[int], rng: random.Random) -> bytes:
    """The random factor, and the fingerprints of nodes and entries, the first :data:`MAX_KNOWN` of them."""
    drawn = rng.randbytes(_FACTOR_BYTES)
    factor = _factor_of(drawn)
    fingerprints = [(number * factor & _MASK) >> _SHIFT for number in numbers][:MAX_KNOWN]
    return drawn + struct.pack(f"<{len(fingerprints)}I", *fingerprints)


class HaveSet:
    """The nodes and entries that an asker has.

    Args:
        packed: the result of :func:`pack_known`. Other bytes do no harm: at worst an entry is left out by chance.
    """

    def __init__(self, packed: bytes) -> None:
        self._factor = _factor_of(packed)
        count = max(0, len(packed) - _FACTOR_BYTES) // _FINGERPRINT_BYTES
        self._fingerprints = frozenset(struct.unpack_from(f"<{count}I", packed, _FACTOR_BYTES) if count else ())

    def __bool__(self) -> bool:
        return bool(self._fingerprints)

    def __contains__(self, number: int) -> bool:
        return (number * self._factor & _MASK) >> _SHIFT in self._fingerprints

    def unknown(self, nodes: Iterable[tuple[DHTID, PeerID]]) -> list[tuple[DHTID, PeerID]]:
        """The nodes, with their peers, that the asker does not have."""
        factor, fingerprints = self._factor, self._fingerprints
        return [node for node in nodes if (node[0] * factor & _MASK) >> _SHIFT not in fingerprints]

    def without_known(
        self,
        key_id: int,
        dictionary: DictionaryDHTValue[bytes],
        most: int = 0,
        in_turns: Callable[[list[Entry]], list[Entry]] = list,
    ) -> DictionaryDHTValue[bytes]:
        """The entries of a dictionary that the asker does not have; the dictionary itself if that is all of them.

        Args:
            most: only among this many, drawn by the random factor; 0: among all. Drawing favours no peer; the newest
                entries would be those of the peer that stores most often.
            in_turns: puts the drawn entries into the order in which they are chosen.
        """
        entries = list(dictionary.items())
        is_drawn = 0 < most < len(entries)
        numbers = numbers_of_entries(key_id, entries) if self._fingerprints or is_drawn else {}
        if is_drawn:
            drawn = sorted(entries, key=lambda entry: numbers[entry[0]] * self._factor & _MASK)
            entries = in_turns(drawn)[:most]
        elif not any(number in self for number in numbers.values()):
            return dictionary
        rest: DictionaryDHTValue[bytes] = DictionaryDHTValue()
        rest.maxsize = dictionary.maxsize
        with rest.freeze():
            for subkey, item in entries:
                if not numbers or numbers[subkey] not in self:
                    rest.store(subkey, item.value, item.expiration_time)
        rest.latest_expiration_time = dictionary.latest_expiration_time
        return rest


def numbers_of_entries(key_id: int, entries: Iterable[Entry]) -> dict[Subkey, int]:
    """A number for each entry of a key, which changes when the entry is stored again."""
    return {
        subkey: (_known_number_of if is_short(subkey) else _number_of)(key_id, item.expiration_time, subkey)
        for subkey, item in entries
    }


def is_short(subkey: Subkey) -> bool:
    """Whether the number of an entry can be cached: only for short texts and bytes.

    Other subkeys, such as 1 and 1.0, may be equal and still differ in packed form.
    """
    return type(subkey) in (bytes, str) and len(subkey) <= MAX_SUBKEY_REMEMBERED


def _number_of(key_id: int, expiration_time: float, subkey: Subkey) -> int:
    packed = key_id.to_bytes(ID_BITS // 8, "big") + struct.pack("<d", expiration_time) + MSGPackSerializer.dumps(subkey)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=ID_BITS // 8).digest(), "big")


# Cached, because several nodes return the same entries, and askers repeat their questions.
_known_number_of = functools.lru_cache(MOST)(_number_of)


NOTHING_KNOWN = HaveSet(b"")


# --- values -----------------------------------------------------------------------------------------------------------


def pack_value(
    value: StoredValue, room: int = MAX_VALUE_BYTES, in_turns: Callable[[list[Entry]], list[Entry]] = list
) -> tuple[bytes, bytes]:
    """A plain value or a whole dictionary as bytes, and the marker that replaces its subkey.

    A dictionary that is too large loses some of its entries. The newest are kept, but a peer with many entries cannot
    crowd out the others.

    Args:
        room: most bytes of a dictionary.
        in_turns: puts entries into the order in which they are chosen; it gets the newest one first.
    """
    if isinstance(value, bytes):
        return PLAIN_VALUE, value
    # Packing entries only to drop them could take a second, and as much memory as all records.
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
