"""The rounds behind a peer's parameters: enough to see whether two peers train the same model.

Members of a round name it by the same few bytes. Peers that train together share their latest rounds; a newcomer takes
over those of its donor with the state. When some members of a round stay away, it is kept as a *parting*: the others
may have gone on without this peer just as it does without them, and then that round is the last they had in common.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# A name that two rounds share by chance makes two sides of a run look like one, until the next round.
ROUND_ID_BYTES = 4
# How many rounds a peer tells. Who shares none of them trains another model.
LAST_ROUNDS = 8

MAX_PARTINGS = 4
# Stands for the time before the first round. Runs that were never one have nothing else in common.
BEGINNING = bytes(ROUND_ID_BYTES)

_PARTING = struct.Struct(f">{ROUND_ID_BYTES}sH{ROUND_ID_BYTES}s")
_WHOLE = 2**16 - 1
MAX_LINEAGE_BYTES = 1 + LAST_ROUNDS * ROUND_ID_BYTES + (1 + MAX_PARTINGS) * _PARTING.size


class Parting(NamedTuple):
    """A round of which some members have stayed away since."""

    round_id: bytes
    kept: int
    """The weight that those who are still here had in it, in 1/65535 of the whole."""
    next_id: bytes
    """This peer's next round, without them: the same for all who went on with it, and for nobody else."""

    @classmethod
    def of(cls, round_id: bytes, share: float, next_id: bytes) -> Parting:
        """Args: share of the weight that is still here, from 0 to 1."""
        return cls(round_id, round(max(0.0, min(1.0, share)) * _WHOLE), next_id)


@dataclass(frozen=True)
class Lineage:
    """The rounds behind a peer's parameters, the oldest one first. Empty: a newcomer without any."""

    rounds: tuple[bytes, ...] = ()
    partings: tuple[Parting, ...] = ()

    def pack(self) -> bytes:
        """As few bytes as possible, for the records of progress."""
        if not self.rounds:
            return b""
        partings = b"".join(_PARTING.pack(*parting) for parting in self.partings)
        return bytes([len(self.rounds)]) + b"".join(self.rounds) + partings

    @classmethod
    def unpack(cls, packed: bytes) -> Lineage:
        """What :meth:`pack` gave.

        Raises:
            ValueError: it is something else.
        """
        if not packed:
            return cls()
        count, end = packed[0], 1 + packed[0] * ROUND_ID_BYTES
        is_whole = end <= len(packed) <= MAX_LINEAGE_BYTES and (len(packed) - end) % _PARTING.size == 0
        if not 1 <= count <= LAST_ROUNDS or not is_whole:
            raise ValueError(f"{len(packed)} bytes are no list of rounds")
        rounds = tuple(packed[start : start + ROUND_ID_BYTES] for start in range(1, end, ROUND_ID_BYTES))
        return cls(rounds, tuple(Parting(*fields) for fields in _PARTING.iter_unpack(packed[end:])))


# Seconds for which a round is kept of which some members stay away.
PARTING_LIFETIME = 24 * 3600.0
# How many such rounds are kept at most: those of which the most is missing.
MAX_KEPT = 16
# A peer that misses a single round is not away.
ROUNDS_TO_BE_AWAY = 2
# A peer may not have got the result of the last round that others believe it was in; then the one before counts.
ROUNDS_PER_ABSENT_PEER = 2


@dataclass
class _Past:
    """A round with others."""

    round_id: bytes
    weights: dict[bytes, float]
    """Of all members but those that have left politely since."""
    total: float
    epoch: int
    """To which it led."""
    ended_at: float
    number: int
    """Of all rounds that are noted here."""
    next_id: bytes | None = None

    def share_of(self, peers: set[bytes]) -> float:
        """Of the weight of all, from 0 to 1."""
        return sum(w for peer, w in self.weights.items() if peer in peers) / self.total if self.total > 0 else 0.0


