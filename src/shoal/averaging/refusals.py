"""Peers that this one does not average with for a while, because they have sent values that are not finite.

Whoever checks its values before it sends them never gets here. What a peer has seen itself counts for ``SEEN_SEARCHES``
searches for a group: then the other one may show that it has been mended. What it has only been told counts once, and
not if half of the others or more are accused: else one liar could scatter the swarm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal.p2p import PeerID

SEEN_SEARCHES = 10
TOLD_SEARCHES = 1
MAX_REFUSED_PEERS = 256
"""More are not remembered: those that have been refused for longest are forgotten."""


class Refusals:
    """The memory of one averager, or of one of its tags."""

    def __init__(self) -> None:
        self._left: dict[PeerID, int] = {}
        """For how many searches."""
        self._auxiliaries: set[PeerID] = set()

    def __len__(self) -> int:
        return len(self._left)

    def note(
        self, seen: Collection[PeerID], told: Collection[PeerID], group: Collection[PeerID], aux: Collection[PeerID]
    ) -> list[PeerID]:
        """What came out in a round.

        Args:
            seen: have sent this peer values that are not finite.
            told: of these, others say so.
            group: all members.
            aux: those that only helped.

        Returns:
            Those of whom this was not known.
        """
        others = [peer for peer in group if peer not in seen]
        believed = [peer for peer in others if peer in told]
        if 2 * (len(seen) + len(believed)) >= len(group):
            believed = []
        accused = {**dict.fromkeys(believed, TOLD_SEARCHES), **dict.fromkeys(seen, SEEN_SEARCHES)}
        news = [peer for peer in group if peer in accused and peer not in self._left]
        for peer, searches in accused.items():
            self._left[peer] = max(searches, self._left.pop(peer, 0))
        self._auxiliaries.update(peer for peer in accused if peer in aux)
        while len(self._left) > MAX_REFUSED_PEERS:
            del self._left[next(iter(self._left))]
        self._auxiliaries &= self._left.keys()
        return news

    def next_search(self) -> Mapping[PeerID, bool]:
        """Whom to refuse in the search that begins now, and whether others count on that peer to come."""
        refused = {peer: peer not in self._auxiliaries for peer in self._left}
        self._left = {peer: left - 1 for peer, left in self._left.items() if left > 1}
        self._auxiliaries &= self._left.keys()
        return refused
