"""What this peer knows about other peers: one record for each, in a bounded table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.base.backoff import Backoff
from shoal.base.bounded import MOST, Bounded
from shoal.metrics import PeerHistory
from shoal.peers.identity import PeerID

FAILURES_TO_LOSE_SHARE = 3
"""A reducer loses its share after this many failures in a row (chosen): this is no longer chance."""
SHARE_WASTED = 0.05
"""The default share of its time that a peer may lose to others. Chosen: twenty peers lose as much when one is away."""
# The longest rest (chosen).
MAX_REST_SECONDS = 3600.0
# The least cost of a failure (chosen): even one that takes no time, such as a broken connection, earns a rest.
LEAST_SECONDS = 0.5


@dataclass(slots=True)
class Trial(Backoff):
    """One duty of a peer in rounds: how often it has failed in a row, and when it is tried again.

    A rest is long enough that another failure would cost only a small part of the time.
    """

    first: float = 0.0
    longest: float = MAX_REST_SECONDS
    free: int = FAILURES_TO_LOSE_SHARE

    @property
    def is_lost(self) -> bool:
        """Whether the peer has lost this duty."""
        return self.failures >= FAILURES_TO_LOSE_SHARE

    def rests(self, now: float) -> bool:
        """Whether the peer has no such duty now."""
        return self.is_lost and not self.is_due(now)

    def note_failure(self, now: float, seconds: float, *, least: int = 1) -> None:
        """Note a failure that has cost some seconds.

        Args:
            least: the least number of failures in a row that this counts as.
        """
        self.first = max(seconds, LEAST_SECONDS) / SHARE_WASTED
        self.failures = max(self.failures, least - 1)
        self.fail(now)

    def note_success(self) -> None:
        """Note a success, which forgives one failure."""
        self.failures = max(0, min(self.failures, FAILURES_TO_LOSE_SHARE) - 1)


@dataclass(slots=True)
class PeerRecord:
    """One peer. A default value means that nothing has been seen.

    It has many attributes because everything that this peer knows about another one belongs here.
    """

    goodbye_at: float | None = None
    """When it said goodbye, in DHT time, unless it has come back since."""
    reach: int | None = None
    """How others call it, by its own account: see :class:`~shoal.reach.reachability.Reach`."""
    round_trip: float = math.inf
    """The shortest measured round trip, in seconds."""
    silent_at: float = -math.inf
    """When a connection to this relay or through it last broke, in loop time."""
    is_near: bool = False
    """It has answered in a private network."""
    sees_me_at: str = ""
    """The host that this machine has, by its account."""
    uncalled: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By run: how many dials have failed although it was alive, and its last sign of life."""
    is_told_uncalled: bool = False
    """The user has been told that it cannot be called."""
    unanswered: int = 0
    """The number of unanswered calls in a row, without those made while it was avoided."""
    avoided_until: float = -math.inf
    """Lookups in the DHT leave it out until then, in DHT time."""
    excused_since: float | None = None
    """Since when its silence is attributed to an outage of this machine, in loop time."""
    sought_at: float = -math.inf
    """When its addresses were last looked up in the DHT without success, in loop time."""
    history: PeerHistory = field(default_factory=PeerHistory)
    """Its contribution history in rounds with this peer; counts decay with time."""
    seen_at: float | None = None
    """When the counts last decayed, in loop time; ``None``: it was in no round."""
    reduces: Trial = field(default_factory=Trial)
    leads: Trial = field(default_factory=Trial)
    waits_until: float = -math.inf
    """As a leader it has waited in vain. Until then, its waits are more than the share of the time that it may use."""
    sends: Trial = field(default_factory=Trial)
    others_lead_until: float = -math.inf
    """Its averages did not arrive. Until then it leads only if no other can: others would give it less to reduce."""


class PeerBook:
    """The records of the peers that were updated last.

    Peers that have been in a round with this one have a table of their own, so that strangers, which are free to
    create, never evict them.

    Args:
        most: the most records of members of rounds, and the most of others; a record takes some 700 bytes.
        on_forget: called with each member of rounds whose record is dropped.
    """

    def __init__(self, most: int = MOST, on_forget: Callable[[PeerID], object] | None = None) -> None:
        self._records: dict[PeerID, PeerRecord] = {}
        self._on_forget = on_forget
        # Which records are dropped first, of members of rounds and of others.
        self._members: Bounded[PeerID, None] = Bounded(most, on_evict=self._forget_member)
        self._others: Bounded[PeerID, None] = Bounded(most, on_evict=lambda peer, _: self._records.pop(peer))

    def _forget_member(self, peer: PeerID, _: None) -> None:
        del self._records[peer]
        if self._on_forget is not None:
            self._on_forget(peer)

    def __getitem__(self, peer: PeerID) -> PeerRecord:
        """The record of a peer, for writing; a new one if there is none."""
        record = self._records.setdefault(peer, PeerRecord())
        if peer not in self._members:
            self._others[peer] = None
        return record

    def see_member(self, peer: PeerID) -> PeerRecord:
        """The record of a peer that has been in a round with this one, for writing."""
        record = self._records.setdefault(peer, PeerRecord())
        self._others.pop(peer, None)
        self._members[peer] = None
        return record

    def get(self, peer: PeerID) -> PeerRecord | None:
        """The record of a peer, if there is one."""
        return self._records.get(peer)

    def find(self, peer: PeerID) -> PeerRecord:
        """The record of a peer, for reading; an empty one that is not kept if there is none."""
        return self.get(peer) or PeerRecord()

    def members(self) -> list[tuple[PeerID, PeerRecord]]:
        """The peers that have been in a round with this one; the latest comes last."""
        return [(peer, self._records[peer]) for peer in self._members]

    def __len__(self) -> int:
        return len(self._records)

    def values(self) -> list[PeerRecord]:
        """All records; those that are kept longest come last."""
        return [self._records[peer] for peer in (*self._others, *self._members)]
