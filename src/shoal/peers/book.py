"""What this peer knows of other peers: one record each, in one bounded table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.base.backoff import Backoff
from shoal.base.bounded import MOST, Bounded
from shoal.metrics import PeerHistory
from shoal.peers.identity import PeerID

FAILURES_TO_LOSE_SHARE = 3
"""This many in a row are no chance."""
SHARE_WASTED = 0.05
"""The default share of its time that a peer may lose to others. Twenty peers lose as much when one of them is away."""
MAX_REST_SECONDS = 3600.0
# The least that a failure is said to cost: even one that takes no time, such as a broken connection, earns a rest.
LEAST_SECONDS = 0.5


@dataclass(slots=True)
class Trial(Backoff):
    """One thing that a peer does in rounds: how often it has failed at it in a row, and when it is tried again.

    A rest is so long that another failure would cost only a small part of the time.
    """

    first: float = 0.0
    longest: float = MAX_REST_SECONDS
    free: int = FAILURES_TO_LOSE_SHARE

    @property
    def is_lost(self) -> bool:
        """It is not asked of the peer any more."""
        return self.failures >= FAILURES_TO_LOSE_SHARE

    def rests(self, now: float) -> bool:
        """It is not asked of the peer now."""
        return self.is_lost and not self.is_due(now)

    def note_failure(self, now: float, seconds: float, *, least: int = 1) -> None:
        """It has failed, and that has cost some seconds.

        Args:
            least: count it as this many failures in a row.
        """
        self.first = max(seconds, LEAST_SECONDS) / SHARE_WASTED
        self.failures = max(self.failures, least - 1)
        self.fail(now)

    def note_success(self) -> None:
        """It has worked: one failure is forgiven."""
        self.failures = max(0, min(self.failures, FAILURES_TO_LOSE_SHARE) - 1)


@dataclass(slots=True)
class PeerRecord:
    """One peer. What has not been seen has the default value.

    It has many attributes, because everything that this peer knows of another one belongs here.
    """

    goodbye_at: float | None = None
    """When it said goodbye, in DHT time, unless it has come back since."""
    reach: int | None = None
    """How it is called, as it says: see :class:`~shoal.reach.reachability.Reach`."""
    round_trip: float = math.inf
    """The shortest that was measured, in seconds."""
    silent_at: float = -math.inf
    """When a connection to this relay or through it broke last, in the time of the loop."""
    is_near: bool = False
    """It has answered in a private network."""
    sees_me_at: str = ""
    """The host at which it says to see this machine."""
    uncalled: dict[str, tuple[int, float]] = field(default_factory=dict)
    """For each run: how many dials have failed although it was alive, and its last sign of life."""
    is_told_uncalled: bool = False
    """The user has been told that it cannot be called."""
    unanswered: int = 0
    """How many calls in a row it has not answered, not counting those made while it was avoided."""
    avoided_until: float = -math.inf
    """Until when walks through the DHT leave it out, in DHT time."""
    excused_since: float | None = None
    """Since when its silence is put down to an outage of this machine, in the time of the loop."""
    sought_at: float = -math.inf
    """When its addresses were looked for in the DHT last, and not found, in the time of the loop."""
    history: PeerHistory = field(default_factory=PeerHistory)
    """What it has brought to rounds with this peer; counts decay with time."""
    seen_at: float | None = None
    """When they decayed last, in the time of the loop; ``None``: it was in no round."""
    reduces: Trial = field(default_factory=Trial)
    leads: Trial = field(default_factory=Trial)
    waits_until: float = -math.inf
    """As a leader it has waited for nobody: when that is the part of the time that others allow for it."""
    sends: Trial = field(default_factory=Trial)
    others_lead_until: float = -math.inf
    """Its averages have not come to a group in which others could lead, and would have asked less of it."""


class PeerBook:
    """The records of the peers that were written about last.

    Peers that have been in a round with this one have a table of their own, so that strangers, who cost nothing, never
    push them out.

    Args:
        most: how many records there are, of members of rounds and of others each; a record takes some 700 bytes.
        on_forget: called with each member of rounds whose record is dropped.
    """

    def __init__(self, most: int = MOST, on_forget: Callable[[PeerID], object] | None = None) -> None:
        self._others: Bounded[PeerID, PeerRecord] = Bounded(most)
        self._members: Bounded[PeerID, PeerRecord] = Bounded(
            most, on_evict=None if on_forget is None else lambda peer, _: on_forget(peer)
        )

    def __getitem__(self, peer: PeerID) -> PeerRecord:
        """The record of a peer, to write in it; a new one if there is none."""
        record = self._members.get(peer)
        if record is None:
            record = self._others[peer] = self._others.get(peer) or PeerRecord()
        return record

    def see_member(self, peer: PeerID) -> PeerRecord:
        """The record of a peer that has been in a round with this one, to write in it."""
        record = self._members[peer] = self._members.get(peer) or self._others.pop(peer, None) or PeerRecord()
        return record

    def get(self, peer: PeerID) -> PeerRecord | None:
        """The record of a peer, if there is one."""
        return self._members.get(peer) or self._others.get(peer)

    def find(self, peer: PeerID) -> PeerRecord:
        """The record of a peer, to read; an empty one that nobody keeps if there is none."""
        return self.get(peer) or PeerRecord()

    def members(self) -> list[tuple[PeerID, PeerRecord]]:
        """The peers that have been in a round with this one; the latest comes last."""
        return list(self._members.items())

    def __len__(self) -> int:
        return len(self._members) + len(self._others)

    def values(self) -> list[PeerRecord]:
        """All records."""
        return [*self._members.values(), *self._others.values()]
