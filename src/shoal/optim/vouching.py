"""How peers prove that they take part, in runs of several groups, where most peers never meet.

A peer judges others by the rounds that it had with them. For those that it has not met there are receipts of rounds
(:mod:`shoal.averaging.round.receipts`), which travel with the calls of the trackers::

    another peer                                  this peer
      ├─ the digest of my last receipt is … ────────►│ it is new
      │◄─────────────────────────────── show it me ──┤ once, to one of the peers that have it
      ├─ the receipt, and the seals of others in it ►│ did a peer sign it that was in a round with me?

A *seal* is a member's signature of a receipt. The coordinator's stands in it; the other members send each other theirs
with their first call after the round. A receipt counts if one of its signers has been in a round with this peer and is
not the peer in question. So a stranger proves nothing by rounds with itself.

A lying member can vouch for peers that do not exist, but only for a few. Each witness counts for one round of an epoch,
a group has a largest size, testimony is forgotten after some rounds, and no peer is believed to bring more than the
most that this peer has seen anybody bring.

The work is bounded, too: a digest is asked for once, and a signature is verified only if something depends on it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from shoal.averaging.messages import Signature
from shoal.averaging.round.receipts import DIGEST_BYTES, MAX_MEMBERS, Receipt, is_sealed, seal
from shoal.net.transport import Count
from shoal.optim.history.window import EPOCHS_AHEAD

if TYPE_CHECKING:
    from shoal.optim.evidence import OpenGuard

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A receipt from an epoch further away than this says nothing about the present.
MAX_EPOCHS_APART = 8
# Each memory holds at most this many entries, because others decide what comes in.
_MAX_REMEMBERED = 4096
# Seconds to wait for a receipt before another peer is asked for it.
_SECONDS_TO_ANSWER = 10.0

Digest = Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]


class Shown(msgspec.Struct, array_like=True):
    """A receipt, and the seals that prove it."""

    receipt: Receipt
    seals: Annotated[dict[Count, Signature], msgspec.Meta(max_length=MAX_MEMBERS)] = {}
    """Signatures of members, by the position of the member in the receipt."""


class ReceiptsMessage(msgspec.Struct, array_like=True):
    """The part of a tracker's call that is about receipts."""

    digest: Digest = b""
    """The digest of the sender's last receipt."""
    seal: Signature = b""
    """The sender's seal of it, if the receiver was in that round, too."""
    asks: Digest = b""
    """The digest of a receipt that the sender wants to see."""
    shown: Shown | None = None


def _remember(known: dict[bytes, T], key: bytes, what: T) -> None:
    known.pop(key, None)
    known[key] = what
    if len(known) > _MAX_REMEMBERED:
        del known[next(iter(known))]


