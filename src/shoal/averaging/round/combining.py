"""How a reducer applies a rule other than the mean, and where it gets the norms that some rules need.

Some rules need the norm of each member's whole vector. A reducer needs it before it averages its first part, but it
gets only a share of the vector. An extra phase would cost a round trip. Instead, each sender first tells every reducer
the norms of *all* shares of its vector, signed for this round. A reducer averages a part only when all senders that it
waits for have sent it, so it knows their norms by then.

A sender may lie about its norms:

- It may send more than it has announced. Each reducer adds up the norms of the parts that have arrived. When a part
  makes the sum larger than announced, the reducer leaves the sender out of this part and all later ones. So no average
  contains more than was announced. A tolerance of one percent covers codec errors.
- It may announce different norms to different reducers. Then it has signed both. Members pass the statements on to the
  coordinator, which shows all members two statements that differ. Only the sender could have signed both.

When parts are averaged again after a death, the norms that the coordinator received are used.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from shoal.averaging.aggregation import Aggregation
from shoal.averaging.control import AveragingMode, GroupInfo
from shoal.averaging.finite import all_finite
from shoal.averaging.majorities import cut_to_others
from shoal.averaging.messages import STATEMENT_BYTES
from shoal.errors import ProtocolError
from shoal.peers.identity import verify_signature

if TYPE_CHECKING:
    from shoal.averaging.round.parts import Part, RoundVector

# A codec may make the norm larger than announced by this factor (chosen).
TOLERANCE = 1.01
# Smaller norms, and infinite ones, are computed again in double precision: squares of float32 under- or overflow.
# Chosen well above that. Double precision is thirty times as slow, so it is not used for all.
SMALL_NORM = 1e-15
# Norms are clipped to this (chosen), so that the norm of several shares together is finite, too.
MAX_NORM = 1e300

# A member may claim any number of samples. With a rule, its weight is clipped to this multiple of the weight of most
# others (chosen).
MOST_WITH_RULE = 2
# With more values than this, of all members together, a rule runs in a thread (chosen): it may take over a millisecond.
HEAVY_VALUES = 2**15

_LABEL = b"shoal norms 1\0"
_DIGEST_BYTES = 32  # of SHA-256
_SIGNATURE_BYTES = STATEMENT_BYTES - _DIGEST_BYTES

Accuse = Callable[[int, str], object]
"""Called with the position of a member that has lied, and what it has lied about."""


@torch.no_grad()
def norm_of(values: torch.Tensor) -> float:
    """The Euclidean norm; finite if all values are."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        values = values.double()
    dtype = torch.promote_types(values.dtype, torch.float32)
    norm = float(torch.linalg.vector_norm(values, dtype=dtype))
    if SMALL_NORM < norm < math.inf:
        return norm
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    if not math.isfinite(norm) and all_finite(values):
        largest = float(values.abs().max())
        norm = float(torch.linalg.vector_norm(values.double() / largest)) * largest
        return min(norm, MAX_NORM)
    return norm


def share_norms(vector: RoundVector, own_index: int) -> list[float]:
    """The norm of each reducer's share of this member's vector, as the reducer gets it: after the codec."""
    return [
        min(math.hypot(*(_norm_on_arrival(vector, part, own_index) for part in parts)), MAX_NORM)
        for parts in vector.parts
    ]


def _norm_on_arrival(vector: RoundVector, part: Part, own_index: int) -> float:
    values = vector.sound_values(part)
    if values is None:
        return 0.0
    if part.codec.lossy and part.reducer != own_index:
        _, values = part.codec.compress_and_decode(values, part.info)
    return norm_of(values)


class NormClaim(NamedTuple):
    """What a member announces about its vector."""

    norms: Sequence[float] = ()
    """The norm of each reducer's share."""
    statement: bytes = b""
    """A digest of the norms, followed by the member's signature over that digest and the round."""

    @classmethod
    def make(cls, round_id: bytes, norms: Sequence[float], sign: Callable[[bytes], bytes]) -> NormClaim:
        digest = _digest(norms)
        return cls(tuple(norms), digest + sign(_LABEL + round_id + digest))


def _digest(norms: Sequence[float]) -> bytes:
    return hashlib.sha256(struct.pack(f"<{len(norms)}d", *norms)).digest()


