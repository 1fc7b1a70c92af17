"""Receipts: the result of a round, signed by its coordinator.

The coordinator signs which round of which run it has committed, to which epoch the round leads, which members took
part, and their weights. The members know most of this already, so the commit carries only the signature (64 bytes) and
the epoch in addition. Nobody waits for a receipt: a member that has its averages goes on, and takes the receipt when
the commit comes.

A receipt shows peers outside the round what its members have done, as far as they believe the signer. They need that
because most peers of a run with several groups never meet: see :mod:`shoal.optim.vouching`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from blake3 import blake3

from shoal.averaging.control import GroupInfo
from shoal.averaging.messages import RoundID, RoundMessage, Signature
from shoal.net.transport import Amount, Count, PeerIDBytes
from shoal.p2p import PeerID
from shoal.peers.identity import verify_signature

# Each signed text begins with its purpose, so that no signature can be used for anything else.
_PURPOSE = b"shoal receipt 1"
DIGEST_BYTES = 16
# Larger groups make no receipts, because these would not fit into a call of a tracker.
MAX_MEMBERS = 256


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """The signed result of one round."""

    round_id: RoundID
    epoch: Count
    """The epoch to which the round leads, as the coordinator says."""
    members: Annotated[tuple[PeerIDBytes, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    weights: Annotated[tuple[Amount, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    """The weight of each member in the average; 0 for a member that has contributed nothing."""
    coordinator: Count
    """Position of the member that has signed the receipt."""
    signature: Signature = b""

    def digest(self, run: str) -> bytes:
        """A hash of the run and of everything in the receipt but the signature. This is what members sign."""
        said = msgspec.msgpack.encode(msgspec.structs.replace(self, signature=b""))
        return blake3(_PURPOSE + len(run.encode()).to_bytes(4) + run.encode() + said).digest(DIGEST_BYTES)

    def is_genuine(self, run: str) -> bool:
        """Whether the receipt is well formed, and its coordinator has signed it for this run."""
        is_whole = len(self.members) == len(self.weights) == len(set(self.members))
        return (
            is_whole
            and self.coordinator < len(self.members)
            and is_sealed(self.digest(run), self.members[self.coordinator], self.signature)
        )


def seal(digest: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """A member's signature, which says that a receipt is right. The coordinator's own is made the same way."""
    return sign(_PURPOSE + digest)


def is_sealed(digest: bytes, member: bytes, signature: bytes) -> bool:
    """Whether a signature of :func:`seal` is genuine."""
    public_key = PeerID(member).public_key
    return public_key is not None and verify_signature(public_key, signature, _PURPOSE + digest)


@dataclass(frozen=True)
class Notary:
    """Makes the receipt of a round, at the coordinator and at the others.

    Args:
        run: names the run, the same way at all members.
        epoch: the epoch to which the round leads.
        sign: signs with this peer's key.
        take: called with the receipt.
    """

    run: str
    epoch: int
    sign: Callable[[bytes], bytes]
    take: Callable[[Receipt], object]

    def sign_commit(self, commit: RoundMessage, round_id: bytes, group: GroupInfo, own: int) -> None:
        """Add this peer's signature to its commit, and keep the receipt."""
        commit.epoch = self.epoch
        blank = self._receipt(commit, round_id, group, own)
        if blank is not None:
            commit.signature = seal(blank.digest(self.run), self.sign)
            self.take(msgspec.structs.replace(blank, signature=commit.signature))

    def take_commit(self, commit: RoundMessage, round_id: bytes, group: GroupInfo, coordinator: int) -> None:
        """Keep the receipt of a commit that a coordinator has sent; its signature is not checked here."""
        receipt = self._receipt(commit, round_id, group, coordinator)
        if receipt is not None and commit.signature:
            self.take(receipt)

    def _receipt(self, commit: RoundMessage, round_id: bytes, group: GroupInfo, coordinator: int) -> Receipt | None:
        if group.group_size > MAX_MEMBERS:
            return None
        members = tuple(peer.to_bytes() for peer in group.peer_ids)
        weights = tuple(map(float, commit.weights))
        return Receipt(round_id, commit.epoch, members, weights, coordinator, commit.signature)
