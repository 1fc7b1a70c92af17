"""What members bring to rounds. It limits what they may claim.

Two things are claimed. With its progress a peer tells how many steps of a slot it has made, or how many samples; who
claims some is expected to come to the round at the end of the slot, and to bring them (:mod:`shoal.optim.evidence`).
And each member tells what its message weighs. It weighs at most twice as much as in its last round. In its first one it
weighs no more than a message of the leader; where peers meet in groups, twice as much as any member has weighed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.base.clock import get_dht_time
from shoal.net.transport import MOST
from shoal.optim.diloco.in_flight import ExpectedMembers, Flight
from shoal.optim.history.fork_choice import weights_of
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.averaging.node import AveragerNode
    from shoal.optim.diloco.slot_tracker import OuterBoard

# A member may weigh this many times what it has weighed, because batches vary.
_GENEROSITY = 2.0
# The weights of so many members are remembered.
_MAX_REMEMBERED = 4096


class OuterContributions:
    """Remembers what has come of rounds, and tells it the evidence of this peer. Its limits are asked for in the loop.

    Args:
        board: has the evidence of what peers claim.
    """

    def __init__(self, board: OuterBoard) -> None:
        self._board = board
        self._weights: dict[PeerID, float] = {}
        # Of the latest round; and the latest message of this peer.
        self._latest: dict[PeerID, float] = {}
        self._own_weight = 1.0
        self._meets_all = True

    def advise(self, averager: AveragerNode) -> None:
        """From now on, members of this averager's groups weigh no more than :meth:`largest_weight`."""
        self._meets_all = averager.config.target_group_size is None
        averager.trust.largest_weight = self.largest_weight
        averager.trust.least_limit, averager.trust.most_limit = self.least_limit, self.most_limit

    def largest_weight(self, peer: PeerID) -> float:
        """What a member may weigh: as much as it likes before the first round with others."""
        if not self._weights:
            return MOST
        known = self._weights.get(peer)
        if known is not None:
            return _GENEROSITY * known + self._own_weight
        return self._own_weight if self._meets_all else _GENEROSITY * max(self._weights.values())

    def least_limit(self, leader: PeerID, peer: PeerID) -> float:
        """A lower bound of what an honest leader finds: what it has seen the peer weigh in this peer's latest round."""
        return self._latest.get(peer, 0.0) if leader in self._latest else 0.0

    def most_limit(self, leader: PeerID) -> float:
        """At least the limit that an honest leader sets for itself. It is twice what this peer finds for the leader, or
        would for the member that brought most: what peers have seen may differ."""
        if not self._weights:
            return MOST
        return _GENEROSITY * max(self.largest_weight(leader), _GENEROSITY * max(self._weights.values()))

    def note(self, flight: Flight, expected: ExpectedMembers | None) -> None:
        """A round has ended.

        Args:
            expected: who was; ``None``: it has failed.
        """
        result, now = flight.result, get_dht_time()
        self._own_weight = flight.weight or self._own_weight
        if expected is None:
            self._board.note_failed_round(flight.slot, now)
            return
        if result is None:
            self._board.note_outer_round({}, now, expected)
            return
        weights = weights_of(result)
        done = {peer.to_bytes(): each for peer, each in zip(result.peers, flight.done, strict=True)}
        self._board.guard.note_failures([peer.to_bytes() for peer in result.seen_failing], result.duration, now)
        self._board.note_outer_round({p: done[p] if weight else 0 for p, weight in weights.items()}, now, expected)
        self._latest = {PeerID(peer): weight for peer, weight in weights.items()}
        known = dict(self._weights)  # the loop may be looking at this one
        for peer, weight in self._latest.items():
            before = known.pop(peer, 0.0)
            known[peer] = max(weight, before / _GENEROSITY)  # it may bring more again
        while len(known) > _MAX_REMEMBERED:
            del known[next(iter(known))]
        self._weights = known
