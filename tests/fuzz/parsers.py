"""Targets that turn bytes or text into objects: addresses, ids, keys, headers, records."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from cryptography.hazmat.primitives.serialization import Encoding

from shoal.access.badges import Badge, RevocationList, read_badge
from shoal.access.tokens import Token
from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.crypto import PublicKey
from shoal.dht.local_records import LocalRecords, Payer, Room
from shoal.dht.records import FindRequest, NewRecord, peer_of_contact, unpack_contact
from shoal.dht.routing import DHTID
from shoal.dht.storage import DictionaryDHTValue
from shoal.dht.validation import DHTRecord
from shoal.errors import NotAMemberError, ProtocolError
from shoal.net.tcp.handshake import peer_id_of_certificate
from shoal.net.transport import decode_header
from shoal.p2p import Header, Identity, Multiaddr, PeerID
from shoal.p2p.joining import parse_peer_addresses
from shoal.peers.identity import verify_signature
from shoal.reach.nat.pcp import Granted, read_nat_pmp, read_pcp
from shoal.reach.nat.routers import NoMappingError, gateway_in_ipv6_route, gateway_in_route, outer_address
from shoal.reach.nat.upnp_search import is_of_host, location_in
from tests.dht.members import Authority, Member
from tests.fuzz.fuzzing import Target, check_text
from tests.fuzz.mutation import Mutator
from tests.fuzz.samples import (
    ADDRESSES,
    BADGE_TOKEN,
    BADGES,
    CONTACT,
    IDENTITY,
    INVITATION,
    KEYS,
    OWNER,
    PACKED_HEADERS,
    RECORDS,
    REVOCATIONS,
    RUN,
    SCHEMA,
    VALUES,
    validator,
)

PEER = str(IDENTITY.peer_id)
BINARY_ADDRESSES = [Multiaddr(address).to_bytes() for address in [*ADDRESSES, f"/p2p/{PEER}"]]
# What was granted to the guest's invitation is a badge for the key of the invitation.
GRANTED = [*(read_badge(RUN.run_key, badge) for badge in BADGES), INVITATION.content]
TOKENS = [RUN.text, INVITATION.text, BADGE_TOKEN.text]
FULL_ADDRESSES = [f"{address}/p2p/{PEER}" for address in ADDRESSES]
PASTED = ["203.0.113.7:31337", "'[2001:db8::7]:31337',", "example.org:1 local", f"['{FULL_ADDRESSES[0]}', 'a:5']"]

for room in (
    "dht.records",
    "dht.authorization",
    "reach.punching",
    "reach.checkup",
    "reach.presence",
    "reach.relay.messages",
    "p2p.revocation",
):
    importlib.import_module(f"shoal.{room}")  # where types of headers are defined


def parser(
    name: str,
    make_input: Callable[[Mutator], Any],
    parse: Callable[[Any], object],
    refusal: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> Target:
    """A target that either parses its input or raises the error that its docstring promises."""

    def feed(hostile: Any) -> str:
        try:
            parsed = parse(hostile)
        except refusal as e:
            check_text(e)
            return type(e).__name__
        return "nothing" if parsed is None else "parsed"

    return Target(name, make_input, feed)


def all_headers(base: type[Header] = Header) -> Iterator[type[Header]]:
    """Every type of header of these rooms, whatever else has been loaded."""
    for each in base.__subclasses__():
        if each.__module__.startswith(("shoal.net.", "shoal.reach.", "shoal.p2p.", "shoal.dht.")):
            yield each
        yield from all_headers(each)


def header_target(header_type: type[Header]) -> Target:
    samples = list(PACKED_HEADERS.values())
    seeds = [packed for kind, packed in PACKED_HEADERS.items() if issubclass(kind, header_type)] or samples
    name = f"header {header_type.__name__}"
    return parser(
        name, lambda m: m.packed(m.one_of(seeds), samples), lambda data: decode_header(data, header_type), ProtocolError
    )


def _multiaddr(text: str | bytes) -> Multiaddr:
    """What was parsed can be written and parsed again."""
    address = Multiaddr(text)
    assert Multiaddr(str(address)) == address
    if all(protocol.code is not None for protocol in address.protocols()):
        assert Multiaddr(address.to_bytes()) == address
    return address


def _peer_id(text: str) -> PeerID:
    peer = PeerID.from_base58(text)
    assert PeerID.from_base58(str(peer)) == peer
    return peer


def record(mutator: Mutator) -> DHTRecord:
    """A record with something wrong in it, mostly."""
    seed, other = mutator.one_of(RECORDS), mutator.one_of(RECORDS)
    key, subkey, value, expiration_time = seed.key, seed.subkey, seed.value, seed.expiration_time
    kind = int(mutator.rng.random() * 5)
    if kind == 0:
        key = other.key
    if kind == 1:
        subkey = mutator.packed(subkey, [other.subkey])
    if kind == 2 or mutator.rng.random() < 0.3:
        value = mutator.packed(value, VALUES)
    if kind == 3:
        expiration_time = float(mutator.one_of([expiration_time + 1e-3, other.expiration_time + 9, 0.0, 1e300]))
    return DHTRecord(key, subkey, value, expiration_time)


def _validated(hostile: DHTRecord, validate: Callable[[DHTRecord], bool]) -> str:
    """Protected records are accepted only as their owner made them."""
    is_accepted = validate(hostile)
    if is_accepted and OWNER.local_public_key in hostile.subkey:
        assert hostile in RECORDS, "a record that its owner did not make"
    return "accepted" if is_accepted else "refused"


class Keeper:
    """A node with room for a few records."""

    room = Room(20_000, 20_000, 100, 20_000, 100)

    def __init__(self) -> None:
        self._records = LocalRecords(None, None, room=self.room)

    def feed(self, hostile: DHTRecord) -> str:
        where = DHTID.generate(hostile.subkey + hostile.value[:1])
        record = NewRecord(where, hostile.subkey, hostile.value, get_dht_time() + hostile.expiration_time % 3600)
        is_kept = self._records.keep(record, Payer(hostile.subkey[-1:], "host"))
        assert self._records.nbytes <= self.room.nbytes
        return "kept" if is_kept else "refused"


def _certificates() -> Sequence[bytes]:
    from cryptography import x509

    return [x509.load_pem_x509_certificate(Identity.generate().certificate_pem()[0]).public_bytes(Encoding.DER)] * 2


class MembersOnly:
    """Someone who answers members, and a member's request, captured and changed by a stranger."""

    call = "DHTProtocol.rpc_find called by a member at another one"

    async def start_afresh(self) -> None:
        authority = Authority()
        self.servicer, member = Member(authority), Member(authority)
        request, another = FindRequest(keys=KEYS), FindRequest(keys=KEYS[:1])
        await member.sign_request(request, self.call)
        await Member(Authority()).sign_request(another, self.call)
        self.captured, self.foreign = msgspec.msgpack.encode(request), msgspec.msgpack.encode(another)

    def changed(self, mutator: Mutator) -> bytes:
        return mutator.packed(self.captured, [self.foreign])

    async def feed(self, hostile: bytes) -> str:
        try:
            request = decode_header(hostile, FindRequest)
        except ProtocolError as e:
            check_text(e)
            return "ProtocolError"
        if not await self.servicer.validate_request(request, self.call):
            return "refused"
        assert msgspec.msgpack.encode(request) == self.captured, "a request that its sender did not make"
        return "accepted"


