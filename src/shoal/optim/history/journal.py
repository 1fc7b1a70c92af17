"""The journal of a peer: the latest versions of what it trains, and the rounds that made them.

Both optimizers have one. Its entries show whether two peers train the same model: of two peers of one *branch*, one has
the newest entry of the other. With :class:`~shoal.DiLoCo`, whose updates are small, the journal keeps the newest
updates too. A peer that has missed some downloads them and makes them itself, in order.
:mod:`shoal.optim.history.fork_choice` decides which branch wins after a fork.

:class:`RoundHistory` is the journal of :class:`~shoal.Optimizer`, with the members of each round. All members of a
round name it by the same few bytes. With their progress they tell the names of their latest rounds (:class:`Lineage`).
A newcomer takes over the rounds of its donor together with the state. A round is a *fork point* if some of its members
have stayed away since. If they have continued without this peer, it is the last round that both sides share.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import torch

from shoal.base.logs import words_of
from shoal.compression.base import bytes_of

# The size of hashes of entries. Chosen: nobody can find two rounds with the same hash.
HASH_BYTES = 16
# The most entries in a message. Chosen: bounds its size, and peers that train together differ by a few.
MOST_ENTRIES = 64
MOST = 2**62
"""The largest version and number of samples that others can claim. Chosen: it fits the integers of messages."""
# Bytes of updates that are kept for each byte of the vector. Chosen: usually as much as the outer parameters and their
# momentum take; more while a newcomer downloads them.
USUAL_SHARE, SHARE_FOR_NEWCOMERS = 2, 8

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class Entry(NamedTuple):
    """One version of what a peer trains."""

    version: Count
    hash: Hash
    """Names the round that made it; with :class:`~shoal.DiLoCo`, also all rounds before."""
    samples: Count
    """Samples of all rounds up to this one."""

    def followed_by(self, round_id: bytes, samples: int) -> Entry:
        """The next entry of a chain.

        Args:
            round_id: names the round, and the members whose messages are in its result. So the two sides of a round
                that was split are on different branches.
            samples: samples of the round.
        """
        return Entry(self.version + 1, hash_of(self.hash, round_id), min(MOST, self.samples + samples))


_Entries = Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1, max_length=MOST_ENTRIES)]


class Update(NamedTuple):
    """The update that leads to an entry, for peers that make it later."""

    version: int
    """The version of the entry."""
    after: bytes
    """The hash of the entry before."""
    round_id: bytes
    samples: int
    tensors: tuple[torch.Tensor, ...]
    """The mean, see :func:`~shoal.optim.diloco.messages.packed`."""
    names: bytes = b""
    """Names of the members whose messages counted, see :func:`~shoal.optim.diloco.messages.who_counted`."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def hash_of(*data: bytes | memoryview) -> bytes:
    """A short hash of these bytes, concatenated."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for each in data:
        digest.update(each)
    return digest.digest()


def parse_entries(value: object) -> tuple[Entry, ...]:
    """Check entries that another peer has told.

    Raises:
        ValueError: they are malformed.
    """
    try:
        entries: tuple[Entry, ...] = msgspec.convert(value, _Entries)
    except msgspec.ValidationError as e:
        raise ValueError(f"no list of 1 to {MOST_ENTRIES} versions: {words_of(e)}") from e
    versions = [entry.version for entry in entries]
    if versions != list(range(versions[0], versions[0] + len(entries))):
        raise ValueError(f"versions must follow each other: {versions}")
    return entries


class Journal:
    """The latest entries, with the updates behind the newest ones if they are known.

    Updates that arrive out of order wait in an inbox. Not thread-safe: its owner locks it.

    Args:
        entries: the latest ones, in order.
        length: how many are kept.
        nbytes: bytes of the vector that updates change; decides how many updates are kept.
    """

    def __init__(self, entries: Iterable[Entry], length: int, nbytes: int = 0) -> None:
        self._entries = deque(entries, maxlen=min(length, MOST_ENTRIES))
        self._nbytes = nbytes
        # Consecutive, up to the newest entry.
        self._updates: deque[Update] = deque()
        # By version.
        self._inbox: dict[int, Update] = {}
        self.serves_newcomers = False
        """Whether peers are downloading this peer's state. They will want the updates that follow."""

    @classmethod
    def begin(cls, values: torch.Tensor, length: int) -> Journal:
        """The journal of parameters that have not been updated."""
        return cls([Entry(0, hash_of(bytes_of(values)), 0)], length, values.nbytes)

    @property
    def newest(self) -> Entry:
        return self._entries[-1]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The latest entries, in order."""
        return tuple(self._entries)

    def dump(self) -> list[list[Any]]:
        """The entries as plain values."""
        return [list(entry) for entry in self._entries]

    def append(self, entry: Entry, update: Update | None = None) -> None:
        """Note a round, with its update if others may ask for that."""
        self._entries.append(entry)
        if update is None:
            self._updates.clear()
            return
        if self._updates and self._updates[-1].version != update.version - 1:
            self._updates.clear()
        self._updates.append(update)
        share = SHARE_FOR_NEWCOMERS if self.serves_newcomers else USUAL_SHARE
        while len(self._updates) > 1 and sum(each.nbytes for each in self._updates) > share * self._nbytes:
            self._updates.popleft()

    def take_back(self, count: int) -> None:
        """Forget the newest entries, which others do not have: their result is now part of another entry."""
        for _ in range(min(count, len(self._entries))):
            self._entries.pop()

    def adopt(self, entries: Iterable[Entry], *, keep_inbox: bool = False) -> None:
        """Continue from a state with these entries."""
        self._entries = deque(entries, maxlen=self._entries.maxlen)
        self._updates.clear()
        if not keep_inbox:
            self._inbox.clear()

    # --- updates ------------------------------------------------------------------------------------------------------

    def since(self, version: int) -> list[Update]:
        """All updates after this version; none if the first of them is no longer kept."""
        found = [each for each in self._updates if each.version > version]
        return found if found and found[0].version == version + 1 else []

    def receive(self, updates: Iterable[Update], most: int | None = None) -> None:
        """Put updates into the inbox. If it has more than ``most``, the oldest ones are dropped."""
        self._inbox.update((each.version, each) for each in updates)
        if most is not None:
            for version in sorted(self._inbox)[:-most]:
                del self._inbox[version]

    def continues(self, update: Update) -> bool:
        """Whether an update continues the newest entry."""
        return update.version == self.newest.version + 1 and update.after == self.newest.hash

    def take_next(self) -> Update | None:
        """Take the update that continues the newest entry out of the inbox; ``None`` if there is none."""
        following = self._inbox.pop(self.newest.version + 1, None)
        if following is not None and self.continues(following):
            return following
        self._inbox = {version: each for version, each in self._inbox.items() if version > self.newest.version}
        return None


# --- rounds with their members ----------------------------------------------------------------------------------------

# Chosen: short, because names of rounds are sent with each record. If two rounds have the same name by chance, two
# sides look like one until the next round.
ROUND_ID_BYTES = 4
# How many of its latest rounds a peer tells. Chosen: a peer that shares none of them trains another model.
LAST_ROUNDS = 8
# The most fork points that a peer tells. Chosen: they are sent with each record.
MAX_FORK_POINTS = 4
# The name of the beginning, before the first round. Two runs that never met have only this in common.
BEGINNING = bytes(ROUND_ID_BYTES)

_FORK_POINT = struct.Struct(f">{ROUND_ID_BYTES}sH{ROUND_ID_BYTES}s")
# Shares of weight are sent as 16-bit integers: this is the whole.
WHOLE = 2**16 - 1
MAX_LINEAGE_BYTES = 1 + LAST_ROUNDS * ROUND_ID_BYTES + (1 + MAX_FORK_POINTS) * _FORK_POINT.size


class ForkPoint(NamedTuple):
    """A round some of whose members have stayed away since."""

    round_id: bytes
    kept: int
    """The weight of its members that are still here, in 1/65535 of the whole."""
    next_id: bytes
    """The next round, without those members. All peers that continued together have the same one, and no others."""

    @classmethod
    def of(cls, round_id: bytes, share: float, next_id: bytes) -> ForkPoint:
        """Args: the share of the weight that is still here, from 0 to 1."""
        return cls(round_id, round(max(0.0, min(1.0, share)) * WHOLE), next_id)


@dataclass(frozen=True)
class Lineage:
    """The rounds behind a peer's parameters, the oldest first. A newcomer without a state has none."""

    rounds: tuple[bytes, ...] = ()
    fork_points: tuple[ForkPoint, ...] = ()

    def pack(self) -> bytes:
        """Encode it in few bytes, for the records of progress."""
        if not self.rounds:
            return b""
        fork_points = b"".join(_FORK_POINT.pack(*fork_point) for fork_point in self.fork_points)
        return bytes([len(self.rounds)]) + b"".join(self.rounds) + fork_points

    @classmethod
    def unpack(cls, packed: bytes) -> Lineage:
        """Decode the bytes that :meth:`pack` gave.

        Raises:
            ValueError: they are malformed.
        """
        if not packed:
            return cls()
        count, end = packed[0], 1 + packed[0] * ROUND_ID_BYTES
        is_whole = end <= len(packed) <= MAX_LINEAGE_BYTES and (len(packed) - end) % _FORK_POINT.size == 0
        if not 1 <= count <= LAST_ROUNDS or not is_whole:
            raise ValueError(f"{len(packed)} bytes are no list of rounds")
        rounds = tuple(packed[start : start + ROUND_ID_BYTES] for start in range(1, end, ROUND_ID_BYTES))
        return cls(rounds, tuple(ForkPoint(*fields) for fields in _FORK_POINT.iter_unpack(packed[end:])))


