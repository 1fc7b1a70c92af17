"""Who trains the same model as this peer, and who has trained another one without it.

In a run that averages with everybody, peers that lost each other for a while become two sides, each with a model of
its own. Each peer keeps the :class:`~shoal.optim.round_history.RoundHistory` of its parameters and tells it with its
progress. From what all tell, :func:`~shoal.optim.sides.settle` says which side goes on. To a peer of that side the
others do not exist, until they have taken over its state; to one of theirs only that side does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from shoal.averaging import RoundResult
from shoal.optim.lineage import Lineage
from shoal.optim.progress import Companion, LocalTrainingProgress
from shoal.optim.round_history import RoundHistory
from shoal.optim.sides import Standing, Verdict, settle


class Kinship:
    """This peer's rounds, and how they compare with those of others. Safe to use from any thread.

    Args:
        own: this peer.
    """

    def __init__(self, own: bytes) -> None:
        self._own = own
        self._lock = threading.Lock()
        self._history: RoundHistory | None = None
        """``None``: it does not matter what peers have in common."""
        self._verdict = Verdict()
        self.changed = False
        """Something has been told since the last verdict that may lead to another one."""

    def begin(self) -> None:
        """From now on rounds are compared: all peers should train one model."""
        with self._lock:
            self._history = RoundHistory(self._own)

    # --- own rounds ---------------------------------------------------------------------------------------------------

    def lineage(self, now: float) -> Lineage:
        """The rounds behind this peer's parameters."""
        with self._lock:
            return Lineage() if self._history is None else self._history.lineage(now)

    def news_for(self, peer: bytes, now: float) -> bytes | None:
        """What a peer should be told of this peer's rounds; ``None`` if it knows them, or if they do not matter."""
        with self._lock:
            if self._history is None or peer in self._history.mates:
                return None
            return self._history.lineage(now).pack()

    @property
    def mates(self) -> frozenset[bytes]:
        """Other members of the latest round: they have the same rounds as this peer."""
        with self._lock:
            return frozenset() if self._history is None else self._history.mates

    def note_round(self, result: RoundResult | None, epoch: int, now: float) -> None:
        """This peer's parameters contain another round.

        Args:
            result: what came of it; ``None``: it has failed, or there was nobody else.
            epoch: to which it leads.
        """
        with self._lock:
            if self._history is not None and result is not None:
                self._history.note_round(result.group_id, _weights_of(result), epoch, now)
            elif self._history is not None:
                self._history.note_lone_step(epoch)
            self.changed = True

    def note_repair(self, result: RoundResult) -> None:
        """Parameters were averaged, which makes up for earlier rounds of gradients that failed."""
        with self._lock:
            if self._history is not None:
                self._history.note_repair(frozenset(_weights_of(result).keys() - {self._own}))
            self.changed = True

    def adopt(self, lineage: Lineage, epoch: int, now: float) -> None:
        """This peer has taken over a state of this epoch, and with it the rounds behind it."""
        with self._lock:
            if self._history is not None:
                self._history.adopt(lineage, epoch, now)
            self.changed = True

    def forget(self, peer: bytes) -> None:
        """A peer has said goodbye."""
        with self._lock:
            if self._history is not None:
                self._history.forget(peer)
            self.changed = True

    # --- others -------------------------------------------------------------------------------------------------------

    def verdict(self, own: LocalTrainingProgress, companions: Mapping[bytes, Companion], now: float) -> Verdict:
        """Which side goes on, if the run has come apart."""
        with self._lock:
            if self.changed:
                self._verdict, self.changed = self._settle(own, companions, now), False
            return self._verdict

    def _settle(self, own: LocalTrainingProgress, companions: Mapping[bytes, Companion], now: float) -> Verdict:
        if self._history is None:
            return Verdict()
        lineage, mates, met_at = self._history.lineage(now), self._history.mates, self._history.met_at
        standings = [Standing(self._own, own.epoch, lineage, not own.client_mode)]
        for peer, companion in companions.items():
            if companion.is_valid(now) and companion.unreachable_since is None:
                record, told = companion.record, companion.lineage
                if peer in mates and companion.lineage_time < met_at:  # that was before the common round
                    told = Lineage(lineage.rounds, told.partings)
                standings.append(Standing(peer, record.epoch, told, not record.client_mode))
        return settle(standings)

    def epochs_given_up(self, own_epoch: int) -> int:
        """Of a peer that stands on another side than the one that goes on: how much it has trained without that."""
        with self._lock:
            if self._history is None:
                return 0
            return max(0, own_epoch - self._history.epoch_after(self._verdict.common))


def _weights_of(result: RoundResult) -> dict[bytes, float]:
    """Of those who have parameters of their own and were in it to the end."""
    left_out = {*result.failed_peers, *result.auxiliaries}
    members = zip(result.peers, result.weights, strict=True)
    return {peer.to_bytes(): weight for peer, weight in members if peer not in left_out}