def _badge(data: bytes) -> Badge:
    badge = read_badge(RUN.run_key, data)
    assert badge in GRANTED, "a badge that nobody has granted"
    return badge


def _revocations(data: bytes) -> RevocationList:
    found = RevocationList.from_bytes(RUN.run_key, data)
    assert found == REVOCATIONS, "a list that the run has not signed"
    return found


def _token(text: str) -> Token:
    token = Token.parse(text)
    assert token.text == text
    return token


NONCE, PORT = b"twelve bytes", 31337
GRANTS = [
    bytes.fromhex("0281000000000e10000003e8") + bytes(12) + NONCE + bytes.fromhex(f"06000000{PORT:04x}{PORT:04x}")
    + bytes.fromhex("00000000000000000000ffffc6336407"),
    bytes.fromhex("028100020000070800000005") + bytes(12),
    bytes.fromhex("0280000000000000000003e8") + bytes(12),
]  # fmt: skip
OLD_GRANTS = [
    bytes.fromhex(f"00820000000003e8{PORT:04x}{PORT:04x}00000e10"),
    bytes.fromhex("00800000000003e8c6336407"),
    bytes.fromhex("00820002000003e8"),
]
ROUTES = [
    "Iface Destination Gateway Flags RefCnt Use Metric Mask\neth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0\n",
    f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 27}1 00000064 00000001 00000000 00000003 eth0\n",
]
SEARCHED = b"HTTP/1.1 200 OK\r\nST: upnp:rootdevice\r\nLOCATION: http://192.168.1.1:5000/rootDesc.xml\r\n\r\n"


