"""Which side of a run goes on when the run was split and each part has trained without the others.

Each peer keeps the ids of the latest rounds behind its parameters (:mod:`shoal.optim.history.round_history`) and sends
them with its progress. Two peers are *apart* if each has made rounds that the other lacks, and more of them than
parameter averaging is left to repair, or epochs so different that one would download the other's state anyway. A peer
whose rounds are all known to another one has merely fallen behind, and is not apart from it.

Peers that share rounds and are not apart form a *side*. One side goes on, and the peers of the others take over its
state; so it must have a peer that others can call. Of two such sides, that one goes on which has, in this order:

1. more weight in the last common round; without a common round, more hosts,
2. the higher epoch, if they differ by more than one,
3. the smaller id of its round after the common one; without a common round, of its latest round.

All of this follows from the records, so all peers that see the same records agree. What a peer says about a round costs
nothing, though: if two sides claim more of its weight together than there was, one of them lies, or both know the round
from a common donor. Then hosts are counted instead.

Until the losers have taken over the winners' state, the winners ignore the losers, and the losers ignore each other.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from shoal.averaging import RoundResult
from shoal.optim.history.round_history import BEGINNING, LAST_ROUNDS, WHOLE, ForkPoint, Lineage, RoundHistory
from shoal.optim.progress.records import Companion, LocalTrainingProgress

# A single step of its own may just be a round that failed.
MIN_STEPS_APART = 2
# Peers of one side are an epoch apart now and then, and so are two sides of the same speed: that decides nothing.
EPOCH_TOLERANCE = 1
# All pairs are compared. In a run of more pieces than this, the most frequent ones of each host are settled first.
MAX_VARIANTS = 64
# Others decide how often there is news, so it changes the verdict only after a pause of so many seconds for each pair:
# about twenty times as long as the comparison took.
_PAUSE_PER_PAIR = 1e-4
# Few pieces are compared at once.
_FEW_VARIANTS = 8


class PeerStanding(NamedTuple):
    """What is known of one peer."""

    peer: bytes
    epoch: int
    lineage: Lineage
    can_give: bool
    """Whether others can download its state."""


@dataclass(frozen=True)
class ForkChoice:
    """Which peers go on and which give way. Peers in neither set are newcomers, or have fallen behind."""

    winners: frozenset[bytes] = frozenset()
    losers: frozenset[bytes] = frozenset()
    epoch: int = 0
    """The epoch of the side that goes on."""
    common: bytes = BEGINNING
    """The last round that the winners have in common with another side, as far as both know."""


@dataclass
class _Variant:
    """Peers that tell the same epoch and the same rounds."""

    epoch: int
    lineage: Lineage
    peers: list[bytes]
    can_give: bool

    def __post_init__(self) -> None:
        self.known = {*self.lineage.rounds, *(parting.round_id for parting in self.lineage.partings)}


def _steps_without(mine: _Variant, other: _Variant) -> int:
    """How many of the latest rounds of ``mine`` the other one does not know."""
    for steps, round_id in enumerate(reversed(mine.lineage.rounds)):
        if round_id in other.known:
            return steps
    return len(mine.lineage.rounds)


class _Relation(Enum):
    KIN = 1
    BEHIND = 2
    """The other one has all rounds of the first one, and more."""
    AHEAD = 3
    APART = 4
    UNKNOWN = 5
    """They share no round, but have made only a few: perhaps the first rounds have failed."""


def _relation(one: _Variant, other: _Variant) -> _Relation:
    steps = _steps_without(one, other), _steps_without(other, one)
    # Averaging of parameters repairs smaller differences.
    is_long = max(steps) >= LAST_ROUNDS or abs(one.epoch - other.epoch) > EPOCH_TOLERANCE
    if is_long and min(steps) >= MIN_STEPS_APART:
        return _Relation.APART
    if steps == (len(one.lineage.rounds), len(other.lineage.rounds)):
        return _Relation.UNKNOWN
    if min(steps) >= MIN_STEPS_APART or max(steps) < MIN_STEPS_APART:
        return _Relation.KIN
    return _Relation.BEHIND if steps[0] < steps[1] else _Relation.AHEAD


class _Side:
    def __init__(self, variants: Sequence[_Variant], host_of: Callable[[bytes], Hashable]) -> None:
        self.hosts = len({host_of(peer) for variant in variants for peer in variant.peers})
        self.peers = sorted(peer for variant in variants for peer in variant.peers)
        self.epoch = max(variant.epoch for variant in variants)
        self.can_give = any(variant.can_give for variant in variants)
        self.last_id = min(variant.lineage.rounds[-1] for variant in variants)
        self.partings = [p for v in sorted(variants, key=_order) for p in reversed(v.lineage.partings)]
        """The partings of all its peers, the latest ones of each first."""

    def parting(self, round_id: bytes) -> ForkPoint:
        """What the side says about a round. Its peers may differ: the greatest share and the smallest next id count."""
        same = [parting for parting in self.partings if parting.round_id == round_id]
        return ForkPoint(round_id, max(p.kept for p in same), min(p.next_id for p in same))


def settle(
    standings: Iterable[PeerStanding],
    host_of: Callable[[bytes], Hashable] = bytes,
) -> ForkChoice:
    """Find the sides of a run, and the one that goes on.

    Args:
        standings: what is known of each peer that can be reached, in any order.
        host_of: the host of a peer; hosts are counted, because one machine can pretend to be any number of peers.

    Returns:
        The winners and the losers; both sets are empty if all train together.
    """
    sides = _sides(_variants(standings, host_of), host_of)
    if len(sides) < 2:
        return ForkChoice()
    # If nobody can give its state, one side must be chosen all the same.
    able = [side for side in sides if side.can_give] or sides
    winner = able[0]
    for side in able[1:]:
        winner = _better(winner, side)
    others = [side for side in sides if side is not winner]
    losers = frozenset(peer for side in others for peer in side.peers)
    common = _last_common_round(winner, others[0]) or BEGINNING
    return ForkChoice(frozenset(winner.peers), losers, winner.epoch, common)


def _order(variant: _Variant) -> bytes:
    return min(variant.peers)


def _variants(standings: Iterable[PeerStanding], host_of: Callable[[bytes], Hashable]) -> list[_Variant]:
    found: dict[tuple[int, Lineage], _Variant] = {}
    for peer, epoch, lineage, can_give in standings:
        if lineage.rounds:  # newcomers, which have none, are on no side
            variant = found.setdefault((epoch, lineage), _Variant(epoch, lineage, [], False))
            variant.peers.append(peer)
            variant.can_give = variant.can_give or can_give
    ranked = sorted(found.values(), key=lambda variant: (-len(variant.peers), _order(variant)))
    if len(ranked) > MAX_VARIANTS:  # the second one of a host comes after the first one of each host, and so on
        earlier, places = Counter[Hashable](), dict[int, int]()
        for variant in ranked:
            hosts = {*map(host_of, variant.peers)}
            places[id(variant)] = min(earlier[host] for host in hosts)
            earlier.update(hosts)
        ranked.sort(key=lambda variant: places[id(variant)])
    return sorted(ranked[:MAX_VARIANTS], key=_order)


def _sides(variants: Sequence[_Variant], host_of: Callable[[bytes], Hashable]) -> list[_Side]:
    """Group the peers that are apart from anybody into sides, in the order of their first peers."""
    # The usual case: all peers tell the same rounds.
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
    # A peer that is behind one side belongs to it; a peer that is behind several sides belongs to none.
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
    return sorted((_Side(each, host_of) for each in members.values()), key=lambda side: side.peers)


def _join(group: dict[int, int], one: int, other: int) -> None:
    old, new = max(group[one], group[other]), min(group[one], group[other])
    for index in group:
        group[index] = new if group[index] == old else group[index]


def _better(one: _Side, other: _Side) -> _Side:
    """Which of two sides goes on, by the rules in the module's docstring."""
    common = _last_common_round(one, other)
    first, second = _worth(one, other, common)
    if first != second:
        return one if first > second else other
    if common is not None:
        ours, theirs = one.parting(common), other.parting(common)
    if abs(one.epoch - other.epoch) > EPOCH_TOLERANCE:
        return one if one.epoch > other.epoch else other
    if common is not None and ours.next_id != theirs.next_id:
        return one if ours.next_id < theirs.next_id else other
    return one if one.last_id < other.last_id else other


