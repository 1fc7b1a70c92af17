"""What receipts of rounds show to a peer that was not there, and what they do not."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from shoal.averaging.round.receipts import Receipt, seal
from shoal.optim.evidence import OpenGuard
from shoal.optim.vouching import MAX_EPOCHS_APART, ReceiptsMessage, Shown, Vouching
from shoal.peers.identity import Identity

pytestmark = pytest.mark.once

RUN, NOW, BATCH, EPOCH = "run_grad_averager", 1e9, 8, 20
_rng = random.Random(0)
IDENTITIES = {i.peer_id.to_bytes(): i for i in (Identity.generate(_rng) for _ in range(14))}
OWN, FRIEND, ANOTHER, *OTHERS = IDENTITIES
SYBILS = OTHERS[-4:]


def receipt_of(*members: bytes, epoch=EPOCH, run=RUN, coordinator=0, weights=None, signer=None) -> Receipt:
    """As its coordinator makes it, or somebody who pretends to be it."""
    weights = tuple(weights or [50.0] * len(members))
    blank = Receipt(_rng.randbytes(21), epoch, members, weights, coordinator)
    sign = IDENTITIES[signer or members[coordinator]].sign
    return msgspec.structs.replace(blank, signature=seal(blank.digest(run), sign))


def sealed(receipt: Receipt, *members: bytes) -> Shown:
    digest = receipt.digest(RUN)
    return Shown(receipt, {receipt.members.index(m): seal(digest, IDENTITIES[m].sign) for m in members})


class Peer:
    """A tracker, as far as receipts go, with the time in the test's hands."""

    def __init__(self, own: bytes = OWN, met=(FRIEND, ANOTHER), rounds: int = 10, largest_group: int = 4) -> None:
        self.own, self.now = own, NOW
        self.evidence = OpenGuard(own, bytes, NOW)
        self.evidence.has_receipts, self.evidence.full_group = True, 1  # this one has no place for all
        for number in range(rounds):
            self.evidence.note_round({own: 100.0, **dict.fromkeys(met, 100.0)}, NOW + 10 * number)
        self.vouching = Vouching(
            own, RUN, IDENTITIES[own].sign, self.evidence, lambda: EPOCH, largest_group, lambda: self.now
        )

    def is_shown(self, peer: bytes, shown: Shown) -> ReceiptsMessage | None:
        """Another peer says that it has a receipt, and shows it when it is asked for."""
        digest = shown.receipt.digest(RUN)
        self.vouching.hear(peer, ReceiptsMessage(digest=digest))
        word = self.vouching.word_for(peer)
        if word is not None and word.asks == digest:
            self.vouching.hear(peer, ReceiptsMessage(digest=digest, shown=shown))
        return word

    def believes(self, peer: bytes) -> float:
        return self.evidence.most_samples(peer, NOW + 90, BATCH)


def talk(one: Peer, other: Peer) -> None:
    """One calls the other, as often as there is something to say."""
    for _ in range(10):
        question = one.vouching.word_for(other.own)
        if question is not None:
            other.vouching.hear(one.own, question)
        answer = other.vouching.word_for(one.own)
        if answer is None or not one.vouching.hear(other.own, answer):
            return
    raise AssertionError("they do not come to an end")


# --- what counts ------------------------------------------------------------------------------------------------------


def test_whoever_was_with_a_friend_is_known():
    peer = Peer()
    peer.is_shown(OTHERS[0], sealed(receipt_of(FRIEND, *OTHERS[:3])))
    assert all(peer.believes(other) == 2 * 50 + BATCH for other in OTHERS[:3])
    assert peer.evidence.is_proven(OTHERS[1])
    assert peer.believes(OTHERS[3]) == BATCH
    assert not peer.evidence.is_proven(OTHERS[3])


def test_the_seal_of_a_friend_does_as_well_as_its_signature_as_the_coordinator():
    peer = Peer()
    receipt = receipt_of(OTHERS[0], OTHERS[1], FRIEND)
    peer.is_shown(OTHERS[0], sealed(receipt, OTHERS[1]))
    assert peer.believes(OTHERS[0]) == BATCH
    receipt = receipt_of(OTHERS[0], OTHERS[1], FRIEND)
    peer.is_shown(OTHERS[0], sealed(receipt, OTHERS[1], FRIEND))
    assert peer.believes(OTHERS[0]) == peer.believes(OTHERS[1]) == 2 * 50 + BATCH


def test_nobody_is_its_own_witness():
    peer = Peer()
    before = peer.believes(FRIEND)
    peer.is_shown(FRIEND, sealed(receipt_of(FRIEND, OTHERS[0], weights=[10**6, 1])))
    assert peer.believes(FRIEND) == before


