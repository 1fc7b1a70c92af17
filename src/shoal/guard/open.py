"""The limits that ``guard="open"`` adds for a run that anyone may join: deliveries bound what a member may claim.

* Samples and weights: at most four times what the peer itself, or what most members, delivered to the last round,
  whichever is larger. The limit grows with each round, so a machine that is 300 times as fast as the others counts in
  full from its fifth round on. A larger claim is clipped; the peer is not accused, refused or waited for because of it.
* Epochs: a member's claim that this epoch is over counts only after half of it has passed, by this peer's own estimate.

Each peer applies the limits to what it counts and reduces itself, so that it need not believe others about others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shoal.base.bounded import Bounded
from shoal.guard.policy import KnownPeer, Members, PeerT, ReportT

# A claim may be this many times what was delivered (chosen): speeds and shares vary from round to round.
_GENEROSITY = 4.0
# This peer believes no claim that the epoch is over before this share of it has passed by its own estimate (chosen).
_LEAST_SHARE_OF_EPOCH = 0.5
# Lower bound of the seconds of training (chosen), because samples are divided by them.
_LEAST_SECONDS = 1e-3


def most_of(brought: float, typical: float) -> float:
    """The most samples that a peer may claim for the next round.

    Args:
        brought: what it delivered to its last round.
        typical: what most members delivered to this peer's last round.
    """
    return _GENEROSITY * max(brought, typical)


def earliest_end(began_at: float, estimate: float) -> float:
    """The earliest end of an epoch, whatever others claim."""
    return began_at + _LEAST_SHARE_OF_EPOCH * (estimate - began_at) if math.isfinite(estimate) else estimate


class Contributions:
    """What peers delivered to their last rounds with this one, within the limits."""

    def __init__(self) -> None:
        self._by_peer = Bounded[bytes, float]()
        self._typical = math.inf

    def note(self, brought: Mapping[bytes, float]) -> None:
        """Note what members delivered to a round. Ignored if all delivered nothing: then no gradients were finite."""
        counted = {peer: each for peer, each in brought.items() if math.isfinite(each)}
        if not any(counted.values()):
            return
        # The lower median, because one of two members may lie.
        self._typical = statistics.median_low(counted.values())
        for peer, each in counted.items():
            before = self._by_peer.get(peer, 0.0)
            # A peer that delivers less once may deliver more again, so its limit at most halves.
            self._by_peer[peer] = max(min(each, most_of(before, self._typical)), before / 2)

    def most(self, peer: bytes) -> float:
        """The most samples that a peer may claim for the next round."""
        return most_of(self._by_peer.get(peer, 0.0), self._typical)


class OpenGuard(Members):
    """The policy of an open run, see above. Before this peer's first round with others, all claims count in full."""

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
