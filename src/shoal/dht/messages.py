"""What nodes of the table send each other.

Lengths are limited by the types themselves: a message that breaks a limit is refused while it is being decoded.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.dht.authorization import AuthorizedRequest, AuthorizedResponse

# Largest value of one record; the table is for small facts, tensors travel elsewhere.
MAX_VALUE_BYTES = 2**19

MAX_SUBKEY_BYTES = 2**12
MAX_RECORDS_PER_STORE = 256
MAX_KEYS_PER_FIND = 64
# Most neighbors in one answer about one key.
MAX_NEIGHBORS = 128
# Most neighbors in one answer about all its keys, if the asker wants more about each than usual.
MAX_NEIGHBORS_TOLD = MAX_KEYS_PER_FIND * 20

MAX_ADDRESSES = 8
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
    dht_time: float = 0.0
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

    peer_id: Annotated[bytes, Meta(min_length=1, max_length=64)]
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


def unpack_contact(packed: msgspec.Raw) -> NodeContact:
    """Read what :func:`pack_contact` made.

    Raises:
        ValueError: not a contact.
    """
    try:
        return _contact_decoder.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ValueError(f"not a contact: {e}") from None