def test_nobody_counts_for_more_than_the_most_that_has_been_seen():
    peer = Peer()
    peer.is_shown(OTHERS[0], sealed(receipt_of(FRIEND, OTHERS[0], weights=[1, 2**53])))
    assert peer.believes(OTHERS[0]) == 2 * 100 + BATCH


def test_what_friends_say_is_forgotten_after_some_rounds():
    peer = Peer()
    peer.is_shown(OTHERS[0], sealed(receipt_of(FRIEND, *OTHERS[:3])))
    for number in range(10, 19):
        assert peer.evidence.is_proven(OTHERS[0])
        peer.evidence.note_round({OWN: 100.0, FRIEND: 100.0}, NOW + 10 * number)
    assert not peer.evidence.is_proven(OTHERS[0])


def test_where_weights_are_no_samples_they_are_not_limited():
    peer = Peer(rounds=0)
    peer.vouching._weights_are_samples = False
    for number in range(10):
        peer.evidence.note_round({OWN: math.inf, FRIEND: math.inf}, NOW + 10 * number)
    peer.is_shown(OTHERS[0], sealed(receipt_of(FRIEND, OTHERS[0], weights=[1, 1])))
    assert peer.believes(OTHERS[0]) > 10**15


# --- what does not ----------------------------------------------------------------------------------------------------

RECEIPT = receipt_of(FRIEND, *OTHERS[:3])
FALSE = {
    "signed by somebody who did not coordinate": receipt_of(FRIEND, *OTHERS[:3], signer=OTHERS[0]),
    "of another run": receipt_of(FRIEND, *OTHERS[:3], run="another_grad_averager"),
    "of the parameters, not of the gradients": receipt_of(FRIEND, *OTHERS[:3], run="run_state_averager"),
    "of a round long ago": receipt_of(FRIEND, *OTHERS[:3], epoch=EPOCH - MAX_EPOCHS_APART - 1),
    "of a round to come": receipt_of(FRIEND, *OTHERS[:3], epoch=EPOCH + MAX_EPOCHS_APART + 1),
    "of more members than a group has": receipt_of(FRIEND, *OTHERS[:4]),
    "without whoever shows it": receipt_of(FRIEND, *OTHERS[1:4]),
    "with one member twice": receipt_of(FRIEND, OTHERS[0], OTHERS[0]),
    "with fewer weights than members": receipt_of(FRIEND, *OTHERS[:3], weights=[1.0]),
    "with other weights than were signed": msgspec.structs.replace(RECEIPT, weights=(1.0, 9.0, 9.0, 9.0)),
    "with another member": msgspec.structs.replace(RECEIPT, members=(FRIEND, *OTHERS[:2], OTHERS[5])),
    "for another epoch than was signed": msgspec.structs.replace(RECEIPT, epoch=EPOCH + 1),
    "with a coordinator that is not in it": msgspec.structs.replace(RECEIPT, coordinator=7),
    "without a signature": msgspec.structs.replace(RECEIPT, signature=b""),
    "of strangers among themselves": receipt_of(*OTHERS[:4]),
}


@pytest.mark.parametrize("kind", FALSE)
def test_what_is_no_evidence(kind):
    peer = Peer()
    receipt = FALSE[kind]
    peer.is_shown(OTHERS[0], Shown(receipt))
    assert [peer.believes(other) for other in OTHERS] == [BATCH] * len(OTHERS)


def test_strangers_with_seals_of_each_other_prove_nothing():
    peer = Peer()
    peer.is_shown(SYBILS[0], sealed(receipt_of(*SYBILS), *SYBILS))
    assert not any(map(peer.evidence.is_proven, SYBILS))


def test_a_seal_of_a_friend_from_another_receipt_is_none():
    peer = Peer()
    first, second = receipt_of(SYBILS[0], FRIEND), receipt_of(SYBILS[0], FRIEND, SYBILS[1])
    stolen = Shown(second, {1: sealed(first, FRIEND).seals[1], 99: b"no member"})
    peer.is_shown(SYBILS[0], stolen)
    assert not peer.evidence.is_proven(SYBILS[1])


def test_a_friend_that_lies_vouches_for_one_group_in_an_epoch():
    peer = Peer()
    peer.is_shown(SYBILS[0], sealed(receipt_of(FRIEND, SYBILS[0])))
    peer.is_shown(SYBILS[1], sealed(receipt_of(FRIEND, SYBILS[1])))
    peer.is_shown(SYBILS[2], sealed(receipt_of(FRIEND, SYBILS[2], epoch=EPOCH - 1)))
    assert [peer.evidence.is_proven(sybil) for sybil in SYBILS[:3]] == [True, False, False]
    peer.is_shown(SYBILS[3], sealed(receipt_of(FRIEND, SYBILS[3], epoch=EPOCH + 1)))
    assert peer.evidence.is_proven(SYBILS[3])