class NormBook:
    """The norms that each member of a round has announced, and the proofs against members that contradict themselves.

    Args:
        round_id: the id of the round.
        group: its members.
        rule: the group's rule; ``None``: the mean.
        accuse: called with a member that has lied.
    """

    def __init__(self, round_id: bytes, group: GroupInfo, rule: Aggregation | None, accuse: Accuse) -> None:
        self._round_id, self._group, self._rule, self._accuse = round_id, group, rule, accuse
        self._peers = group.peer_ids
        self.norms: dict[int, tuple[float, ...]] = {}
        """By member that has announced norms to this one directly: its norms."""
        self.own = NormClaim()
        """This member's announcement; empty if the rule needs no norms."""
        self._statements: dict[int, bytes] = {}
        # By member that has contradicted itself: two statements that differ.
        self._proofs: dict[int, tuple[bytes, bytes]] = {}

    def make_combiner(self) -> Combiner | None:
        """The combiner for a reducer of this round; ``None``: it computes the mean."""
        if self._rule is None:
            return None
        return Combiner(self._rule, sum(self._group.shares), self.norms, self._accuse)

    def is_needed_of(self, member: int) -> bool:
        """Whether a member has to announce the norms of its vector."""
        needs_norms = self._rule is not None and self._rule.needs_norms
        return needs_norms and self._group.modes[member] != AveragingMode.AUX

    def claim(self, own_index: int, norms: Sequence[float], sign: Callable[[bytes], bytes]) -> None:
        """Sign and record this member's own norms, which it is about to announce."""
        self.own = NormClaim.make(self._round_id, norms, sign)
        self.take_claim(own_index, *self.own)

    def take_claim(self, member: int, norms: Sequence[float], statement: bytes) -> None:
        """Record the norms that a member announces, if the rule needs them.

        Raises:
            ProtocolError: they are malformed, or the member has not signed them.
        """
        if not self.is_needed_of(member):
            return
        if len(norms) != len(self._peers) or statement[:_DIGEST_BYTES] != _digest(norms):
            raise ProtocolError(f"announced {len(norms)} norms for {len(self._peers)} members, or has not signed them")
        if not self.note(member, statement):
            raise ProtocolError("has not signed the norms that it announced")
        self.norms.setdefault(member, tuple(norms))

    def note(self, member: int, statement: bytes) -> bool:
        """Record a statement of a member, perhaps passed on by another; returns whether the member has signed it."""
        known = self._statements.get(member)
        if statement == known:
            return True
        public_key, digest = self._peers[member].public_key, statement[:_DIGEST_BYTES]
        signature = statement[_DIGEST_BYTES:]
        signed = _LABEL + self._round_id + digest
        is_own = len(signature) == _SIGNATURE_BYTES and public_key is not None
        if not is_own or public_key is None or not verify_signature(public_key, signature, signed):
            return False
        self._statements.setdefault(member, statement)
        if known is not None and known[:_DIGEST_BYTES] != digest and member not in self._proofs:
            self._proofs[member] = known, statement
            self._accuse(member, "has announced different norms of its vector to different members in one round")
        return True

    def report(self) -> list[bytes]:
        """The statement of each member; empty for a member that has sent none."""
        if not self._statements:
            return []
        return [self._statements.get(member, b"") for member in range(len(self._peers))]

    def take_report(self, statements: Sequence[bytes]) -> None:
        """Record the statements that another member has received. Those with a wrong signature are ignored."""
        for member, statement in enumerate(statements[: len(self._peers)]):
            if statement:
                self.note(member, statement)

    def show_proofs(self) -> tuple[list[int], list[bytes]]:
        """The members that have contradicted themselves, and two statements of each."""
        return [*self._proofs], [statement for pair in self._proofs.values() for statement in pair]

    def take_proofs(self, members: Sequence[int], statements: Sequence[bytes]) -> None:
        """Check the contradictions that another member reports. They count only if both statements are signed."""
        for member, one, other in zip(members, statements[::2], statements[1::2], strict=False):
            if member < len(self._peers):
                self.note(member, one)
                self.note(member, other)


class Combination(NamedTuple):
    """The work of averaging one part."""

    make: Callable[[], torch.Tensor | None]
    is_heavy: bool
    """It is too much for the event loop."""


class Combiner:
    """Combines the values of several members at one reducer.

    Args:
        rule: the group's rule.
        total_size: the number of values in the whole vector.
        norms: by member, the norm of each reducer's share; this member's own are included. More members may be added
            until the first part is averaged.
        accuse: called with a member that has sent more than it has announced.
    """

    def __init__(self, rule: Aggregation, total_size: int, norms: Mapping[int, Sequence[float]], accuse: Accuse):
        self._rule, self._total_size, self._norms, self._accuse = rule, total_size, norms, accuse
        self._factors: dict[int, float] | None = None
        # By sender and reducer: the norm of the parts that have arrived.
        self._arrived: dict[tuple[int, int], float] = {}
        self._accused: set[int] = set()

    def admits(self, sender: int, part: Part, values: torch.Tensor) -> bool:
        """Whether a part counts: its sender must not have sent more than it has announced."""
        if not self._rule.needs_norms:
            return True
        norm = norm_of(values)
        if not math.isfinite(norm):  # the reducer leaves such values out and reports them itself
            return True
        arrived = math.hypot(self._arrived.get((sender, part.reducer), 0.0), norm)
        self._arrived[sender, part.reducer] = arrived
        if arrived <= self._norms[sender][part.reducer] * TOLERANCE:
            return True
        if sender not in self._accused:
            self._accused.add(sender)
            told = self._norms[sender][part.reducer]
            self._accuse(sender, f"has sent values with a norm of at least {arrived:.6g}, but announced {told:.6g}")
        return False

    def combination(
        self, members: Sequence[int], values: Sequence[torch.Tensor], weights: Mapping[int, float], part: Part
    ) -> Combination:
        """The work that makes the average of a part. It may be done later, in another thread.

        Args:
            members: the members whose values are given, in order.
            values: one tensor of each of these members.
            weights: the weights of all members that have announced themselves.
        """
        weights = cut_to_others(weights, MOST_WITH_RULE)
        # Fixed at the first part: all parts of a round must be scaled alike.
        if self._factors is None:
            self._factors = self._find_factors(weights)
        own_weights = [weights[member] for member in members]
        factors = [self._factors.get(member, 1.0) for member in members]
        share = part.length / self._total_size
        return Combination(
            functools.partial(self._rule.aggregate, values, own_weights, factors, share),
            is_heavy=part.length * len(values) > HEAVY_VALUES,
        )

    def _find_factors(self, weights: Mapping[int, float]) -> dict[int, float]:
        if not self._rule.needs_norms:
            return {}
        members = [member for member in sorted(self._norms) if weights.get(member, 0.0) > 0]
        norms = [math.hypot(*self._norms[member]) for member in members]
        found = self._rule.factors(norms, [weights[member] for member in members])
        return dict(zip(members, found, strict=True))