class Vouching:
    """The receipts of one peer: its own, and those that others show. Lives in one event loop.

    Args:
        own: id of this peer.
        run: prefix of the rounds that count.
        sign: signs bytes with this peer's key.
        evidence: is told what receipts prove.
        epoch: returns this peer's epoch.
        largest_group: the largest number of members that a group of this run can have.
        now: returns the time, in seconds.
        weights_are_samples: the weight of a member is its number of samples; otherwise samples are not counted.
    """

    def __init__(
        self,
        own: bytes,
        run: str,
        sign: Callable[[bytes], bytes],
        evidence: OpenGuard,
        epoch: Callable[[], int],
        largest_group: int,
        now: Callable[[], float],
        *,
        weights_are_samples: bool = True,
    ) -> None:
        self._own, self._run, self._sign, self._evidence, self._epoch = own, run, sign, evidence, epoch
        self._largest_group, self._now, self._weights_are_samples = largest_group, now, weights_are_samples
        self._receipt: Receipt | None = None
        self._digest = self._seal = b""
        # About the receipt above: the seals of other members, which only the peers that see it verify; seals that
        # arrived before it; members that have this peer's seal; peers that have seen it; peers that want to see it.
        self._seals: dict[bytes, bytes] = {}
        self._early_seals: dict[bytes, tuple[bytes, bytes]] = {}
        self._sealed_for: set[bytes] = set()
        self._shown_to: set[bytes] = set()
        self._asked_by: dict[bytes, None] = {}
        # Digests that others offer, by peer; when this peer asked for a digest; digests of receipts that it has seen.
        self._offers: dict[bytes, bytes] = {}
        self._asked_at: dict[bytes, float] = {}
        self._seen: dict[bytes, None] = {}
        # For each witness, the latest epoch and the one round of it that it may vouch for.
        self._witnessed: dict[bytes, tuple[int, bytes]] = {}

    def take(self, receipt: Receipt) -> None:
        """A round of this peer is over, and this is its receipt."""
        is_known = self._receipt is not None and self._receipt.round_id == receipt.round_id
        # Who seals a receipt is no witness of earlier epochs, so its coordinator must not claim just any.
        is_of_now = abs(receipt.epoch - self._epoch()) <= 1 + EPOCHS_AHEAD
        if is_known or not is_of_now or self._own not in receipt.members or not receipt.is_genuine(self._run):
            return
        self._receipt, self._digest = receipt, receipt.digest(self._run)
        self._seal = seal(self._digest, self._sign)
        early = {peer: each for peer, (digest, each) in self._early_seals.items() if digest == self._digest}
        self._seals = {peer: each for peer, each in early.items() if peer in receipt.members}
        self._sealed_for, self._shown_to = set(), set()
        self._early_seals.clear()
        self._asked_by.clear()

    # --- what is said -------------------------------------------------------------------------------------------------

    def word_for(self, peer: bytes) -> ReceiptsMessage | None:
        """What to tell a peer about receipts in the next call. It is not told twice, so the call must be made."""
        word = ReceiptsMessage(asks=self._question_to(peer))
        receipt = self._receipt
        if receipt is not None and peer in receipt.members:
            if peer not in self._sealed_for:
                self._sealed_for.add(peer)
                word.digest, word.seal = self._digest, self._seal
        elif receipt is not None:
            word.digest = self._digest
            if peer in self._asked_by and peer not in self._shown_to:
                self._shown_to.add(peer)
                word.shown = Shown(receipt, self._known_seals(receipt))
        self._asked_by.pop(peer, None)
        return word if word != ReceiptsMessage() else None

    def _question_to(self, peer: bytes) -> bytes:
        offer = self._offers.pop(peer, b"")
        if not offer or offer in self._seen or self._asked_at.get(offer, -math.inf) > self._now() - _SECONDS_TO_ANSWER:
            return b""
        _remember(self._asked_at, offer, self._now())
        return offer

    def _known_seals(self, receipt: Receipt) -> dict[int, bytes]:
        seals = {**self._seals, self._own: self._seal}
        return {index: seals[member] for index, member in enumerate(receipt.members) if member in seals}

    # --- what is heard ------------------------------------------------------------------------------------------------

    def hear(self, peer: bytes, word: ReceiptsMessage) -> bool:
        """Take in what a peer says about receipts; returns whether to call it back with an answer or a question."""
        if word.seal and self._receipt is not None and word.digest == self._digest:
            if peer in self._receipt.members:
                self._seals[peer] = word.seal
        elif word.seal:  # the receipt is still on its way to this peer
            _remember(self._early_seals, peer, (word.digest, word.seal))
        if self._receipt is not None and word.asks == self._digest and peer not in self._shown_to:
            _remember(self._asked_by, peer, None)
        if word.shown is not None:
            self._examine(peer, word.shown)
        # A seal comes with the receipt of a round that this peer was in, too: it has that receipt, or will get it.
        is_new = word.digest not in (b"", self._digest) and word.digest not in self._seen and not word.seal
        if is_new and self._asked_at.get(word.digest, -math.inf) <= self._now() - _SECONDS_TO_ANSWER:
            _remember(self._offers, peer, word.digest)
        return peer in self._asked_by or peer in self._offers

    def _examine(self, peer: bytes, shown: Shown) -> None:
        receipt = shown.receipt
        digest = receipt.digest(self._run)
        if digest not in self._asked_at or digest in self._seen:
            return
        del self._asked_at[digest]
        _remember(self._seen, digest, None)
        is_recent = abs(receipt.epoch - self._epoch()) <= MAX_EPOCHS_APART
        if not is_recent or peer not in receipt.members or len(receipt.members) > self._largest_group:
            logger.debug("a receipt of %d members for epoch %d does not count", len(receipt.members), receipt.epoch)
        elif receipt.is_genuine(self._run) and (witnesses := self._witnesses(digest, shown)):
            weights = dict(zip(receipt.members, receipt.weights, strict=True))
            samples = {m: w if self._weights_are_samples else math.inf for m, w in weights.items() if w > 0}
            # A peer cannot be its own witness.
            self._evidence.note_testimony({m: w for m, w in samples.items() if m != self._own and witnesses != {m}})

    def _witnesses(self, digest: bytes, shown: Shown) -> set[bytes]:
        """Up to two signers of a receipt that this peer has met; two are enough, as nobody vouches for itself."""
        receipt, found = shown.receipt, set[bytes]()
        seals = {**shown.seals, receipt.coordinator: receipt.signature}
        for index, signature in seals.items():
            member = receipt.members[index] if index < len(receipt.members) else self._own
            if len(found) == 2 or not self._evidence.has_met(member):
                continue
            epoch, other = self._witnessed.get(member, (-1, b""))
            is_only_one = receipt.epoch > epoch or (receipt.epoch, digest) == (epoch, other)
            if is_only_one and is_sealed(digest, member, signature):
                _remember(self._witnessed, member, (receipt.epoch, digest))
                found.add(member)
        return found
