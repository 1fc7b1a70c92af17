"""What ``guard="open"`` adds, for a run that anybody may join: what a member can claim is bounded by what it brought.

* Samples and weights: at most four times the larger of what the peer itself, and what most members, brought to the last
  round. What one may bring grows with each round, so a machine that is 300 times as fast as the others counts in full
  from its fifth round on. A claim beyond that counts for less: nobody is accused, refused or waited for because of it.
* Epochs: a member's word that this one is over counts only after half of it has passed, by this peer's own estimate.

Each peer applies the limits to what it counts and reduces itself, so that nobody's word about others is needed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shoal.base.bounded import Bounded
from shoal.guard.policy import KnownPeer, Members, PeerT, ReportT

# A claim may be this many times what was delivered: speeds and shares vary from round to round.
_GENEROSITY = 4.0
# Before this share of an epoch has passed, by its own estimate, this peer believes no claim that the epoch is over.
_LEAST_SHARE_OF_EPOCH = 0.5
# Lower bound of the seconds of training, because samples are divided by them.
_LEAST_SECONDS = 1e-3


def most_of(brought: float, typical: float) -> float:
    """How much a peer may bring to the next round.

    Args:
        brought: what it brought to its last one.
        typical: what most members brought to this peer's last one.
    """
    return _GENEROSITY * max(brought, typical)


def earliest_end(began_at: float, estimate: float) -> float:
    """The time before which an epoch does not end, whatever others say."""
    return began_at + _LEAST_SHARE_OF_EPOCH * (estimate - began_at) if math.isfinite(estimate) else estimate


class Contributions:
    """What peers brought to their last rounds with this one, as far as it counts."""

    def __init__(self) -> None:
        self._by_peer = Bounded[bytes, float]()
        self._typical = math.inf

    def note(self, brought: Mapping[bytes, float]) -> None:
        """Keep what members brought to a round. Nobody had finite gradients, if it is nothing: that says nothing."""
        counted = {peer: each for peer, each in brought.items() if math.isfinite(each)}
        if not any(counted.values()):
            return
        # The lower one of two: of two members, one may lie.
        self._typical = statistics.median_low(counted.values())
        for peer, each in counted.items():
            before = self._by_peer.get(peer, 0.0)
            # A peer that brings less once may bring more again, so this at most halves.
            self._by_peer[peer] = max(min(each, most_of(before, self._typical)), before / 2)

    def most(self, peer: bytes) -> float:
        """How much a peer may bring to the next round."""
        return most_of(self._by_peer.get(peer, 0.0), self._typical)


class OpenGuard(Members):
    """See above. Before its first round with others, a peer knows nothing, and all claims count as they are."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._samples, self._weights = Contributions(), Contributions()
        self._seconds = math.inf  # of training, for the last round with others

    def note_round(self, samples: Mapping[bytes, float], *args: Any, **options: Any) -> None:
        super().note_round(samples, *args, **options)
        if samples.keys() - {self._own}:
            self._samples.note(samples)
            self._seconds = max(self._training, _LEAST_SECONDS)

    def note_weights(self, weights: Mapping[bytes, float]) -> None:
        self._weights.note(weights)

    def largest_weight(self, peer: bytes) -> float:
        return math.inf if peer == self._own else self._weights.most(peer)

    def limited(self, records: Collection[ReportT], now: float) -> list[ReportT]:
        return [self._limited(record) for record in super().limited(records, now)]

    def _limited(self, record: ReportT) -> ReportT:
        most = self._samples.most(record.peer_id)
        return record if most == math.inf else record.at_most(most, most / self._seconds)

    def called_end(self, companions: Mapping[bytes, KnownPeer], epoch: int, own_estimate: float, now: float) -> float:
        called = super().called_end(companions, epoch, own_estimate, now)
        return max(called, self._earliest_end(own_estimate))

    def may_be_over(
        self,
        companions: Mapping[bytes, PeerT],
        ahead: Mapping[bytes, PeerT],
        own: int,
        now: float,
        own_estimate: Callable[[Mapping[bytes, PeerT]], float],
    ) -> bool:
        before = {peer: c.as_at_the_beginning(own, self.epoch_began_at) for peer, c in ahead.items()}
        return now >= self._earliest_end(own_estimate({**companions, **before}))

    def _earliest_end(self, own_estimate: float) -> float:
        return earliest_end(self.epoch_began_at, own_estimate) if self.latest else -math.inf
