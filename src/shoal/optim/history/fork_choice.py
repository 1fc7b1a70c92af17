"""Which branch of a run survives when parts of it have trained without each other.

Each peer keeps a journal (:mod:`shoal.optim.history.journal`). Two peers are on different branches if each has entries
that the other lacks. A peer whose entries are all known to another has merely fallen behind. Of two branches the winner
is, in this order, the one with

1. a peer that others can call, because the losers take over its state,
2. more support,
3. more progress,
4. the smaller hash.

With :class:`~shoal.DiLoCo` the members of a round choose, from what each states before it (:func:`choose_version`).
Support is the number of members, and progress is samples.

With :class:`~shoal.Optimizer` each peer chooses, from the records of all (:func:`settle`). Support is weight in the
last common round; without a common round, hosts. Progress is the epoch. Averaging of parameters repairs small
differences, so a single round or a single epoch does not count. All peers that see the same records agree. Claims about
a round cost nothing, though. If two branches together claim more than the weight of the round, one of them lies, or
both know the round from a common donor. Then hosts are counted instead. Until the losers have taken over the winners'
state, the winners ignore the losers, and the losers ignore each other.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from shoal.averaging import RoundResult
from shoal.averaging.majorities import PEERS_PER_LIAR
from shoal.optim.history.journal import BEGINNING, LAST_ROUNDS, WHOLE, Entry, ForkPoint, Lineage, RoundHistory
from shoal.optim.history.window import EXACT, Relation, Window, relation
from shoal.optim.progress.records import Companion, LocalTrainingProgress

# A difference of one is tolerated. A step of its own may just be a failed round, and peers of one branch, or of two
# branches of the same speed, are sometimes an epoch apart.
TOLERANT = Window(1, 1)
# In groups of at most this many members, a single one can say that there is a version that no member has. Chosen: in
# larger groups, a single liar must not stop updates.
MOST_WHO_TRUST_ONE = 3
# All pairs of variants are compared, so their number is limited. Chosen: the most frequent ones of each host come
# first.
MAX_VARIANTS = 64
# Others decide how often there is news, so after a choice there is a pause of this many seconds for each pair. Chosen:
# about twenty times as long as the comparison takes.
_PAUSE_PER_PAIR = 1e-4
# Up to this many variants are compared without a pause. Chosen: that takes almost no time.
_FEW_VARIANTS = 8


class Claim(NamedTuple):
    """What one of two branches has to show."""

    support: int
    progress: int
    hash: tuple[bytes, ...]


class Branch(Protocol):
    """Peers that train one model."""

    can_give: bool
    """Whether others can download its state."""

    def claim_against(self, other: Any) -> Claim:
        """What it can show against another branch."""
        ...


AnyBranch = TypeVar("AnyBranch", bound=Branch)


def find_branches(relations: Mapping[tuple[int, int], Relation], members: Iterable[int]) -> list[set[int]]:
    """Group members into branches, in the order of their first members.

    A member that is behind one branch belongs to it. One that is behind several branches belongs to none.

    Args:
        relations: of each pair, the smaller number first.
    """
    group = {member: member for member in sorted(members)}
    pairs = [(pair, how) for pair, how in relations.items() if pair[0] in group and pair[1] in group]
    for (one, other), how in pairs:
        if how is Relation.WITH:
            _join(group, one, other)
    ahead: dict[int, set[int]] = {member: set() for member in group}
    for (one, other), how in pairs:
        if how is Relation.BEHIND:
            ahead[one].add(other)
        elif how is Relation.AHEAD:
            ahead[other].add(one)

    def ahead_of(member: int) -> set[int]:
        return {group[other] for other in ahead[member]} - {group[member]}

    for _ in range(len(group)):
        for member in group:
            if len(others := ahead_of(member)) == 1:
                _join(group, member, others.pop())
    torn = {group[member] for member in group if ahead_of(member)}
    found: dict[int, set[int]] = {}
    for member in group:
        if group[member] not in torn:
            found.setdefault(group[member], set()).add(member)
    return list(found.values())


def _join(group: dict[int, int], one: int, other: int) -> None:
    old, new = max(group[one], group[other]), min(group[one], group[other])
    for index in group:
        group[index] = new if group[index] == old else group[index]


def choose(branches: Sequence[AnyBranch], window: Window = EXACT) -> AnyBranch:
    """The branch that wins, by the rules in the module's docstring.

    Args:
        window: a difference of progress within it does not count.
    """
    # Even if no branch can give its state, one must be chosen.
    able = [branch for branch in branches if branch.can_give] or branches
    winner = able[0]
    for branch in able[1:]:
        winner = winner if _wins(winner.claim_against(branch), branch.claim_against(winner), window) else branch
    return winner


def _wins(one: Claim, other: Claim, window: Window) -> bool:
    if one.support != other.support:
        return one.support > other.support
    how = relation(one.progress, other.progress, window)
    return one.hash < other.hash if how is Relation.WITH else how is Relation.AHEAD


# --- the members of a round choose ------------------------------------------------------------------------------------


class VersionChoice(NamedTuple):
    """What the members of a round derive from all statements; the same at all of them."""

    base: Entry
    """The version that this round updates."""
    behind: Mapping[int, int]
    """By position of a member, how many updates it lacks to the base. Members that are missing here have lost."""


@dataclass
class _Members:
    """Members of a round that are of one branch."""

    members: set[int]
    newest: Entry
    samples: int
    can_give: bool

    def claim_against(self, _: _Members) -> Claim:
        return Claim(len(self.members), self.samples, (self.newest.hash,))


def compare(one: Sequence[Entry], other: Sequence[Entry]) -> Relation:
    """How a peer stands to another one, by their latest entries. Without a common entry they are on two branches."""
    known = {*other}
    common = next(
        (entry.version for entry in reversed(one) if entry in known), min(one[0].version, other[0].version) - 1
    )
    return relation(one[-1].version, other[-1].version, EXACT, common)


def choose_version(
    told: Mapping[int, Sequence[Entry]], heard: Mapping[int, Entry], clients: Collection[int] = ()
) -> VersionChoice | None:
    """Choose the version that a round updates.

    It is the newest version of the winning branch, so that no version is updated twice. With at least five members,
    more than a fifth of them must have that version, or have heard of it in a round, so that a few liars cannot lead
    the others to a version that does not exist. If members have heard of a newer version that none of them has, there
    is no update: all get that version first. With at least four members, two must have heard of it. A branch or version
    that only clients have is chosen last, because nobody could take it over.

    Args:
        told: the latest entries of members, by their positions.
        heard: for some members, the newest version that they have heard of and still lack.
        clients: positions of members from which nobody can download anything.

    Returns:
        ``None`` if no member has told anything.
    """
    numbers = sorted(told)
    pairs = [(one, other) for other in numbers for one in numbers if one < other]
    branches = [
        _Members(
            members,
            max((told[member][-1] for member in members), key=lambda entry: (entry.version, entry.hash)),
            max(told[member][-1].samples for member in members),
            bool(members.difference(clients)),
        )
        for members in find_branches({pair: compare(told[pair[0]], told[pair[1]]) for pair in pairs}, numbers)
    ]
    if not branches:
        return None
    winner = choose(branches)
    stragglers = {n for n in told if any(compare(told[n], told[m]) is Relation.BEHIND for m in winner.members)}
    winners = winner.members | stragglers
    holders = {entry: member for member in winners for entry in told[member]}

    def heard_of(member: int) -> set[Entry]:
        known = heard.get(member)
        if known not in holders:
            return {*told[member]}
        return {*told[member], *(entry for entry in told[holders[known]] if entry <= known)}

    votes = Counter(entry for member in winners for entry in heard_of(member))
    common = [entry for entry, count in votes.items() if count > len(winners) // PEERS_PER_LIAR]
    to_be_had = {entry for member in winners.difference(clients) for entry in told[member]}
    base = max([entry for entry in common if entry in to_be_had] or common or holders)
    newer = Counter(heard[member] for member in winners if member in heard)
    liars = max(len(winners) // PEERS_PER_LIAR, 1 if len(winners) > MOST_WHO_TRUST_ONE else 0)
    ahead = max((entry for entry, count in newer.items() if count > liars), default=base)
    if ahead.version > base.version:  # nobody here has it
        return VersionChoice(ahead, {n: max(1, ahead.version - told[n][-1].version) for n in sorted(winners)})
    known = {entry for member in winners if base in told[member] for entry in told[member] if entry <= base}
    return VersionChoice(base, {n: base.version - told[n][-1].version for n in sorted(winners) if told[n][-1] in known})


# --- each peer chooses ------------------------------------------------------------------------------------------------


class PeerStanding(NamedTuple):
    """What is known of one peer's place in the run."""

    peer: bytes
    epoch: int
    lineage: Lineage
    can_give: bool
    """Whether others can download its state."""


