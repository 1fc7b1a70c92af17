"""Targets that read what members, and those who claim to be some, send: groups, rounds, states, progress, proofs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec

from shoal.averaging import messages
from shoal.averaging.control import GROUP_ID_BYTES
from shoal.averaging.groups.group import read_group
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.authorization import EnterRequest
from shoal.dht.crypto import peer_of, tag_of, with_signatures
from shoal.dht.routing import DHTID
from shoal.dht.validation import DHTRecord
from shoal.errors import ProtocolError
from shoal.net.transport import decode_header
from shoal.optim.history.journal import ForkPoint, Lineage
from shoal.optim.progress import exchange as progress_exchange
from shoal.optim.progress.records import parse_record
from shoal.optim.progress.run_settings import (
    MAX_SETTINGS,
    PARAMETERS_SHOWN,
    TENSORS,
    Company,
    ParameterSettings,
    RunSettings,
)
from shoal.p2p import Header, Identity, PeerID
from tests.dht.members import Authority, Member
from tests.fuzz.fuzzing import Target, check_text
from tests.fuzz.mutation import Mutator
from tests.fuzz.samples import ADDRESSES, IDENTITY

_rng = random.Random(1)
_LATER = 4e9
LINEAGE = Lineage((b"1st.", b"2nd.", b"3rd."), (ForkPoint.of(b"1st.", 0.5, b"2nd."),)).pack()
_OTHER = Identity.generate(_rng)
_PEERS = [
    messages.PeerAddresses(peer_id=each.peer_id.to_bytes(), addresses=ADDRESSES[:2]) for each in (IDENTITY, _OTHER)
]
VALUES = 1000
"""Of the vector that the group averages."""
GROUP = messages.GroupStart(
    group_id=_rng.randbytes(GROUP_ID_BYTES),
    members=[messages.Member(peer=peer, mode=0, share=VALUES // 2, gathered=b"\xc0") for peer in _PEERS],
)
_PART = messages.PartHeader(1, None, 4096)
_ROUND = _rng.randbytes(21)
_PROGRESS = progress_exchange.ProgressMessage(3, 64, 12.5, _LATER, False, ends_in=0.5, rounds=LINEAGE)
_PARAMETERS = [
    ParameterSettings("0.weight", (8, 6), "float32", True),
    ParameterSettings("0.bias", (8,), "float32", True),
]
SETTINGS = RunSettings("Optimizer", {TENSORS: "1"}, {"target_batch_size": "64"}, {"data": "poems"}, 0, _PARAMETERS)
HEADERS: list[Header] = [
    *_PEERS[:1],
    GROUP,
    GROUP.members[0],
    messages.JoinRequest("run.0b01", {"phases": "one"}, _LATER, 0, b"\xc0", 1e6, 4),
    messages.Leave(),
    messages.JoinReply(code=2, text="why", expiration=_LATER, better_leader=_PEERS[0], group=GROUP),
    messages.Invitation(group_key="run.0b01", expiration=_LATER),
    messages.InvitationReply(better_leader=_PEERS[1], expiration=_LATER),
    messages.BeginReduce(round_id=_ROUND, weight=64.0, stripe=1, stripes=2),
    messages.BeginReduce(round_id=_ROUND, weight=64.0, resume=1, lacks=messages.Resume([(0, 2)], [])),
    messages.Resume([(0, 1)], [(3, 9)]),
    messages.PartMessage(index=3, parts=[_PART], offset=512),
    messages.Greeting(round_id=_ROUND, weight=64.0),
    messages.Report(held=[1, 2], left_out=[1]),
    messages.MembersLost({1: messages.LossCause.SILENT}),
    messages.Assignment(send=[(0, 0, 2)]),
    messages.AssignedPart(0, 1, _PART),
    messages.Commit(weights=[64.0, 2.0], lost={1: messages.LossCause.REFUSED}),
    messages.StatusRequest(round_id=_ROUND),
    messages.StatusReply(status=1),
    messages.DownloadRequest(part=b"\x91\x92\x00\x03"),
    messages.StateHeader(metadata=b"\x80", tensor_bytes=[4096]),
    messages.StateRefused(contradiction="prefix is 'a' there and 'b' here"),
    messages.DonorBusy(again_in=3.0),
    messages.ChunkRequest(index=3),
    messages.StateChunk(index=3),
    _PROGRESS,
    SETTINGS,
]
PACKED = {type(header): msgspec.msgpack.encode(header) for header in HEADERS}
RECORD = MSGPackSerializer.dumps(
    {
        "peer_id": IDENTITY.peer_id.to_bytes(),
        "epoch": 3,
        "samples_accumulated": 64,
        "samples_per_second": 12.5,
        "time": _LATER,
        "client_mode": False,
        "addresses": ADDRESSES[:2],
        "endorsement": IDENTITY.sign(b"tag"),
        "rounds": LINEAGE,
    }
)


def _header(header_type: type[Header]) -> Target:
    seed, samples = PACKED[header_type], list(PACKED.values())

    def feed(data: bytes) -> str:
        try:
            decode_header(data, header_type)
        except ProtocolError as e:
            check_text(e)
            return "ProtocolError"
        return "parsed"

    return Target(f"header {header_type.__name__}", lambda m: m.packed(seed, samples), feed)


def _group(data: bytes) -> str:
    """What a follower makes of the group that its leader has published."""
    own: Any = SimpleNamespace(peer_id=IDENTITY.peer_id, add_addresses=lambda *_: None)
    try:
        group = read_group(own, decode_header(data, messages.GroupStart), VALUES)
    except ProtocolError as e:
        check_text(e)
        return "ProtocolError"
    assert sum(group.shares) == VALUES
    assert IDENTITY.peer_id in group.peer_ids
    return "adopted"


def _progress_record(data: bytes) -> str:
    try:
        record = parse_record(MSGPackSerializer.loads(data))
    except ValueError as e:
        check_text(e)
        return "ValueError"
    assert record.samples_accumulated >= 0 <= record.samples_per_second
    return "parsed"


def _settings(data: bytes) -> str:
    """What a user is told of a peer whose settings differ: a few lines, without terminal codes."""
    try:
        told = decode_header(data, RunSettings)
    except ProtocolError as e:
        check_text(e)
        return "ProtocolError"
    differences = SETTINGS.differences(told)
    assert len(differences) <= 3 * MAX_SETTINGS + PARAMETERS_SHOWN + 2
    assert all(len(each) < 1000 and each.isprintable() for each in differences)
    company = Company("run", SETTINGS)
    company.hear_settings(_OTHER.peer_id.to_bytes(), told, was_first=False)
    assert bool(company.strangers) <= bool(differences)
    return "differs" if differences else "fits"


def _lineage(data: bytes) -> str:
    try:
        Lineage.unpack(data)
    except ValueError as e:
        check_text(e)
        return "ValueError"
    return "parsed"


def _tag(data: bytes) -> str:
    try:
        peer = peer_of(data)
    except ValueError as e:
        check_text(e)
        return "ValueError"
    assert peer == IDENTITY.peer_id or data != tag_of(IDENTITY.peer_id)
    return "a peer's"


class _Declarations:
    """What averagers and donors declare under the tags of their peers: only as they have signed it."""

    def __init__(self) -> None:
        subkey, key = MSGPackSerializer.dumps(tag_of(IDENTITY.peer_id)), DHTID.generate("run.0b").to_bytes()
        owner, self._validator = with_signatures(None, IDENTITY), with_signatures(None, _OTHER)
        values = [MSGPackSerializer.dumps(value) for value in (ADDRESSES, [1.0, ADDRESSES], None)]
        unsigned = [DHTRecord(key, subkey, value, _LATER) for value in values]
        self._signed = [DHTRecord(key, subkey, owner.sign_value(each), _LATER) for each in unsigned]

    def make(self, mutator: Mutator) -> DHTRecord:
        record, other = mutator.one_of(self._signed), mutator.one_of(self._signed)
        key, subkey, value, expiration = record.key, record.subkey, record.value, record.expiration_time
        kind = int(mutator.rng.random() * 5)
        if kind == 0:
            key = mutator.bytes(key)[:20].ljust(20, b"\0")
        if kind == 1:
            subkey = mutator.packed(subkey, [MSGPackSerializer.dumps(tag_of(_OTHER.peer_id))])
        if kind == 2:
            value = mutator.bytes(value, [other.value])
        if kind == 3:
            expiration += 1e-3
        return DHTRecord(key, subkey, value, expiration)

    def feed(self, hostile: DHTRecord) -> str:
        is_accepted = self._validator.validate(hostile)
        if is_accepted and tag_of(IDENTITY.peer_id) in hostile.subkey:
            assert hostile in self._signed, "a declaration that its owner did not make"
        return "accepted" if is_accepted else "refused"


class _Gate:
    """A member that lets members in, and a proof at its gate, captured and changed by a stranger."""

    call = "MembersOnly.rpc_enter called by a member at another one"

    async def start_afresh(self) -> None:
        authority = Authority()
        self._member, guest, stranger = Member(authority), Member(authority), Member(Authority())
        proof, another = EnterRequest(), EnterRequest()
        await guest.sign_request(proof, self.call)
        await stranger.sign_request(another, self.call)
        self._captured, self._foreign = msgspec.msgpack.encode(proof), msgspec.msgpack.encode(another)

    def make(self, mutator: Mutator) -> bytes:
        return mutator.packed(self._captured, [self._foreign])

    async def feed(self, hostile: bytes) -> str:
        try:
            request = decode_header(hostile, EnterRequest)
        except ProtocolError as e:
            check_text(e)
            return "ProtocolError"
        if not await self._member.validate_request(request, self.call):
            return "refused"
        assert msgspec.msgpack.encode(request) == self._captured, "a proof that its owner did not make"
        return "let in"


def targets() -> list[Target]:
    packed, group = list(PACKED.values()), PACKED[messages.GroupStart]
    declarations, gate = _Declarations(), _Gate()
    tags = [tag_of(PeerID(peer.peer_id)) for peer in _PEERS]
    return [
        *(_header(each) for each in sorted(PACKED, key=lambda each: each.__name__)),
        Target("a group's start", lambda m: m.packed(group, packed) if m.rng.random() < 0.9 else group, _group),
        Target("record of progress", lambda m: m.packed(RECORD, packed), _progress_record),
        Target("settings", lambda m: m.packed(PACKED[RunSettings], packed), _settings),
        Target("lineage", lambda m: m.bytes(LINEAGE, [_ROUND]) if m.rng.random() < 0.9 else LINEAGE, _lineage),
        Target("owner's tag", lambda m: m.bytes(tags[0], tags) if m.rng.random() < 0.9 else tags[0], _tag),
        Target("declaration of an averager or donor", declarations.make, declarations.feed),
        Target("proof at the gate", gate.make, gate.feed, gate.start_afresh),
    ]
