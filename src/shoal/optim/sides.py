"""Which of two sides goes on, when both halves of a run have trained without each other.

Two peers are *apart* if each has gone on without the other for some rounds: longer than parameter averaging is left to
repair, or so differently that one of them would download the other's state anyway. Who has merely fallen behind is not
apart from anybody: the rounds that it has are among those of the others.

Peers that share rounds and are not apart form a side. That side goes on whose peers had more weight in the last round
common to both; with equal weight, or nothing in common, the one at the higher epoch; else the one whose next round has
the smaller id. All of it follows from the records alone, whoever looks at them, so all who see the same records agree.

Each peer keeps the :class:`~shoal.optim.lineage.RoundHistory` of its parameters and tells it with its progress. To a
peer of the side that goes on the others do not exist until they have taken over its state; to one of theirs only that
side does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from shoal.averaging import RoundResult
from shoal.optim.lineage import BEGINNING, LAST_ROUNDS, Lineage, Parting, RoundHistory
from shoal.optim.progress import Companion, LocalTrainingProgress

# A single step alone is a round that failed.
MIN_STEPS_APART = 2
# Peers of one side differ by an epoch every now and then, and so do two sides that advance at the same pace.
EPOCH_TOLERANCE = 1
# If a run is in more pieces than this, the most frequent ones are settled first.
MAX_VARIANTS = 64


class Standing(NamedTuple):
    """What is known of one peer."""

    peer: bytes
    epoch: int
    lineage: Lineage
    can_give: bool
    """Others can download its state."""


@dataclass(frozen=True)
class Verdict:
    """What came of it. Peers that stand in neither set are newcomers or behind."""

    winners: frozenset[bytes] = frozenset()
    losers: frozenset[bytes] = frozenset()
    epoch: int = 0
    """Of the side that goes on."""
    common: bytes = BEGINNING
    """The last round that it has in common with another side, as far as both know."""


@dataclass
class _Variant:
    """Peers of which the same is known."""

    epoch: int
    lineage: Lineage
    peers: list[bytes]
    can_give: bool

    def __post_init__(self) -> None:
        self.known = {*self.lineage.rounds, *(parting.round_id for parting in self.lineage.partings)}


def _steps_without(mine: _Variant, other: _Variant) -> int:
    """How many of the latest rounds of one are unknown to the other."""
    for steps, round_id in enumerate(reversed(mine.lineage.rounds)):
        if round_id in other.known:
            return steps
    return len(mine.lineage.rounds)


class _Relation(Enum):
    KIN = 1
    BEHIND = 2
    """The other one has all that the first one has, and more."""
    AHEAD = 3
    APART = 4
    UNKNOWN = 5
    """Both have made but a few steps, without each other: the first rounds may have failed."""


def _relation(one: _Variant, other: _Variant) -> _Relation:
    steps = _steps_without(one, other), _steps_without(other, one)
    is_long = max(steps) >= LAST_ROUNDS or abs(one.epoch - other.epoch) > EPOCH_TOLERANCE
    if is_long and min(steps) >= MIN_STEPS_APART:
        return _Relation.APART
    if steps == (len(one.lineage.rounds), len(other.lineage.rounds)):
        return _Relation.UNKNOWN
    if min(steps) >= MIN_STEPS_APART or max(steps) < MIN_STEPS_APART:
        return _Relation.KIN
    return _Relation.BEHIND if steps[0] < steps[1] else _Relation.AHEAD


class _Side:
    def __init__(self, variants: Sequence[_Variant]) -> None:
        self.peers = sorted(peer for variant in variants for peer in variant.peers)
        self.epoch = max(variant.epoch for variant in variants)
        self.can_give = any(variant.can_give for variant in variants)
        self.last_id = min(variant.lineage.rounds[-1] for variant in variants)
        self.partings = [p for v in sorted(variants, key=_order) for p in reversed(v.lineage.partings)]
        """Of all its peers, the latest ones of each first."""

    def parting(self, round_id: bytes) -> Parting:
        """Its peers may have seen it differently: the greatest share, and the smallest next id."""
        same = [parting for parting in self.partings if parting.round_id == round_id]
        return Parting(round_id, max(p.kept for p in same), min(p.next_id for p in same))


def settle(standings: Iterable[Standing]) -> Verdict:
    """Find the sides of a run, and the one that goes on.

    Args:
        standings: of all peers that are there, in any order.

    Returns:
        Empty sets if all train together.
    """
    sides = _sides(_variants(standings))
    if len(sides) < 2:
        return Verdict()
    able = [side for side in sides if side.can_give] or sides
    winner = able[0]
    for side in able[1:]:
        winner = _better(winner, side)
    others = [side for side in sides if side is not winner]
    losers = frozenset(peer for side in others for peer in side.peers)
    common = _last_common_round(winner, others[0]) or BEGINNING
    return Verdict(frozenset(winner.peers), losers, winner.epoch, common)


def _order(variant: _Variant) -> bytes:
    return min(variant.peers)


def _variants(standings: Iterable[Standing]) -> list[_Variant]:
    found: dict[tuple[int, Lineage], _Variant] = {}
    for peer, epoch, lineage, can_give in standings:
        if lineage.rounds:
            variant = found.setdefault((epoch, lineage), _Variant(epoch, lineage, [], False))
            variant.peers.append(peer)
            variant.can_give = variant.can_give or can_give
    ranked = sorted(found.values(), key=lambda variant: (-len(variant.peers), _order(variant)))
    return sorted(ranked[:MAX_VARIANTS], key=_order)


def _sides(variants: Sequence[_Variant]) -> list[_Side]:
    """Groups of kin, of all peers that are apart from anybody; in the order of their first peers."""
    if len({variant.lineage.rounds for variant in variants}) < 2:
        return []
    pairs = [(i, j) for j in range(len(variants)) for i in range(j)]
    relations = {(i, j): _relation(variants[i], variants[j]) for i, j in pairs}
    concerned = sorted({index for pair in pairs if relations[pair] is _Relation.APART for index in pair})
    group = {index: index for index in concerned}
    for i, j in pairs:
        if i in group and j in group and relations[i, j] is _Relation.KIN:
            _join(group, i, j)
    ahead: dict[int, set[int]] = {index: set() for index in concerned}
    for (i, j), relation in relations.items():
        if i in group and j in group and relation in (_Relation.BEHIND, _Relation.AHEAD):
            behind, before = (i, j) if relation is _Relation.BEHIND else (j, i)
            ahead[behind].add(before)
    # A peer behind one side belongs to it; a peer behind several of them belongs to none.
    for _ in concerned:
        for index in concerned:
            others = {group[other] for other in ahead[index]} - {group[index]}
            if len(others) == 1:
                _join(group, index, others.pop())
    torn = {group[index] for index in concerned if {group[other] for other in ahead[index]} - {group[index]}}
    concerned = [index for index in concerned if group[index] not in torn]
    members: dict[int, list[_Variant]] = {}
    for index in concerned:
        members.setdefault(group[index], []).append(variants[index])
    return sorted((_Side(each) for each in members.values()), key=lambda side: side.peers)


def _join(group: dict[int, int], one: int, other: int) -> None:
    old, new = max(group[one], group[other]), min(group[one], group[other])
    for index in group:
        group[index] = new if group[index] == old else group[index]


def _better(one: _Side, other: _Side) -> _Side:
    """The one of two sides that goes on."""
    common = _last_common_round(one, other)
    if common is not None:
        ours, theirs = one.parting(common), other.parting(common)
        if ours.kept != theirs.kept:
            return one if ours.kept > theirs.kept else other
    if abs(one.epoch - other.epoch) > EPOCH_TOLERANCE:
        return one if one.epoch > other.epoch else other
    if common is not None and ours.next_id != theirs.next_id:
        return one if ours.next_id < theirs.next_id else other
    return one if one.last_id < other.last_id else other


def _last_common_round(one: _Side, other: _Side) -> bytes | None:
    """The last round, or the beginning, after which both know of having gone different ways."""
    known = {parting.round_id for parting in other.partings}
    shared = [parting.round_id for parting in one.partings if parting.round_id in known]
    return next((round_id for round_id in shared if round_id != BEGINNING), BEGINNING if shared else None)


class Kinship:
    """This peer's rounds, and how they compare with those of others. Safe to use from any thread.

    Args:
        own: this peer.
    """

    def __init__(self, own: bytes) -> None:
        self._own = own
        self._lock = threading.Lock()
        # ``None``: it does not matter what peers have in common.
        self._history: RoundHistory | None = None
        self._verdict = Verdict()
        self.changed = False
        """Something has been told since the last verdict that may lead to another one."""

    @property
    def has_begun(self) -> bool:
        """Whether rounds are compared."""
        return self._history is not None

    def begin(self) -> None:
        """From now on rounds are compared: all peers should train one model."""
        with self._lock:
            self._history = RoundHistory(self._own)

    # --- own rounds ---------------------------------------------------------------------------------------------------

    def lineage(self, now: float) -> Lineage:
        """The rounds behind this peer's parameters."""
        with self._lock:
            return Lineage() if self._history is None else self._history.lineage(now)

    def news_for(self, peer: bytes, now: float) -> bytes | None:
        """What a peer should be told of this peer's rounds; ``None`` if it knows them, or if they do not matter."""
        with self._lock:
            if self._history is None or peer in self._history.mates:
                return None
            return self._history.lineage(now).pack()

    @property
    def mates(self) -> frozenset[bytes]:
        """Other members of the latest round: they have the same rounds as this peer."""
        with self._lock:
            return frozenset() if self._history is None else self._history.mates

    def note_round(self, result: RoundResult | None, epoch: int, now: float) -> None:
        """This peer's parameters contain another round.

        Args:
            result: what came of it; ``None``: it has failed, or there was nobody else.
            epoch: to which it leads.
        """
        with self._lock:
            if self._history is not None and result is not None:
                self._history.note_round(result.group_id, weights_of(result), epoch, now)
            elif self._history is not None:
                self._history.note_lone_step(epoch)
            self.changed = True

    def note_repair(self, result: RoundResult) -> None:
        """Parameters were averaged, which makes up for earlier rounds of gradients that failed."""
        with self._lock:
            if self._history is not None:
                self._history.note_repair(frozenset(weights_of(result).keys() - {self._own}))
            self.changed = True

    def adopt(self, lineage: Lineage, epoch: int, now: float) -> None:
        """This peer has taken over a state of this epoch, and with it the rounds behind it."""
        with self._lock:
            if self._history is not None:
                self._history.adopt(lineage, epoch, now)
            self.changed = True

    def forget(self, peer: bytes) -> None:
        """A peer has said goodbye."""
        with self._lock:
            if self._history is not None:
                self._history.forget(peer)
            self.changed = True

    # --- others -------------------------------------------------------------------------------------------------------

    def verdict(self, own: LocalTrainingProgress, companions: Mapping[bytes, Companion], now: float) -> Verdict:
        """Which side goes on, if the run has come apart."""
        with self._lock:
            if self.changed:
                self._verdict, self.changed = self._settle(own, companions, now), False
            return self._verdict

    def _settle(self, own: LocalTrainingProgress, companions: Mapping[bytes, Companion], now: float) -> Verdict:
        if self._history is None:
            return Verdict()
        lineage, mates, met_at = self._history.lineage(now), self._history.mates, self._history.met_at
        standings = [Standing(self._own, own.epoch, lineage, not own.client_mode)]
        for peer, companion in companions.items():
            if companion.is_reachable(now):
                record, told = companion.record, companion.lineage
                # That was before the common round.
                if peer in mates and companion.lineage_time < met_at:
                    told = Lineage(lineage.rounds, told.partings)
                standings.append(Standing(peer, record.epoch, told, not record.client_mode))
        return settle(standings)

    def epochs_given_up(self, own_epoch: int) -> int:
        """Of a peer that stands on another side than the one that goes on: how much it has trained without that."""
        with self._lock:
            if self._history is None:
                return 0
            return max(0, own_epoch - self._history.epoch_after(self._verdict.common))


def weights_of(result: RoundResult) -> dict[bytes, float]:
    """Of those who have parameters of their own and were in it to the end."""
    left_out = {*result.failed_peers, *result.auxiliaries}
    members = zip(result.peers, result.weights, strict=True)
    return {peer.to_bytes(): weight for peer, weight in members if peer not in left_out}