@dataclass(frozen=True)
class ForkChoice:
    """Which peers win and which give way. Peers in neither set are newcomers, or have fallen behind."""

    winners: frozenset[bytes] = frozenset()
    losers: frozenset[bytes] = frozenset()
    epoch: int = 0
    """The epoch of the winning branch."""
    common: bytes = BEGINNING
    """The last round that the winners have in common with another partition, as far as both know."""


@dataclass
class _Variant:
    """Peers that tell the same epoch and the same rounds."""

    epoch: int
    lineage: Lineage
    peers: list[bytes]
    can_give: bool

    def __post_init__(self) -> None:
        self.known = {*self.lineage.rounds, *(fork_point.round_id for fork_point in self.lineage.fork_points)}


def _steps_without(mine: _Variant, other: _Variant) -> int:
    """How many of the latest rounds of ``mine`` the other one does not know."""
    for steps, round_id in enumerate(reversed(mine.lineage.rounds)):
        if round_id in other.known:
            return steps
    return len(mine.lineage.rounds)


def _relation(one: _Variant, other: _Variant) -> tuple[Relation | None, bool]:
    """How peers stand to others, and whether they are apart by more than averaging of parameters repairs.

    ``None``: they share no round, but have made only a few. The first rounds may have failed.
    """
    lacks, extra = _steps_without(other, one), _steps_without(one, other)
    how = relation(extra, lacks, TOLERANT, 0)
    is_long = max(extra, lacks) >= LAST_ROUNDS or relation(one.epoch, other.epoch, TOLERANT) is not Relation.WITH
    if how is Relation.ELSEWHERE and is_long:
        return how, True
    if (extra, lacks) == (len(one.lineage.rounds), len(other.lineage.rounds)):
        return None, False
    return Relation.WITH if how is Relation.ELSEWHERE else how, False


