"""Valid messages, records, addresses and keys: what hostile inputs are made from."""

from __future__ import annotations

import random

import msgspec
import pydantic
from pydantic import StrictFloat, StrictInt

from shoal.access.badges import ANY_ROLE, RevocationList, Roles, encode_badge
from shoal.access.tokens import RUN as RUN_KIND
from shoal.access.tokens import Token
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.dht.records import (
    FindRequest,
    FindResponse,
    FindResult,
    Found,
    NodeContact,
    NotKept,
    PingRequest,
    PingResponse,
    SentRecord,
    StoreRequest,
    StoreResponse,
    pack_contact,
)
from shoal.dht.routing import DHTID
from shoal.dht.schema import BytesWithPublicKey, SchemaValidator
from shoal.dht.storage import DictionaryDHTValue
from shoal.dht.validation import PLAIN_VALUE, WHOLE_DICTIONARY, CompositeValidator, DHTRecord
from shoal.net.connection import CallFailure, Hello, Open
from shoal.net.transport import Kind, pack
from shoal.p2p import Header, Identity
from shoal.reach.presence import PresenceQuery, PresenceReply
from shoal.reach.punching import CandidateHost, Candidates
from shoal.reach.relay.messages import (
    Alive,
    Connect,
    Connected,
    ConnectReverse,
    Ended,
    Incoming,
    IncomingReverse,
    NotConnected,
    NotReserved,
    Observed,
    OpenObservation,
    Ready,
    Reserve,
    Reserved,
)

_rng = random.Random(0)
_LATER = 4e9
RUN_IDENTITY = Identity.generate(_rng)


class Progress(pydantic.BaseModel):
    epoch: StrictInt
    speed: StrictFloat


class Schema(pydantic.BaseModel):
    name: bytes
    counts: dict[str, StrictInt]
    progress: dict[BytesWithPublicKey, Progress]


IDENTITY = Identity.generate(_rng)
RUN = Token(RUN_KIND, "friends", RUN_IDENTITY.public_key, (), RUN_IDENTITY, ANY_ROLE)
INVITATION = RUN.invite(ANY_ROLE, int(_LATER), name="a guest")
BADGE_TOKEN = INVITATION.invite(Roles.TRAIN, int(_LATER), peer=IDENTITY.peer_id)
BADGES = [encode_badge(BADGE_TOKEN.chain), encode_badge(RUN.chain_for(IDENTITY, _LATER))]
REVOCATIONS = RevocationList.make(RUN_IDENTITY, [IDENTITY.public_key, bytes(32)], 7, None)
ADDRESSES = [
    "/ip4/127.0.0.1/tcp/31337",
    "/ip6/2001:db8::1/tcp/1",
    "/dns4/example.org/tcp/443/wss",
    "/dns/a.b/udp/9/quic-v1",
    "/ip4/203.0.113.7/tcp/1/p2p/12D3KooWHXWVfEx3jVqZEJ8dDFJ9cafPkgdPDT1Wg3FpmHHCCXXJ/p2p-circuit",
]
KEYS = [DHTID.generate(name).to_bytes() for name in ("name", "counts", "progress", "something else")]
SCHEMA = SchemaValidator(Schema)
OWNER = SignatureValidator(PrivateKey.from_bytes(_rng.randbytes(32)))


def validator() -> CompositeValidator:
    """What a node with a schema and protected records uses."""
    return CompositeValidator([SCHEMA, SignatureValidator(PrivateKey.from_bytes(bytes(32)))])


def _dumps(value: object) -> bytes:
    return MSGPackSerializer.dumps(value)


def _signed(record: DHTRecord) -> DHTRecord:
    return DHTRecord(record.key, record.subkey, OWNER.sign_value(record), record.expiration_time)


PROGRESS = _dumps({"epoch": 1, "speed": 2.0})
RECORDS = [
    DHTRecord(KEYS[0], PLAIN_VALUE, _dumps(b"a run"), _LATER),
    DHTRecord(KEYS[1], _dumps("a peer"), _dumps(7), _LATER),
    DHTRecord(KEYS[3], PLAIN_VALUE, _dumps([1, 2.5, None, (b"tuple", True)]), _LATER),
    DHTRecord(KEYS[3], _dumps(("tuple", 1)), _dumps({"deep": [{"er": []}]}), _LATER),
    _signed(DHTRecord(KEYS[2], _dumps(b"me " + OWNER.local_public_key), PROGRESS, _LATER)),
    _signed(DHTRecord(KEYS[3], _dumps(OWNER.local_public_key), PROGRESS, _LATER)),
]


def _dictionary() -> bytes:
    dictionary: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    for number in range(5):
        dictionary.store(f"peer {number}", _dumps(number), _LATER + number)
    dictionary.store(("tuple", 1), _dumps(None), _LATER)
    return dictionary.packb()