class RoundHistory:
    """Takes note of rounds, and says what there is to tell of them. Times are DHT times.

    Args:
        own: this peer.
    """

    def __init__(self, own: bytes) -> None:
        self._own = own
        self.adopt(Lineage(), epoch=0, now=0.0)

    def adopt(self, lineage: Lineage, epoch: int, now: float) -> None:
        """This peer has taken over a state, and with it the rounds that led there.

        Args:
            epoch: of the state.
        """
        self._last: deque[bytes] = deque(lineage.rounds, maxlen=LAST_ROUNDS)
        self._past: list[_Past] = []
        self._rounds_noted = 0
        # Partings of the donor, of which this peer knows nothing more.
        self._inherited = lineage.partings
        self._taken_over_at, self._epoch_taken_over = now, epoch
        self._lone_steps = 0
        # Other members of the latest rounds.
        self._recent: deque[frozenset[bytes]] = deque(maxlen=ROUNDS_TO_BE_AWAY)

    @property
    def mates(self) -> frozenset[bytes]:
        """Other members of the latest round; nobody if it failed."""
        return self._recent[-1] if self._recent else frozenset()

    @property
    def met_at(self) -> float:
        """When the latest round with others ended."""
        return self._past[-1].ended_at if self._past else -math.inf

    def note_round(self, group_id: bytes, weights: Mapping[bytes, float], epoch: int, now: float) -> None:
        """This peer's parameters contain a round.

        Args:
            group_id: names it, the same way at all members.
            weights: of this peer and the other members.
            epoch: to which it leads.
        """
        if not weights.keys() - {self._own}:
            self.note_lone_step(epoch)
            return
        self._append(group_id[:ROUND_ID_BYTES], frozenset(weights.keys() - {self._own}))
        self._lone_steps = 0
        self._rounds_noted += 1
        total = sum(weights.values())
        self._past.append(_Past(self._last[-1], dict(weights), total, epoch, now, self._rounds_noted))
        self._prune(now)

    def note_lone_step(self, epoch: int) -> None:
        """This peer has made a step without anybody else: nobody was there, or the round has failed."""
        before = self._last[-1] if self._last else b""
        name = hashlib.blake2b(self._own + before + epoch.to_bytes(8, "big"), digest_size=ROUND_ID_BYTES)
        self._append(name.digest(), frozenset())
        self._lone_steps += 1

    def _append(self, round_id: bytes, others: frozenset[bytes]) -> None:
        if not self._last and not self._inherited:
            self._inherited = (Parting(BEGINNING, 0, round_id),)
        if self._past and self._past[-1].next_id is None:
            self._past[-1].next_id = round_id
        self._last.append(round_id)
        self._recent.append(others)

    def note_repair(self, others: frozenset[bytes]) -> None:
        """Parameters were averaged with these peers: what this peer did alone is part of the common model now."""
        if not self._lone_steps or not others:
            return
        for _ in range(min(self._lone_steps, len(self._last))):
            self._last.pop()
        self._lone_steps = 0
        if self._past:
            self._past[-1].next_id = None
        self._recent.clear()
        self._recent.append(others)

    def forget(self, peer: bytes) -> None:
        """A peer has said goodbye: it is not away."""
        for past in self._past:
            past.weights.pop(peer, None)

    def epoch_after(self, round_id: bytes) -> int:
        """To which epoch a round led; if it is not known here, the epoch at which this peer took over its state."""
        return next((past.epoch for past in self._past if past.round_id == round_id), self._epoch_taken_over)

    def lineage(self, now: float) -> Lineage:
        """What to tell of these rounds."""
        here, absent = self._here(), self._absent()
        parted = [past for past in self._parted(absent, now) if past.next_id is not None][-MAX_PARTINGS:]
        parted.sort(key=lambda past: past.number)
        own = [Parting.of(past.round_id, past.share_of(here), past.next_id or b"") for past in parted]
        beginning = [parting for parting in self._inherited if parting.round_id == BEGINNING]
        others = [parting for parting in self._inherited if parting.round_id != BEGINNING]
        if now - self._taken_over_at > PARTING_LIFETIME:
            others = []
        room = MAX_PARTINGS - len(own)
        return Lineage(tuple(self._last), (*beginning[:1], *others[max(0, len(others) - room) :], *own))

    def _here(self) -> set[bytes]:
        return {self._own}.union(*self._recent)

    def _absent(self) -> set[bytes]:
        if len(self._recent) < ROUNDS_TO_BE_AWAY:
            return set()
        here = self._here()
        return {peer for past in self._past for peer in past.weights if peer not in here}

    def _parted(self, absent: set[bytes], now: float) -> list[_Past]:
        """The last rounds with those who are away, ordered by how much is away, the most at the end."""
        found: list[_Past] = []
        counts: Counter[bytes] = Counter()
        for past in reversed(self._past):
            due = [peer for peer in absent & past.weights.keys() if counts[peer] < ROUNDS_PER_ABSENT_PEER]
            counts.update(due)
            if due and now - past.ended_at <= PARTING_LIFETIME:
                found.append(past)
        return sorted(found, key=lambda past: (past.share_of(absent), past.number))

    def _prune(self, now: float) -> None:
        wanted = {id(past) for past in self._parted(self._absent(), now)[-MAX_KEPT:]}
        self._past = [past for past in self._past if past.round_id in self._last or id(past) in wanted]


class LineageKeeper(Protocol):
    """Knows the rounds behind the parameters, which newcomers take over with them."""

    @property
    def lineage(self) -> Lineage: ...

    @property
    def global_epoch(self) -> int: ...

    def adopt_lineage(self, lineage: Lineage, epoch: int) -> None: ...
