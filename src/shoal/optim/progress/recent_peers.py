"""Peers that this one has met in the last ten minutes. It calls them even if the DHT does not show their records.

Peers that call each other every few seconds do not need the DHT. But a long outage lets what they know of each other
expire, and an attacker near the run's key in the DHT may hide their records. So a peer now and then calls those that
it has met lately and lost sight of, unless they have said goodbye.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from shoal.p2p import PeerID

MEMORY_SECONDS = 600.0

MAX_RECENT_PEERS = 1024
# How many lost peers are called at a time, and how long each of them is then left alone: they may be dead.
CALLED_AT_ONCE = 8
SECONDS_BETWEEN_CALLS = 10.0


class RecentPeers:
    """The peers that one tracker has met. All times are DHT times, in seconds."""

    def __init__(self) -> None:
        self.met: dict[PeerID, float] = {}
        """When each peer was met last, in that order, so that the longest unseen peer is forgotten first."""
        self._called: dict[PeerID, float] = {}

    def note(self, peer: PeerID, now: float) -> None:
        """This peer has just heard from a peer that can be called."""
        self.forget(peer)
        self.met[peer] = now
        while len(self.met) > MAX_RECENT_PEERS:
            self.forget(next(iter(self.met)))

    def forget(self, peer: PeerID) -> None:
        """A peer has said goodbye."""
        self.met.pop(peer, None)
        self._called.pop(peer, None)

    def whom_to_call(self, is_known: Callable[[PeerID], bool], now: float, rng: random.Random) -> list[PeerID]:
        """A few random ones of those that the tracker has lost sight of.

        Args:
            is_known: whether the tracker still has a record of a peer.
        """
        for peer in [peer for peer, met_at in self.met.items() if met_at < now - MEMORY_SECONDS]:
            self.forget(peer)
        too_early = now - SECONDS_BETWEEN_CALLS
        missing = [peer for peer in self.met if self._called.get(peer, too_early) <= too_early and not is_known(peer)]
        chosen = rng.sample(missing, min(len(missing), CALLED_AT_ONCE))
        self._called.update(dict.fromkeys(chosen, now))
        return chosen

    def __contains__(self, peer: object) -> bool:
        return peer in self.met