@pytest.mark.parametrize(("epoch", "is_sealed"), [(EPOCH + 1, True), (EPOCH, True), (EPOCH + 4, False)])
def test_nobody_seals_a_receipt_of_an_epoch_far_away(epoch, is_sealed):
    """Whoever has sealed one does not count as a witness until then, so a coordinator could silence its members."""
    peer = Peer()
    peer.vouching.take(receipt_of(FRIEND, OWN, ANOTHER, epoch=epoch))
    assert (peer.vouching.word_for(ANOTHER) is not None) == is_sealed


def test_what_was_not_asked_for_is_not_looked_at():
    peer = Peer()
    peer.vouching.hear(OTHERS[0], ReceiptsMessage(shown=sealed(RECEIPT)))
    assert not peer.evidence.is_proven(OTHERS[0])


def test_memory_has_bounds():
    peer = Peer()
    for number in range(10_000):
        word = ReceiptsMessage(digest=number.to_bytes(16, "big"), seal=b"", asks=number.to_bytes(16, "big"))
        peer.vouching.hear(number.to_bytes(38, "big"), word)
        peer.vouching.word_for(number.to_bytes(38, "big"))
        peer.vouching.hear(number.to_bytes(38, "big"), msgspec.structs.replace(word, seal=b"seal"))
    kept = [each for each in vars(peer.vouching).values() if isinstance(each, dict | set)]
    assert max(map(len, kept)) <= 4096


# --- how they travel --------------------------------------------------------------------------------------------------


def group(*members: bytes, met: dict[bytes, tuple] | None = None) -> list[Peer]:
    peers = [Peer(own, (met or {}).get(own, (FRIEND,))) for own in members]
    receipt = receipt_of(*members)
    for peer in peers:
        peer.vouching.take(receipt)
    return peers


def test_a_receipt_is_shown_once_to_each_who_asks_and_with_the_seals_of_the_others():
    first, second, third = group(OTHERS[0], OTHERS[1], FRIEND)
    talk(first, third)
    talk(second, first)
    outsider = Peer(met=(FRIEND,))
    talk(outsider, first)
    assert outsider.evidence.is_proven(OTHERS[0])
    assert outsider.evidence.is_proven(OTHERS[1])
    word = first.vouching.word_for(OWN)
    assert word is not None
    assert word.shown is None
    outsider.vouching.hear(second.own, ReceiptsMessage(digest=word.digest))
    assert outsider.vouching.word_for(second.own) is None, "it has seen that already"


def test_whoever_is_called_may_ask_as_well():
    first, _, third = group(OTHERS[0], OTHERS[1], FRIEND)
    talk(third, first)
    outsider = Peer(met=(FRIEND,))
    talk(first, outsider)
    assert outsider.evidence.is_proven(OTHERS[0])


def test_a_seal_may_be_earlier_than_the_receipt():
    late = Peer(OTHERS[0], met=(FRIEND,))
    friend = Peer(FRIEND, met=())
    receipt = receipt_of(OTHERS[0], FRIEND)
    friend.vouching.take(receipt)
    talk(friend, late)
    late.vouching.take(receipt)
    outsider = Peer(met=(FRIEND,))
    talk(outsider, late)
    assert outsider.evidence.is_proven(OTHERS[0])


def test_if_one_does_not_answer_another_is_asked_a_while_later():
    peer, digest = Peer(), RECEIPT.digest(RUN)
    peer.vouching.hear(OTHERS[0], ReceiptsMessage(digest=digest))
    assert peer.vouching.word_for(OTHERS[0]).asks == digest
    assert not peer.vouching.hear(OTHERS[1], ReceiptsMessage(digest=digest))
    peer.now += 11
    assert peer.vouching.hear(OTHERS[1], ReceiptsMessage(digest=digest))
    assert peer.vouching.word_for(OTHERS[1]).asks == digest


def test_a_commit_with_a_wrong_signature_is_not_shown():
    peer = Peer(OTHERS[0])
    peer.vouching.take(receipt_of(FRIEND, OTHERS[0], signer=OTHERS[1]))
    assert peer.vouching.word_for(OWN) is None


# --- before much is known ---------------------------------------------------------------------------------------------


def test_while_few_are_known_others_count_for_as_much_as_anybody():
    peer = Peer(rounds=3)
    assert peer.believes(SYBILS[0]) >= 200
    assert peer.believes(SYBILS[0]) < 10**4
    assert not peer.evidence.is_proven(SYBILS[0])


def test_a_leader_does_not_cut_the_weight_of_a_member_that_it_has_not_heard_of():
    peer = Peer()
    assert peer.evidence.largest_weight(SYBILS[0], NOW + 90, BATCH) == 200
    assert peer.evidence.largest_weight(SYBILS[0], NOW + 90, 10**6) == 10**6
