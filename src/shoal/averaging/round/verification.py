"""Checks that each reducer gives the same averages to all members: the option ``verify_reducers``.

A reducer could give different averages to different members, and their models would drift apart unnoticed. So::

    reducer ── averages, then its signature over their hash ──► member: is it the hash of what has come?
    member ── report: the hashes, the reducers' signatures, its own signature over all hashes ──► coordinator
    coordinator ── two hashes that a reducer has signed, and that differ ──► members: forget its averages
    coordinator ── commit: what each member has signed ──► member: have all others signed the same as this one?

Two different hashes that a reducer has signed convict it: the reducer counts as dead, and its parts are averaged again
by the other members. If a member got averages that do not match the reducer's signature, it has no proof. Then the
reducer has failed for this member alone, and the member gets the averages that the others hold. A coordinator cannot
hide reports, because it cannot sign for other members: members refuse a commit without the signatures of all living
members, and the next coordinator takes over.

Averages are written over a member's own values as they come. So each member keeps a copy of its own values until the
round is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from blake3 import blake3

from shoal.averaging.messages import RoundMessage
from shoal.compression.base import bytes_of
from shoal.compression.statistics import codec_for_average
from shoal.errors import ProtocolError
from shoal.peers.identity import PeerID, verify_signature

if TYPE_CHECKING:
    from shoal.averaging.round.parts import RoundVector
    from shoal.compression import CompressionBase, CompressionInfo

# Each signed text begins with its purpose, so that no signature can be used for anything else.
_OF_REDUCER = b"shoal averages of a reducer 1"
_OF_MEMBER = b"shoal averages of all reducers 1"

LIE = "has given different averages to different members, and signed all of them; they were made anew without it"


def check_verification(codec: CompressionBase, infos: Sequence[CompressionInfo], alpha: float, quorum: object) -> None:
    """Check that ``verify_reducers`` works with the other options.

    Raises:
        ValueError: it does not work with these.
    """
    lossy = next((info for info in infos if codec_for_average(codec, info).lossy), None)
    if lossy is not None:
        raise ValueError(
            f"verify_reducers=True compares what members get, and with a lossy codec ({codec.fingerprint}) each one "
            "gets something else: use NoCompression"
        )
    if alpha != 1 or quorum is not None:
        raise ValueError(
            f"verify_reducers=True needs averaging_alpha=1 and no quorum, got averaging_alpha={alpha}, quorum={quorum}"
        )


class Proof(NamedTuple):
    """Two different hashes that a reducer has signed."""

    reducer: int
    hashes: tuple[bytes, bytes]
    signatures: tuple[bytes, bytes]


class Verification:
    """What one member knows about the averages of all reducers; and at the coordinator, what the others have reported.

    Args:
        round_id: names the round.
        peers: all members.
        own: this member's position.
        vector: the averages are written into it.
        sign: signs with this peer's key.
    """

    def __init__(
        self,
        round_id: bytes,
        peers: Sequence[PeerID],
        own: int,
        vector: RoundVector,
        sign: Callable[[bytes], bytes],
    ) -> None:
        self._round_id, self._peers, self._own, self._vector = round_id, peers, own, vector
        self.sign = sign
        """Signs with this member's key."""
        # For each reducer: the hash of each average, by the index of its part.
        self._digests: list[dict[int, bytes]] = [{} for _ in peers]
        # By reducer: the signature that has come with its averages, and the same once it has been checked.
        self._claims: dict[int, bytes] = {}
        self._confirmed: dict[int, bytes] = {}
        self._reports: dict[int, RoundMessage] = {}
        self.complained: set[tuple[int, int]] = set()
        """At the coordinator: members that hold other averages of a reducer than the others, without a proof."""
        self.convicted: set[int] = set()
        """Reducers that have signed two different hashes."""
        vector.on_average = self.note
        vector.keep_values()

    # --- what has come ------------------------------------------------------------------------------------------------

    def note(self, reducer: int, index: int, values: torch.Tensor | None, is_delta: bool = False) -> None:
        """Record the hash of an average that has come; ``None``: there is none for this part."""
        if reducer == self._own and index in self._digests[reducer]:
            return  # this member is the reducer and has recorded the average when it made it
        what = blake3(bytes([values is None, is_delta]))
        if values is not None:
            what.update(bytes_of(values.contiguous()))
        self._digests[reducer][index] = what.digest()

    def hash_of(self, reducer: int) -> bytes:
        """The hash of all averages of a reducer; empty while some are missing, or if it reduces nothing."""
        digests, count = self._digests[reducer], len(self._vector.parts[reducer])
        if not count or len(digests) < count:
            return b""
        return blake3(b"".join(digests[index] for index in range(count))).digest()

    def sign_own(self) -> bytes:
        """This member's signature over the averages that it has made as a reducer. All of them must be made."""
        return self.sign(self.statement(self._own, self.hash_of(self._own)))

    def note_claim(self, reducer: int, signature: bytes) -> None:
        """Keep a reducer's signature over its averages, to be checked when all of them are here."""
        self._claims[reducer] = signature

    def is_confirmed(self, reducer: int) -> bool:
        """Whether all averages of a reducer and its signature over them are here.

        Raises:
            ProtocolError: the signature does not match the averages.
        """
        signature, what = self._claims.get(reducer), self.hash_of(reducer)
        if signature is None or not what:
            return False
        if not self._is_signed(reducer, what, signature):
            raise ProtocolError("has given other averages than it has signed")
        self._confirmed[reducer] = signature
        return True

    def drop_unconfirmed(self) -> None:
        """Forget the averages of reducers that have not signed them. Called when nothing more comes."""
        for reducer, parts in enumerate(self._vector.parts):
            # This member's own averages need no signature, but if all others failed it has stopped halfway.
            is_whole = reducer in self._confirmed or (reducer == self._own and self._vector.held[reducer] == len(parts))
            if parts and not is_whole:
                self.forget(reducer)

    def forget(self, reducer: int) -> None:
        """Drop all averages of a reducer and put this member's own values back in their place."""
        self._digests[reducer].clear()
        self._claims.pop(reducer, None)
        self._confirmed.pop(reducer, None)
        self._vector.restore(reducer)

    # --- what is signed -----------------------------------------------------------------------------------------------

    def statement(self, reducer: int, what: bytes) -> bytes:
        """The text that a reducer signs about its averages, whose hash is ``what``."""
        return _OF_REDUCER + self._round_id + reducer.to_bytes(4) + what

    def _is_signed(self, reducer: int, what: bytes, signature: bytes) -> bool:
        return _verify(self._peers[reducer], signature, self.statement(reducer, what))

    def hashes(self) -> list[bytes]:
        """The hash of each reducer's averages, as this member has got them."""
        return [self.hash_of(reducer) for reducer in range(len(self._peers))]

    def summary(self, hashes: Sequence[bytes]) -> bytes:
        """The text that a member signs about the averages of all reducers."""
        # A hash may be empty. All are padded to one length, so that no two lists of hashes give the same text.
        return _OF_MEMBER + self._round_id + blake3(b"".join(each.ljust(32, b"\0") for each in hashes)).digest()

    def complete_report(self, report: RoundMessage) -> RoundMessage:
        """Add to this member's report the hashes of its averages, the reducers' signatures and its own signature."""
        report.hashes = self.hashes()
        own = self.sign_own() if report.hashes[self._own] else b""
        signatures = {**self._confirmed, self._own: own}
        report.signatures = [signatures.get(reducer, b"") for reducer in range(len(self._peers))]
        report.seals = [self.sign(self.summary(report.hashes))]
        return report

    # --- at the coordinator -------------------------------------------------------------------------------------------

    def take_report(self, member: int, report: RoundMessage) -> None:
        """Keep a member's report on the averages that it holds.

        Raises:
            ProtocolError: the report is malformed.
        """
        count = len(self._peers)
        if (len(report.hashes), len(report.signatures), len(report.seals)) != (count, count, 1):
            raise ProtocolError("malformed report: without the hashes of averages")
        self._reports[member] = report

    def find_proof(self, members: Collection[int]) -> Proof | None:
        """A proof that convicts a reducer; ``None``: there is none.

        Args:
            members: the members whose reports count; this one's counts, too.
        """
        for reducer in range(len(self._peers)):
            found: dict[bytes, bytes] = {}
            for what, signatures in self._versions(reducer, members).items():
                valid = (each for each in signatures if self._is_signed(reducer, what, each))
                if (signature := next(valid, None)) is not None:
                    found[what] = signature
            if len(found) > 1:
                (one, other), (first, second) = tuple(found)[:2], tuple(found.values())[:2]
                return Proof(reducer, (one, other), (first, second))
        return None

    def _versions(self, reducer: int, members: Collection[int]) -> dict[bytes, list[bytes]]:
        """By hash of a reducer's averages, the signatures with which members hold them; empty if all hold the same."""
        found: dict[bytes, list[bytes]] = {}
        for report in self._counting(members).values():
            if what := report.hashes[reducer]:
                # The others have made the averages of a convicted reducer anew, so its signatures count no more.
                signature = b"" if reducer in self.convicted else report.signatures[reducer]
                found.setdefault(what, []).append(signature)
        return found if len(found) > 1 else {}

    def _counting(self, members: Collection[int]) -> Mapping[int, RoundMessage]:
        own = self.complete_report(RoundMessage(kind=0))
        return {**{i: self._reports[i] for i in sorted(members) if i in self._reports}, self._own: own}

    def find_complaints(self, members: Collection[int]) -> list[tuple[int, int]]:
        """Pairs of a member and a reducer of which this member holds other averages than the others, without a proof.

        What the reducer has signed is right; without a signature, what this member holds; else what most members hold.
        """
        counting = self._counting(members)
        found = []
        for reducer in range(len(self._peers)):
            versions = self._versions(reducer, members)
            signed = [w for w, each in versions.items() if any(self._is_signed(reducer, w, s) for s in each)]
            usual = Counter({what: len(signatures) for what, signatures in versions.items()})
            own = counting[self._own].hashes[reducer]
            right = next(iter(signed), "") or own or next((what for what, _ in usual.most_common(1)), b"")
            found += [(m, reducer) for m, r in counting.items() if versions and r.hashes[reducer] not in (b"", right)]
        return found

    def withdraw(self, member: int, reducer: int) -> bool:
        """Discard a member's report on one reducer; returns whether this is the first time."""
        is_first = (member, reducer) not in self.complained
        self.complained.add((member, reducer))
        if member in self._reports:
            self._reports[member].hashes[reducer] = b""
        return is_first

    def seals(self) -> list[bytes]:
        """Each member's signature over all averages; empty for a member that has not reported."""
        reports = {**self._reports, self._own: self.complete_report(RoundMessage(kind=0))}
        return [reports[i].seals[0] if i in reports else b"" for i in range(len(self._peers))]

    # --- at the others ------------------------------------------------------------------------------------------------

    def check_proof(self, message: RoundMessage) -> int:
        """Check the coordinator's proof; returns the reducer that it convicts.

        Raises:
            ProtocolError: it is no proof.
        """
        reducer = message.members[0] if len(message.members) == 1 else len(self._peers)
        pairs = set(zip(message.hashes, message.signatures, strict=False))
        is_proof = (
            reducer < len(self._peers)
            and len({what for what, _ in pairs}) == 2
            and all(self._is_signed(reducer, what, signature) for what, signature in pairs)
        )
        if not is_proof:
            raise ProtocolError("says without a proof that a reducer has lied")
        return reducer

    def check_seals(self, seals: Sequence[bytes], members: Collection[int]) -> None:
        """Check the signatures that show that others have the same averages as this member.

        Args:
            seals: the signature of each member; empty for a member without one.
            members: the members that must have signed.

        Raises:
            ProtocolError: a signature is missing, or covers other averages.
        """
        statement = self.summary(self.hashes())
        for member in members:
            seal = seals[member] if member < len(seals) else b""
            if not _verify(self._peers[member], seal, statement):
                raise ProtocolError(f"does not show that {self._peers[member]} has the same averages")


def _verify(peer: PeerID, signature: bytes, statement: bytes) -> bool:
    return peer.public_key is not None and verify_signature(peer.public_key, signature, statement)
