"""The rounds in which this peer took part, as far as they matter when somebody who stayed away comes back."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.optim.lineage import BEGINNING, LAST_ROUNDS, MAX_PARTINGS, ROUND_ID_BYTES, Lineage, Parting

PARTING_LIFETIME = 24 * 3600.0
"""Seconds for which a round is kept of which some members stay away."""
MAX_KEPT = 16
"""How many such rounds are kept at most: those of which the most is missing."""
ROUNDS_TO_BE_AWAY = 2
"""Who misses a single round is not away."""
ROUNDS_PER_ABSENT_PEER = 2
"""A peer may not have got the result of the last round that others believe it was in; then the one before counts."""


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
        self._inherited = lineage.partings
        """Partings of the donor, of which this peer knows nothing more."""
        self._taken_over_at, self._epoch_taken_over = now, epoch
        self._lone_steps = 0
        self._recent: deque[frozenset[bytes]] = deque(maxlen=ROUNDS_TO_BE_AWAY)
        """Other members of the latest rounds."""

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