class _Partition:
    def __init__(self, variants: Sequence[_Variant], host_of: Callable[[bytes], Hashable]) -> None:
        self.hosts = len({host_of(peer) for variant in variants for peer in variant.peers})
        self.peers = sorted(peer for variant in variants for peer in variant.peers)
        self.epoch = max(variant.epoch for variant in variants)
        self.can_give = any(variant.can_give for variant in variants)
        self.last_id = min(variant.lineage.rounds[-1] for variant in variants)
        self.fork_points = [p for v in sorted(variants, key=_order) for p in reversed(v.lineage.fork_points)]
        """The fork points of all its peers, the latest ones of each first."""

    def claim_against(self, other: _Partition) -> Claim:
        """Its weight in the last common round, or its hosts; its epoch; the ids of its next and latest round."""
        common = _last_common_round(self, other)
        if common is None:
            return Claim(self.hosts, self.epoch, (self.last_id,))
        ours, theirs = self.fork_point(common), other.fork_point(common)
        # Both shares are rounded, so together they may be one too large.
        is_true = common != BEGINNING and ours.kept + theirs.kept <= WHOLE + 1
        return Claim(ours.kept if is_true else self.hosts, self.epoch, (ours.next_id, self.last_id))

    def fork_point(self, round_id: bytes) -> ForkPoint:
        """What it says about a round. If its peers differ, the greatest share and the smallest next id count."""
        same = [fork_point for fork_point in self.fork_points if fork_point.round_id == round_id]
        return ForkPoint(round_id, max(p.kept for p in same), min(p.next_id for p in same))


