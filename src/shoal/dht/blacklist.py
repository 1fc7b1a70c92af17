"""Peers that did not answer lately and are left alone for a while."""

from __future__ import annotations

from collections import Counter

from shoal.clock import get_dht_time
from shoal.dht.storage import TimedStorage
from shoal.p2p.identity import PeerID

MAX_BACKOFF_STEPS = 10
MAX_PEERS = 4096


class Blacklist:
    """Peers that failed, each banned for ``base_time * backoff_rate ** earlier failures`` seconds.

    Args:
        base_time: seconds after the first failure; 0 turns banning off.
        backoff_rate: every further failure in a row takes this many times longer.
    """

    def __init__(self, base_time: float = 5.0, backoff_rate: float = 2.0) -> None:
        if not (base_time >= 0 and backoff_rate >= 1):
            raise ValueError(
                f"blacklist_time must be at least 0 and backoff_rate at least 1, got {base_time} and {backoff_rate}"
            )
        self.base_time, self.backoff_rate = base_time, backoff_rate
        self.banned_peers: TimedStorage[PeerID, int] = TimedStorage(MAX_PEERS)
        self.ban_counter: Counter[PeerID] = Counter()
        """Failures in a row, bans counted once."""

    def register_failure(self, peer: PeerID) -> None:
        """The peer did not answer. Failures during a ban do not prolong it."""
        if peer in self or self.base_time == 0:
            return
        earlier_failures = min(self.ban_counter[peer], MAX_BACKOFF_STEPS)
        ban_duration = self.base_time * self.backoff_rate**earlier_failures
        self.banned_peers.store(peer, self.ban_counter[peer], get_dht_time() + ban_duration)
        self.ban_counter[peer] += 1
        if len(self.ban_counter) > MAX_PEERS:
            del self.ban_counter[next(iter(self.ban_counter))]

    def register_success(self, peer: PeerID) -> None:
        """The peer answered: all is forgiven."""
        if self.ban_counter.pop(peer, None) is not None and peer in self.banned_peers:
            del self.banned_peers[peer]

    def clear(self) -> None:
        """Forgive everybody."""
        self.banned_peers.clear()
        self.ban_counter.clear()

    def __contains__(self, peer: object) -> bool:
        return peer in self.banned_peers

    def __len__(self) -> int:
        return len(self.banned_peers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(base_time={self.base_time}, banned={len(self)})"
