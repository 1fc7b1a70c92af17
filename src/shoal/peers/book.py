"""What this peer knows of other peers: one record each, in one bounded table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal.base.bounded import Bounded
from shoal.peers.identity import PeerID

# Measured: a record with nothing in it takes some 250 bytes, so all of them take about a megabyte.
MAX_RECORDS = 4096


@dataclass(slots=True)
class PeerRecord:
    """One peer. What has not been seen has the default value."""

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


class PeerBook:
    """The records of the peers that were written about last.

    Args:
        most: how many there are.
    """

    def __init__(self, most: int = MAX_RECORDS) -> None:
        self._records: Bounded[PeerID, PeerRecord] = Bounded(most)

    def __getitem__(self, peer: PeerID) -> PeerRecord:
        """The record of a peer, to write in it; a new one if there is none."""
        record = self._records[peer] = self._records.get(peer) or PeerRecord()
        return record

    def find(self, peer: PeerID) -> PeerRecord:
        """The record of a peer, to read; an empty one that nobody keeps if there is none."""
        return self._records.get(peer) or PeerRecord()

    def __len__(self) -> int:
        return len(self._records)

    def values(self) -> list[PeerRecord]:
        """All records; the one that was written last comes last."""
        return list(self._records.values())