DICTIONARY = _dictionary()
VALUES = [record.value for record in RECORDS] + [DICTIONARY, _dumps((1, (2, (3,)))), _dumps({"a": {"b": [1] * 9}})]
CONTACT = pack_contact(NodeContact(IDENTITY.peer_id.to_bytes(), ADDRESSES[:2]))

_STORED = [*RECORDS, DHTRecord(KEYS[1], WHOLE_DICTIONARY, DICTIONARY, _LATER)]
_NODE_ID = _rng.randbytes(20)
_PEER = IDENTITY.peer_id.to_bytes()
_HOSTS = ["203.0.113.7", "8.8.8.8", "192.168.1.7", "2606:4700::1"]
_COOKIES = [_rng.randbytes(32) for _ in range(2)]
HEADERS: list[Header] = [
    Hello(addresses=ADDRESSES, agent="shoal", time=_LATER, instance=bytes(16), name="laptop-4711"),
    Open(handler="DHTProtocol.rpc_find"),
    CallFailure(type="ValueError", text="what went wrong"),
    PingRequest(node_id=_NODE_ID, validate=True),
    PingResponse(node_id=_NODE_ID, dht_time=_LATER, available=True),
    StoreRequest(
        records=[
            SentRecord(record.key, record.subkey, record.value, record.expiration_time, number % 2 == 1)
            for number, record in enumerate(_STORED)
        ],
        node_id=_NODE_ID,
    ),
    StoreResponse(refusals=[None] * 7, node_id=_NODE_ID),
    StoreResponse(refusals=[None, NotKept("invalid", "SchemaValidator")], node_id=_NODE_ID),
    FindRequest(keys=KEYS, node_id=_NODE_ID, neighbors=30, known=bytes(range(32))),
    FindResponse(
        results=[
            FindResult(Found.PLAIN, RECORDS[0].value, _LATER, [0, 1]),
            FindResult(Found.DICTIONARY, DICTIONARY, _LATER, [1]),
            FindResult(Found.NOTHING, b"", 0.0, [0]),
            FindResult(Found.TOO_MUCH, b"", 0.0, []),
        ],
        node_ids=_rng.randbytes(40),
        contacts=[CONTACT, CONTACT],
        node_id=_NODE_ID,
    ),
    PresenceQuery(instance=bytes(16), addresses=ADDRESSES[:2], reach=1),
    PresenceReply(instance=bytes(16), addresses=ADDRESSES[:2]),
    Reserve(reach=2, others=1, may_go_elsewhere=True),
    Reserved(seen_at=ADDRESSES[0], rate=6.25e6, circuits=256),
    NotReserved(code=2, text="128 reservations"),
    Connect(target=_PEER, count=8, punch=True, reach=1),
    ConnectReverse(target=_PEER, places=ADDRESSES[:2], cookies=_COOKIES),
    Connected(cookies=_COOKIES, rate=6.25e6, reach=2),
    NotConnected(code=1, text="no reservation"),
    Incoming(peer=_PEER, cookies=_COOKIES, punch=True, reach=1),
    IncomingReverse(peer=_PEER, places=ADDRESSES[:2], cookies=_COOKIES),
    Alive(),
    Ended("this relay shuts down"),
    Ready(seen_at=ADDRESSES[0], other_seen_at=ADDRESSES[1]),
    OpenObservation(cookie=bytes(32)),
    Observed(seen_at=ADDRESSES[0]),
    Candidates([CandidateHost(each, [40000 + i for i in range(8)]) for each in _HOSTS]),
]
PACKED_HEADERS = {type(header): msgspec.msgpack.encode(header) for header in HEADERS}
CANDIDATES = PACKED_HEADERS[Candidates]


def messages(handlers: list[str]) -> list[bytes]:
    """Whole messages of every kind, among them calls of these handlers."""
    found = [pack(Kind.OPEN, Open(handler=name)) for name in [*handlers, "nobody.knows"]]
    found += [pack(Kind.ITEM, header, end=True) for header in HEADERS]
    found += [pack(Kind.HELLO, HEADERS[0]), pack(Kind.ERROR, HEADERS[2], end=True), pack(Kind.ITEM, None, end=True)]
    return [*found, pack(Kind.ITEM, HEADERS[3], 20) + bytes(20)]


_REQUESTS = {"rpc_ping": PingRequest, "rpc_store": StoreRequest, "rpc_find": FindRequest}


def calls(handlers: list[str]) -> list[tuple[bytes, bytes]]:
    """Calls of a node's handlers in two halves: the opening, and the request."""
    return [
        (pack(Kind.HELLO, HEADERS[0]) + pack(Kind.OPEN, Open(handler=name)), pack(Kind.ITEM, header, end=True))
        for name in handlers
        for header in HEADERS
        if type(header) is _REQUESTS.get(name.rpartition(".")[2])
    ]