def settle(
    standings: Iterable[PeerStanding],
    host_of: Callable[[bytes], Hashable] = bytes,
) -> ForkChoice:
    """Find the branches of a run, and the one that wins.

    Args:
        standings: what is known of each peer that can be reached, in any order.
        host_of: the host of a peer; hosts are counted, because one machine can pretend to be any number of peers.

    Returns:
        The winners and the losers; both sets are empty if all train together.
    """
    partitions = _partitions(_variants(standings, host_of), host_of)
    if len(partitions) < 2:
        return ForkChoice()
    winner = choose(partitions, TOLERANT)
    others = [partition for partition in partitions if partition is not winner]
    losers = frozenset(peer for partition in others for peer in partition.peers)
    common = _last_common_round(winner, others[0]) or BEGINNING
    return ForkChoice(frozenset(winner.peers), losers, winner.epoch, common)


def _order(variant: _Variant) -> bytes:
    return min(variant.peers)


def _variants(standings: Iterable[PeerStanding], host_of: Callable[[bytes], Hashable]) -> list[_Variant]:
    found: dict[tuple[int, Lineage], _Variant] = {}
    for peer, epoch, lineage, can_give in standings:
        if lineage.rounds:  # newcomers, which have none, are on no partition
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


def _partitions(variants: Sequence[_Variant], host_of: Callable[[bytes], Hashable]) -> list[_Partition]:
    """Group the peers that are apart from any others into partitions, in the order of their first peers."""
    # The usual case: all peers tell the same rounds.
    if len({variant.lineage.rounds for variant in variants}) < 2:
        return []
    pairs = [(i, j) for j in range(len(variants)) for i in range(j)]
    relations = {(i, j): _relation(variants[i], variants[j]) for i, j in pairs}
    apart = {index for pair, (_, is_apart) in relations.items() if is_apart for index in pair}
    found = find_branches({pair: how for pair, (how, _) in relations.items() if how is not None}, apart)
    partitions = [_Partition([variants[index] for index in sorted(members)], host_of) for members in found]
    return sorted(partitions, key=lambda partition: partition.peers)


def _last_common_round(one: _Partition, other: _Partition) -> bytes | None:
    """The last round after which both say that they forked; ``BEGINNING`` if that was before any round."""
    known = {fork_point.round_id for fork_point in other.fork_points}
    shared = [fork_point.round_id for fork_point in one.fork_points if fork_point.round_id in known]
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
        # ``None``: rounds are not compared, as in runs of several groups, in which most peers share none.
        self._history: RoundHistory | None = None
        self._verdict = ForkChoice()
        self.changed = False
        """Whether there was news since the last verdict that may change it. Settling is too slow for every look."""
        # When the last verdict was found, and for how many seconds no news from others changes it.
        self._settled_at, self._pause, self._own_epoch = -math.inf, 0.0, -1

    @property
    def has_begun(self) -> bool:
        """Whether rounds are compared."""
        return self._history is not None

    def begin(self) -> None:
        """Begin to compare rounds, because all peers should train one model."""
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
        """Parameters were averaged, which makes up for earlier failed rounds of gradients."""
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
        """Which branch wins, if the run was split."""
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
                # What a mate told before the common round is outdated: now it has this peer's rounds.
                if peer in mates and companion.lineage_time < met_at:
                    told = Lineage(lineage.rounds, told.fork_points)
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