# Seconds for which a round is kept while some of its members stay away. Chosen: a day covers most outages.
FORK_POINT_LIFETIME = 24 * 3600.0
# The most such rounds that are kept: those in which the absent members had the most weight. Chosen: bounds memory.
MAX_KEPT = 16
# A peer counts as away after it has missed this many rounds. Chosen: missing a single one is common.
ROUNDS_TO_BE_AWAY = 2
# How many rounds are kept for each absent peer. Chosen: it may not have received the result of the last one that others
# believe it was in; then the one before is the last common round.
ROUNDS_PER_ABSENT_PEER = 2


@dataclass
class _Past:
    """A round with others."""

    round_id: bytes
    weights: dict[bytes, float]
    """The weight of each member, except members that have said goodbye since."""
    total: float
    """The weight of all members."""
    epoch: int
    """The epoch that it led to."""
    ended_at: float
    """DHT time."""
    number: int
    """Rounds are numbered in the order in which they were noted."""
    next_id: bytes | None = None
    """The round after it; ``None`` if there is none yet."""

    def share_of(self, peers: set[bytes]) -> float:
        """The share of the whole weight that these peers had, from 0 to 1."""
        return sum(w for peer, w in self.weights.items() if peer in peers) / self.total if self.total > 0 else 0.0


