"""Targets that take what members of rounds have signed: receipts, hashes of averages, and what proves a lie."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import torch

from shoal.averaging.messages import RoundKind, RoundMessage
from shoal.averaging.round.parts import RoundVector
from shoal.averaging.round.receipts import Receipt, seal
from shoal.averaging.round.verification import Verification
from shoal.compression import CompressionInfo, NoCompression
from shoal.errors import ProtocolError
from shoal.net.transport import decode_header
from shoal.optim.evidence import OpenGuard
from shoal.optim.progress.message import ProgressMessage
from shoal.optim.vouching import ReceiptsMessage, Shown, Vouching
from shoal.peers.identity import Identity
from tests.fuzz.fuzzing import Target, check_text
from tests.fuzz.mutation import Mutator

_rng = random.Random(1)
RUN, NOW, EPOCH = "run", 1e9, 5
OWN, FRIEND, LIAR, OTHER = (Identity.generate(_rng) for _ in range(4))
IDS = [each.peer_id.to_bytes() for each in (OWN, FRIEND, LIAR, OTHER)]
HASHES = [b"1" * 32, b"2" * 32]


def _receipt() -> Receipt:
    blank = Receipt(bytes(21), EPOCH, tuple(IDS[1:]), (1.0, 2.0, 3.0), 0)
    return msgspec.structs.replace(blank, signature=seal(blank.digest(RUN), FRIEND.sign))


RECEIPT = _receipt()
DIGEST = RECEIPT.digest(RUN)
SHOWN = Shown(RECEIPT, {1: seal(DIGEST, LIAR.sign), 2: seal(DIGEST, OTHER.sign)})
PROGRESS = [
    ProgressMessage(EPOCH, 10, 1.0, NOW, False, receipts=word)
    for word in (
        None,
        ReceiptsMessage(DIGEST),
        ReceiptsMessage(DIGEST, RECEIPT.signature),
        ReceiptsMessage(asks=DIGEST),
        ReceiptsMessage(DIGEST, shown=SHOWN),
    )
]
PACKED_PROGRESS = [msgspec.msgpack.encode(message) for message in PROGRESS]


def _verification() -> Verification:
    tensor = torch.zeros(20)
    vector = RoundVector([tensor], [CompressionInfo.from_tensor(tensor)], NoCompression(), 40, [10, 10], 1.0)
    return Verification(b"round", [OWN.peer_id, LIAR.peer_id], 0, vector, OWN.sign)


SIGNED = [LIAR.sign(_verification().statement(1, each)) for each in HASHES]
PROOF = RoundMessage(RoundKind.VOID, members=[1], hashes=HASHES, signatures=SIGNED)
REPORT = RoundMessage(
    RoundKind.REPORT, held=[1, 1], hashes=HASHES, signatures=[b"", SIGNED[1]], seals=[LIAR.sign(b"something")]
)
COMMIT = RoundMessage(RoundKind.COMMIT, weights=[1.0, 2.0], epoch=EPOCH, signature=RECEIPT.signature, seals=SIGNED)
PACKED_ROUND = [msgspec.msgpack.encode(message) for message in (PROOF, REPORT, COMMIT)]


class Listener:
    """A tracker that is told of receipts."""

    async def start_afresh(self) -> None:
        self.evidence = OpenGuard(IDS[0], bytes, NOW)
        self.evidence.has_receipts, self.evidence.full_group = True, 1
        for number in range(10):
            self.evidence.note_round({IDS[0]: 100.0, IDS[1]: 100.0}, NOW + number)
        self.vouching = Vouching(IDS[0], RUN, OWN.sign, self.evidence, lambda: EPOCH, 4, lambda: NOW)

    def feed(self, hostile: bytes) -> str:
        try:
            message = decode_header(hostile, ProgressMessage)
        except ProtocolError as e:
            check_text(e)
            return "ProtocolError"
        if message.receipts is None:
            return "says nothing"
        shown = message.receipts.shown
        self.vouching.hear(IDS[3], ReceiptsMessage(digest=b"" if shown is None else shown.receipt.digest(RUN)))
        self.vouching.word_for(IDS[3])
        self.vouching.hear(IDS[3], message.receipts)
        self.vouching.word_for(IDS[3])
        believed = set(self.evidence.testimony)
        assert believed <= set(IDS[1:]), "somebody who was in no round"
        assert all(self.evidence.most_samples(peer, NOW + 10, 1) < 10**4 for peer in believed)
        return "believed" if believed else "heard"


def _decoded(judge: Callable[[RoundMessage], str]) -> Callable[[bytes], str]:
    def feed(hostile: bytes) -> str:
        try:
            message = decode_header(hostile, RoundMessage)
        except ProtocolError as e:
            check_text(e)
            return "not decoded"
        try:
            return judge(message)
        except ProtocolError as e:
            check_text(e)
            return "refused"

    return feed


def _take_report(report: RoundMessage) -> str:
    verification = _verification()
    verification.take_report(1, report)
    if (proof := verification.find_proof([1])) is not None:
        assert set(proof.hashes) == set(HASHES), "a proof that nobody has signed"
    verification.find_complaints([1])
    return "taken"


def _take_proof(message: RoundMessage) -> str:
    assert _verification().check_proof(message) == 1
    assert set(message.hashes[:2]) == set(HASHES), "a proof that nobody has signed"
    return "convicted"


def _take_seals(commit: RoundMessage) -> str:
    _verification().check_seals(commit.seals, [1])
    raise AssertionError("seals that nobody has made")


def targets() -> list[Target]:
    listener = Listener()

    def progress(mutator: Mutator) -> bytes:
        return mutator.packed(mutator.one_of(PACKED_PROGRESS), PACKED_PROGRESS)

    def of_round(mutator: Mutator) -> bytes:
        return mutator.packed(mutator.one_of(PACKED_ROUND), PACKED_ROUND)

    return [
        Target("receipts in calls of trackers", progress, listener.feed, listener.start_afresh),
        Target("reports of averages", of_round, _decoded(_take_report)),
        Target("proofs against reducers", of_round, _decoded(_take_proof)),
        Target("seals in commits", of_round, _decoded(_take_seals)),
    ]