def _worth(one: _Side, other: _Side, common: bytes | None) -> tuple[int, int]:
    """How much each of two sides counts: its weight in the last common round, or its number of hosts."""
    if common is None or common == BEGINNING:
        return one.hosts, other.hosts
    # Both shares are rounded, so together they may be one too large.
    claims = one.parting(common).kept, other.parting(common).kept
    return claims if sum(claims) <= WHOLE + 1 else (one.hosts, other.hosts)


def _last_common_round(one: _Side, other: _Side) -> bytes | None:
    """The last round after which both say that they parted; ``BEGINNING`` if that was before any round."""
    known = {parting.round_id for parting in other.partings}
    shared = [parting.round_id for parting in one.partings if parting.round_id in known]
    return next((round_id for round_id in shared if round_id != BEGINNING), BEGINNING if shared else None)


class ForkTracker:
    """This peer's rounds, and how they compare with those of others. Safe to use from any thread.

    Args:
        own: id of this peer.
        host_of: the host of a peer, see :func:`settle`.
    """

    def __init__(self, own: bytes, host_of: Callable[[bytes], Hashable] = bytes) -> None:
        self._own, self._host_of = own, host_of
        self._lock = threading.Lock()
        # ``None``: rounds are not compared, as in runs of several groups, where most peers share none.
        self._history: RoundHistory | None = None
        self._verdict = ForkChoice()
        self.changed = False
        """Whether there was news since the last verdict that may change it: to settle is too slow for every look."""
        # When the last verdict was found, and for how many seconds it holds whatever others say.
        self._settled_at, self._pause, self._own_epoch = -math.inf, 0.0, -1

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
        """This peer's rounds, packed, to tell another peer; ``None`` if it knows them or if rounds are not compared."""
        with self._lock:
            if self._history is None or peer in self._history.mates:
                return None
            return self._history.lineage(now).pack()

    @property
    def mates(self) -> frozenset[bytes]:
        """The other members of the latest round. They have the same rounds as this peer."""
        with self._lock:
            return frozenset() if self._history is None else self._history.mates

    def note_round(self, result: RoundResult | None, epoch: int, now: float) -> None:
        """This peer has applied another round to its parameters.

        Args:
            result: of the round; ``None`` if it failed or nobody else came.
            epoch: this peer's epoch after it.
        """
        with self._lock:
            if self._history is not None and result is not None:
                self._history.note_round(result.group_id, weights_of(result), epoch, now)
            elif self._history is not None:
                self._history.note_lone_step(epoch)
            self.changed, self._settled_at = True, -math.inf

    def note_repair(self, result: RoundResult) -> None:
        """Parameters were averaged: that makes up for earlier rounds of gradients that failed."""
        with self._lock:
            if self._history is not None:
                self._history.note_repair(frozenset(weights_of(result).keys() - {self._own}))
            self.changed, self._settled_at = True, -math.inf

    def adopt(self, lineage: Lineage, epoch: int, now: float) -> None:
        """This peer has taken over a state of this epoch, and with it the rounds behind it."""
        with self._lock:
            if self._history is not None:
                self._history.adopt(lineage, epoch, now)
            self.changed, self._settled_at = True, -math.inf

    def forget(self, peer: bytes) -> None:
        """A peer has said goodbye."""
        with self._lock:
            if self._history is not None:
                self._history.forget(peer)
            self.changed = True

    # --- others -------------------------------------------------------------------------------------------------------

    def verdict(self, own: LocalTrainingProgress, companions: Mapping[bytes, Companion], now: float) -> ForkChoice:
        """Which side goes on, if the run was split."""
        with self._lock:
            if self.changed and (own.epoch != self._own_epoch or not 0 <= now - self._settled_at < self._pause):
                self._verdict, self.changed = self._settle(own, companions, now), False
                self._settled_at, self._own_epoch = now, own.epoch
            return self._verdict

    def _settle(self, own: LocalTrainingProgress, companions: Mapping[bytes, Companion], now: float) -> ForkChoice:
        if self._history is None:
            return ForkChoice()
        lineage, mates, met_at = self._history.lineage(now), self._history.mates, self._history.met_at
        standings = [PeerStanding(self._own, own.epoch, lineage, not own.client_mode)]
        for peer, companion in companions.items():
            if companion.is_reachable(now):
                record, told = companion.record, companion.lineage
                # What a mate told before the common round is out of date: it has this peer's rounds now.
                if peer in mates and companion.lineage_time < met_at:
                    told = Lineage(lineage.rounds, told.partings)
                standings.append(PeerStanding(peer, record.epoch, told, not record.client_mode))
        variants = len({(standing.epoch, standing.lineage) for standing in standings})
        self._pause = 0.0 if variants <= _FEW_VARIANTS else _PAUSE_PER_PAIR * min(variants, MAX_VARIANTS) ** 2
        return settle(standings, self._host_of)

    def epochs_given_up(self, own_epoch: int) -> int:
        """For a peer that gives way: how many epochs it has trained since the last round common with the winners."""
        with self._lock:
            if self._history is None:
                return 0
            return max(0, own_epoch - self._history.epoch_after(self._verdict.common))


def weights_of(result: RoundResult) -> dict[bytes, float]:
    """The weights of the members that have parameters of their own and stayed to the end of the round."""
    left_out = {*result.failed_peers, *result.auxiliaries}
    members = zip(result.peers, result.weights, strict=True)
    return {peer.to_bytes(): weight for peer, weight in members if peer not in left_out}