class RoundHistory:
    """Keeps this peer's rounds, and makes the :class:`Lineage` that others are told. Times are DHT times.

    Args:
        own: id of this peer.
    """

    def __init__(self, own: bytes) -> None:
        self._own = own
        self.adopt(Lineage(), epoch=0, now=0.0)

    def adopt(self, lineage: Lineage, epoch: int, now: float) -> None:
        """This peer has taken over a state, and with it the rounds behind that state.

        Args:
            lineage: the rounds, as the donor tells them.
            epoch: the epoch of the state.
            now: DHT time.
        """
        first = epoch - len(lineage.rounds) + 1
        self._journal = Journal((Entry(first + n, each, 0) for n, each in enumerate(lineage.rounds)), LAST_ROUNDS)
        self.past: list[_Past] = []
        """Earlier rounds that this peer was in, the oldest first."""
        self._rounds_noted = 0
        # The donor's fork points. This peer was not in those rounds, so it passes them on as they are.
        self._inherited = lineage.fork_points
        self._taken_over_at, self._epoch_taken_over = now, epoch
        self._lone_steps = 0
        # The other members of each of the latest rounds.
        self._recent: deque[frozenset[bytes]] = deque(maxlen=ROUNDS_TO_BE_AWAY)

    @property
    def mates(self) -> frozenset[bytes]:
        """The other members of the latest round; empty if it failed."""
        return self._recent[-1] if self._recent else frozenset()

    @property
    def met_at(self) -> float:
        """DHT time at which the latest round with others ended."""
        return self.past[-1].ended_at if self.past else -math.inf

    def note_round(self, group_id: bytes, weights: Mapping[bytes, float], epoch: int, now: float) -> None:
        """This peer has applied a round to its parameters.

        Args:
            group_id: names the round, the same way at all members.
            weights: the weights of this peer and the other members.
            epoch: the epoch that it leads to.
            now: DHT time.
        """
        if not weights.keys() - {self._own}:
            self.note_lone_step(epoch)
            return
        total, round_id = sum(weights.values()), group_id[:ROUND_ID_BYTES]
        self._append(
            Entry(epoch, round_id, int(total) if 0 <= total <= MOST else 0), frozenset(weights.keys() - {self._own})
        )
        self._lone_steps = 0
        self._rounds_noted += 1
        self.past.append(_Past(round_id, dict(weights), total, epoch, now, self._rounds_noted))
        self._prune(now)

    def note_lone_step(self, epoch: int) -> None:
        """This peer has made a step alone, because nobody else came or the round failed."""
        before = self._journal.newest.hash if self._journal.entries else b""
        name = hashlib.blake2b(self._own + before + epoch.to_bytes(8, "big"), digest_size=ROUND_ID_BYTES)
        self._append(Entry(epoch, name.digest(), 0), frozenset())
        self._lone_steps += 1

    def _append(self, entry: Entry, others: frozenset[bytes]) -> None:
        # The very first round. Runs that began apart differ in the round that follows the beginning.
        if not self._journal.entries and not self._inherited:
            self._inherited = (ForkPoint(BEGINNING, 0, entry.hash),)
        if self.past and self.past[-1].next_id is None:
            self.past[-1].next_id = entry.hash
        self._journal.append(entry)
        self._recent.append(others)

    def note_repair(self, others: frozenset[bytes]) -> None:
        """Parameters were averaged with these peers: this peer's lone steps are part of the common model now."""
        if not self._lone_steps or not others:
            return
        self._journal.take_back(self._lone_steps)
        self._lone_steps = 0
        if self.past:
            self.past[-1].next_id = None
        self._recent.clear()
        self._recent.append(others)

    def forget(self, peer: bytes) -> None:
        """A peer has said goodbye. It does not count as away, because it does not train on without this one."""
        for past in self.past:
            past.weights.pop(peer, None)

    def epoch_after(self, round_id: bytes) -> int:
        """The epoch that a round led to. For an unknown round, the epoch at which this peer took over its state."""
        return next((past.epoch for past in self.past if past.round_id == round_id), self._epoch_taken_over)

    def lineage(self, now: float) -> Lineage:
        """The rounds and fork points to tell others."""
        here, absent = self._here(), self._absent()
        forked = [past for past in self._forked(absent, now) if past.next_id is not None][-MAX_FORK_POINTS:]
        forked.sort(key=lambda past: past.number)
        own = [ForkPoint.of(past.round_id, past.share_of(here), past.next_id or b"") for past in forked]
        # The beginning is always told: runs that never met have nothing else in common.
        beginning = [fork_point for fork_point in self._inherited if fork_point.round_id == BEGINNING]
        others = [fork_point for fork_point in self._inherited if fork_point.round_id != BEGINNING]
        if now - self._taken_over_at > FORK_POINT_LIFETIME:
            others = []
        room = MAX_FORK_POINTS - len(own)
        return Lineage(self._rounds, (*beginning[:1], *others[max(0, len(others) - room) :], *own))

    @property
    def _rounds(self) -> tuple[bytes, ...]:
        return tuple(entry.hash for entry in self._journal.entries)

    def _here(self) -> set[bytes]:
        return {self._own}.union(*self._recent)

    def _absent(self) -> set[bytes]:
        if len(self._recent) < ROUNDS_TO_BE_AWAY:
            return set()
        here = self._here()
        return {peer for past in self.past for peer in past.weights if peer not in here}

    def _forked(self, absent: set[bytes], now: float) -> list[_Past]:
        """The last rounds with absent peers, sorted by absent weight, the largest last."""
        found: list[_Past] = []
        counts: Counter[bytes] = Counter()
        for past in reversed(self.past):
            due = [peer for peer in absent & past.weights.keys() if counts[peer] < ROUNDS_PER_ABSENT_PEER]
            counts.update(due)
            if due and now - past.ended_at <= FORK_POINT_LIFETIME:
                found.append(past)
        return sorted(found, key=lambda past: (past.share_of(absent), past.number))

    def _prune(self, now: float) -> None:
        wanted = {id(past) for past in self._forked(self._absent(), now)[-MAX_KEPT:]}
        self.past = [past for past in self.past if past.round_id in self._rounds or id(past) in wanted]


class LineageKeeper(Protocol):
    """Keeps the rounds behind the parameters, which newcomers take over together with the state."""

    @property
    def lineage(self) -> Lineage: ...

    @property
    def global_epoch(self) -> int: ...

    def adopt_lineage(self, lineage: Lineage, epoch: int) -> None: ...
