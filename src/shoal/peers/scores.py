"""What this peer has seen others do, and what follows from it. What a peer says about another peer never counts.

Rounds and searches report here how each peer has done, and ask here for the consequences:

* who reduces: each failed round in a row halves a reducer's share; after ``FAILURES_TO_LOSE_SHARE`` it gets none;
* who leads: this peer does not follow a peer that has lost its share, or that has accepted this one that often in a
  row without starting the group, or only when it had waited for nobody. Nor, in a group of three or more, one whose
  averages did not come the last time: it would give itself its whole share. It can still be a member;
* who is a member: not a peer for which that many rounds in a row were cut short;
* whose idle connection is closed last, and who gets one of the places that strangers cannot take.

*The way back.* A peer without a share is tried again after a rest. The rest is long enough that another failure would
cost only a small part of the time: ``SHARE_WASTED`` at first, and half as much after each further failure. The trial
is for a quarter of the share; a good one keeps it, and each further good round doubles it. So an honest peer on a bad
line is as welcome as its line is good, and waiting alone earns nobody forgiveness.

Counts decay with time; everything is lost when the process ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from shoal.base.logs import Seldom
from shoal.metrics import Demands, Metrics, PeerHistory
from shoal.peers.identity import PeerID

logger = logging.getLogger(__name__)

FAILURES_TO_LOSE_SHARE = 3
# The part of the time that may be wasted on retrying a peer that has failed.
SHARE_WASTED = 0.05
MAX_REST_SECONDS = 3600.0
# The least that a failure is said to cost: even one that takes no time, such as a broken connection, earns a rest.
LEAST_SECONDS = 0.5
# A first failure that costs less is not worth a line: peers come and go.
WORTH_TELLING_SECONDS = 5.0
# An observation counts half after this many seconds.
HALF_LIFE = 1800.0
# The number of peers that are remembered; those seen most recently are kept.
MAX_REMEMBERED = 4096
# The number of hosts of strangers of which is known what they took.
MAX_STRANGERS = 256


@dataclass
class _Trial:
    """How often a peer has failed at one thing in a row, and when it is tried again."""

    failures: int = 0
    rests_until: float = -math.inf

    @property
    def is_lost(self) -> bool:
        return self.failures >= FAILURES_TO_LOSE_SHARE

    def fail(self, now: float, seconds: float, *, least: int = 1) -> None:
        self.failures = max(self.failures + 1, least)
        doublings = max(0, min(self.failures - FAILURES_TO_LOSE_SHARE, 20))
        self.rests_until = now + min(max(seconds, LEAST_SECONDS) / SHARE_WASTED * 2**doublings, MAX_REST_SECONDS)

    def succeed(self) -> None:
        self.failures = max(0, min(self.failures, FAILURES_TO_LOSE_SHARE) - 1)


@dataclass
class _Known:
    """One peer."""

    deeds: PeerHistory
    seen_at: float
    reduces: _Trial = field(default_factory=_Trial)
    leads: _Trial = field(default_factory=_Trial)
    sends: _Trial = field(default_factory=_Trial)
    others_lead_until: float = -math.inf
    """Its averages have not come to a group in which others could lead, and would have asked less of it."""


class PeerScores:
    """The memory of one peer. Lives in its event loop.

    Args:
        metrics: shows what is known, and counts the warnings.
        now: the loop's time in seconds.
    """

    def __init__(self, metrics: Metrics, now: Callable[[], float]) -> None:
        self._metrics, self._now = metrics, now
        # Ordered by when each peer was last seen; the most recent is last.
        self._known: dict[PeerID, _Known] = {}
        # When each host of strangers was last seen; in this order.
        self._strangers: dict[str, float] = {}
        self._warn_seldom, self._tell_seldom = Seldom(logger.warning), Seldom(logger.info)

    def __len__(self) -> int:
        return len(self._known)

    def _see(self, peer: PeerID) -> _Known:
        """The entry of a peer, decayed to the present and marked as just seen."""
        now = self._now()
        known = self._known.pop(peer, None) or _Known(self._metrics.peers.setdefault(str(peer), PeerHistory()), now)
        known.deeds.decay(0.5 ** ((now - known.seen_at) / HALF_LIFE))
        known.seen_at = now
        self._known[peer] = known
        while len(self._known) > MAX_REMEMBERED:
            forgotten = next(iter(self._known))
            del self._known[forgotten], self._metrics.peers[str(forgotten)]
        return known

    # --- what has happened --------------------------------------------------------------------------------------------

    def note_round(
        self,
        members: Collection[PeerID],
        failed: Collection[PeerID],
        reducers: Collection[PeerID],
        withheld: Mapping[PeerID, float],
        seconds: float,
    ) -> None:
        """An all-reduce in which this peer has done its part is over.

        Args:
            members: the other members.
            failed: the members that did not deliver everything, as far as this peer has seen it itself.
            reducers: the members that had a share to reduce.
            withheld: the members whose averages did not reach this peer, and for how many seconds it waited for them.
            seconds: how long it took.
        """
        # If nobody delivers, this peer's own line may be the cause.
        if len(members) > 1 and all(member in failed for member in members):
            return
        for peer in members:
            known = self._see(peer)
            known.deeds.came += 1
            if peer in withheld:
                known.reduces.fail(self._now(), seconds)
                if len(members) > 1:
                    known.others_lead_until = known.reduces.rests_until
                known.deeds.excluded += 1
                if known.reduces.is_lost:
                    self._tell_of_reducer(peer, known.reduces)
                elif known.reduces.failures == 1 and withheld[peer] >= WORTH_TELLING_SECONDS:
                    self._tell_of_wait(peer, withheld[peer])
                continue
            if peer not in failed:
                known.deeds.delivered += 1
                known.sends.succeed()
            if peer in reducers:
                known.reduces.succeed()

    def _tell_of_reducer(self, peer: PeerID, trial: _Trial) -> None:
        self._metrics.troubles["reducers without a share"] += 1
        self._warn_seldom(
            "averages of peer %s did not arrive in %d rounds: for %.0f s it neither reduces for this peer nor leads "
            "it. Is its line too slow, or its machine stuck?",
            peer,
            trial.failures,
            trial.rests_until - self._now(),
            about=peer,
        )

    def _tell_of_wait(self, peer: PeerID, seconds: float) -> None:
        self._metrics.troubles["averages that did not come"] += 1
        self._warn_seldom(
            "peer %s kept a round waiting for %.0f s: it reduces less, and leads only if nobody else can. Is its "
            "line too slow, or its machine stuck?",
            peer,
            seconds,
            about=peer,
        )

    def note_lead(self, leader: PeerID, seconds: float, *, started: bool) -> None:
        """A leader that accepted this peer into its group has, ``seconds`` later, started it or fallen silent."""
        known = self._see(leader)
        if started:
            known.leads.succeed()
            return
        known.leads.fail(self._now(), seconds)
        known.deeds.excluded += 1
        if known.leads.is_lost:
            self._metrics.troubles["leaders not followed"] += 1
            # It may only be in the middle of a long batch, so this is no warning.
            self._tell_seldom(
                "peer %s has accepted this one into a group %d times, and has not started it in time: it is not "
                "followed for the next %.0f s",
                leader,
                known.leads.failures,
                known.leads.rests_until - self._now(),
                about=leader,
            )

    def note_delay(self, peer: PeerID, seconds: float) -> None:
        """A round was cut short after so many seconds because this member sent too slowly."""
        known = self._see(peer)
        known.sends.fail(self._now(), seconds)
        if known.sends.is_lost:
            self._metrics.troubles["members too slow"] += 1
            self._warn_seldom(
                "%d rounds were cut short because peer %s sent too slowly: it is in no group for %.0f s. Is its line "
                "too slow, or its machine stuck?",
                known.sends.failures,
                peer,
                known.sends.rests_until - self._now(),
                about=peer,
            )

    def note_stuck(self, coordinator: PeerID, seconds: float) -> None:
        """A coordinator has not ended a round for so many seconds, although nobody kept it waiting."""
        known = self._see(coordinator)
        known.leads.fail(self._now(), seconds, least=FAILURES_TO_LOSE_SHARE)
        known.deeds.excluded += 1
        self._metrics.troubles["leaders not followed"] += 1
        self._warn_seldom(
            "peer %s did not end a round that was complete, for %.0f s: it does not lead or coordinate for a while. "
            "Is its machine stuck, or its shoal changed?",
            coordinator,
            seconds,
            about=coordinator,
        )

    def note_time(self, peer: PeerID, seconds: float) -> None:
        """A peer goes on saying that it is so many seconds later than the swarm has agreed about; 0: it does not."""
        if seconds:
            self._metrics.troubles["clocks that differ"] += 1
            self._warn_seldom(
                "peer %s says that it is %.1f seconds %s than others have agreed about: its time hardly counts. Its "
                "owner should turn on NTP",
                peer,
                abs(seconds),
                "later" if seconds > 0 else "earlier",
                about=peer,
            )

    def note_stranger(self, host: object, nbytes: int = 0, *, connects: bool = False, is_dropped: bool = False) -> None:
        """What somebody takes whom this peer does not know. Peers cost nothing: those of one host count as one."""
        now, name = self._now(), str(host)
        demands = self._metrics.strangers.pop(name, None) or Demands()
        demands.decay(0.5 ** ((now - self._strangers.pop(name, now)) / HALF_LIFE))
        demands.connections += connects
        demands.dropped += is_dropped
        demands.nbytes += nbytes
        self._metrics.strangers[name], self._strangers[name] = demands, now
        if len(self._strangers) > MAX_STRANGERS:
            forgotten = next(iter(self._strangers))
            del self._strangers[forgotten], self._metrics.strangers[forgotten]

    # --- what follows -------------------------------------------------------------------------------------------------

    def _rests(self, trial: _Trial) -> bool:
        return trial.is_lost and self._now() < trial.rests_until

    def share_of(self, peer: PeerID) -> float:
        """The fraction, from 0 to 1, of its normal share that a peer is to reduce."""
        known = self._known.get(peer)
        if known is None or not known.reduces.failures:
            return 1.0
        if self._rests(known.reduces):
            return 0.0
        return 0.5 ** min(known.reduces.failures, FAILURES_TO_LOSE_SHARE - 1)

    def may_lead(self, peer: PeerID) -> bool:
        """Whether this peer should follow another one as its leader."""
        known = self._known.get(peer)
        if known is None:
            return True
        has_withheld = known.reduces.failures > 0 and self._now() < known.others_lead_until
        return not (has_withheld or self._rests(known.reduces) or self._rests(known.leads))

    def find_too_slow(self) -> list[PeerID]:
        """Peers that should be in no group for a while, because no round with them comes to an end in time."""
        return [peer for peer, known in self._known.items() if self._rests(known.sends)]

    def has_delivered(self, peer: PeerID) -> bool:
        """Whether a peer has been useful, so that places are kept for it."""
        known = self._known.get(peer)
        return known is not None and known.deeds.delivered > known.deeds.excluded