def _granted(granted: Granted) -> object:
    """What a router has granted is an address where somebody can be called, or none."""
    address = outer_address(granted.ip, granted.port)
    assert 0 < int(address["tcp"] or 0) < 2**16
    return address


def _routers() -> list[Target]:
    """What a router says, and what the system says of it."""
    of_router = (ProtocolError, NoMappingError)
    return [
        parser(
            "PCP", lambda m: m.bytes(m.one_of(GRANTS), GRANTS), lambda d: _granted(read_pcp(d, NONCE, PORT)), of_router
        ),
        parser("PCP, epoch", lambda m: m.bytes(m.one_of(GRANTS), GRANTS), read_pcp, of_router),
        parser(
            "NAT-PMP", lambda m: m.bytes(m.one_of(OLD_GRANTS), OLD_GRANTS), lambda d: read_nat_pmp(d, PORT), of_router
        ),
        parser("NAT-PMP, address", lambda m: m.bytes(m.one_of(OLD_GRANTS), OLD_GRANTS), read_nat_pmp, of_router),
        parser(
            "UPnP, search", lambda m: m.bytes(SEARCHED), lambda d: is_of_host(location_in(d), "192.168.1.1") or None
        ),
        parser("table of routes", lambda m: m.text(ROUTES[0]), gateway_in_route),
        parser("table of routes, IPv6", lambda m: m.text(ROUTES[1]), gateway_in_ipv6_route),
    ]


def targets() -> list[Target]:
    members = MembersOnly()
    certificates = _certificates()
    public_key = OWNER.local_public_key[len(b"[owner:") : -1]
    composite = validator()
    identity_file = IDENTITY.to_bytes()
    signed = (IDENTITY.public_key, IDENTITY.sign(b"message"), b"message")
    return [
        *(header_target(each) for each in sorted(set(all_headers()), key=lambda each: each.__name__)),
        parser("multiaddr, text", lambda m: m.text(m.one_of(ADDRESSES + FULL_ADDRESSES)), _multiaddr),
        parser("multiaddr, binary", lambda m: m.bytes(m.one_of(BINARY_ADDRESSES), BINARY_ADDRESSES), _multiaddr),
        parser("peer id", lambda m: m.text(PEER), _peer_id),
        parser("address of a peer", lambda m: [m.text(m.one_of(FULL_ADDRESSES))], parse_peer_addresses),
        parser("addresses, pasted", lambda m: m.text(m.one_of(PASTED)), parse_peer_addresses),
        parser("identity file", lambda m: m.bytes(identity_file), Identity.from_bytes),
        parser("certificate", lambda m: m.bytes(m.one_of(certificates), certificates), peer_id_of_certificate),
        parser(
            "proof",
            lambda m: [m.one_of([part, m.bytes(part)]) for part in signed],
            lambda parts: verify_signature(*parts) or None,
        ),
        parser("owner's key", lambda m: m.bytes(public_key), PublicKey.from_bytes),
        parser("msgpack value", lambda m: m.packed(m.one_of(VALUES), VALUES), MSGPackSerializer.loads),
        parser("dictionary", lambda m: m.packed(VALUES[len(RECORDS)], VALUES), DictionaryDHTValue.unpackb),
        parser("contact", lambda m: m.packed(bytes(CONTACT)), unpack_contact),
        parser("peer of a contact", lambda m: m.packed(bytes(CONTACT)), lambda data: peer_of_contact(data) or None),
        parser("badge, bytes", lambda m: m.bytes(m.one_of(BADGES), BADGES), _badge, NotAMemberError),
        parser("badge, fields", lambda m: m.packed(m.one_of(BADGES), BADGES), _badge, NotAMemberError),
        parser("revocations", lambda m: m.packed(REVOCATIONS.to_bytes(), BADGES), _revocations),
        parser("token", lambda m: m.text(m.one_of(TOKENS)), _token),
        *_routers(),
        Target("record to be kept", record, Keeper().feed),
        Target("record, signatures", record, lambda hostile: _validated(hostile, OWNER.validate)),
        Target("record, schema", record, lambda hostile: "accepted" if SCHEMA.validate(hostile) else "refused"),
        Target("record, all validators", record, lambda hostile: _validated(hostile, composite.validate)),
        Target("request of a member", members.changed, members.feed, members.start_afresh),
    ]
