"""Peer scores: what this peer has seen others do, and the consequences. A peer's claims about other peers never count.

Rounds and searches report here how each peer has performed, and ask here for the consequences:

* Reducers: each failed round in a row halves a reducer's share; after ``FAILURES_TO_LOSE_SHARE`` it gets none.
* Leaders: this peer does not follow a peer that has lost its share, nor one that has accepted this peer that often in a
  row and did not start the group. It does not follow one that spends more time than its guard allows on waiting for
  unknown peers that do not show up. In a group of three or more, it does not follow one whose averages did not arrive
  the last time, because that one would give itself its whole share. All of these can still be members.
* Members: a peer is excluded if that many rounds in a row were cut short because of it.
* Connections: idle ones of useful peers are closed last, and some slots are reserved for useful peers.

*The way back.* A peer without a share is tried again after a rest. The rest is long enough that another failure would
cost only a small part of the time: ``SHARE_WASTED`` at first, and half as much after each further failure. The trial
is for a quarter of the share; a success keeps it, and each further good round doubles it. So an honest peer on a bad
line gets as much as its line can carry, and waiting alone earns no forgiveness.

Counts decay with time; everything is lost when the process ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from shoal.base.bounded import Bounded
from shoal.base.logs import Seldom
from shoal.metrics import Demands, Metrics
from shoal.peers.book import FAILURES_TO_LOSE_SHARE, SHARE_WASTED, PeerBook, PeerRecord, Trial
from shoal.peers.identity import PeerID

logger = logging.getLogger(__name__)

# An observation counts half after this many seconds (chosen).
HALF_LIFE = 1800.0
# The most hosts of strangers whose demands are counted (chosen); those seen last are kept.
MAX_STRANGERS = 256


class PeerScores:
    """The memory of one peer. Lives in its event loop.

    Args:
        metrics: shows the records, and counts the warnings.
        now: returns the loop time in seconds.
        book: keeps the records.
    """

    def __init__(self, metrics: Metrics, now: Callable[[], float], book: PeerBook) -> None:
        self._metrics, self._now, self._book = metrics, now, book
        # When each host of strangers was last seen.
        self._strangers: Bounded[str, float] = Bounded(
            MAX_STRANGERS, on_evict=lambda host, _: self._metrics.strangers.pop(host)
        )
        self._warn_seldom, self._tell_seldom = Seldom(logger.warning), Seldom(logger.info)

    def _see(self, peer: PeerID) -> PeerRecord:
        """The record of a peer, decayed to the present and marked as just seen."""
        now, record = self._now(), self._book.see_member(peer)
        self._metrics.peers.setdefault(str(peer), record.history)
        if record.seen_at is not None:
            record.history.decay(0.5 ** ((now - record.seen_at) / HALF_LIFE))
        record.seen_at = now
        return record

    # --- what has happened --------------------------------------------------------------------------------------------

    def note_round(
        self,
        members: Collection[PeerID],
        failed: Collection[PeerID],
        reducers: Collection[PeerID],
        withheld: Mapping[PeerID, float],
        seconds: float,
    ) -> None:
        """Note the end of an all-reduce in which this peer has done its part.

        Args:
            members: the other members.
            failed: the members that did not deliver everything, as far as this peer has seen it itself.
            reducers: the members that had a share to reduce.
            withheld: the members whose averages did not reach this peer, and the seconds that it waited for them.
            seconds: the duration.
        """
        # If no member delivers, this peer's own line may be the cause.
        if len(members) > 1 and all(member in failed for member in members):
            return
        for peer in members:
            record = self._see(peer)
            record.history.came += 1
            if peer in withheld:
                record.reduces.note_failure(self._now(), seconds)
                if len(members) > 1:
                    record.others_lead_until = record.reduces.rests_until
                record.history.excluded += 1
                if record.reduces.is_lost:
                    self._tell_of_reducer(peer, record.reduces)
                elif record.reduces.failures == 1 and withheld[peer] >= 5.0:  # peers come and go
                    self._tell_of_wait(peer, withheld[peer])
                continue
            if peer not in failed:
                record.history.delivered += 1
                record.sends.note_success()
            if peer in reducers:
                record.reduces.note_success()

    def _tell_of_reducer(self, peer: PeerID, trial: Trial) -> None:
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
            "peer %s kept a round waiting for %.0f s: it reduces less, and leads only if no other peer can. Is its "
            "line too slow, or its machine stuck?",
            peer,
            seconds,
            about=peer,
        )

    def note_lead(self, leader: PeerID, seconds: float, *, started: bool, in_vain: bool = False) -> None:
        """Note that a leader that accepted this peer has, ``seconds`` later, started the group or fallen silent.

        Args:
            in_vain: it has waited for a peer that is unknown here and did not show up.
        """
        record = self._see(leader)
        if in_vain and self._is_beyond_its_budget(record, seconds):
            record.leads.note_failure(self._now(), seconds, least=FAILURES_TO_LOSE_SHARE)
        elif started:
            record.leads.note_success()
            return
        else:
            record.leads.note_failure(self._now(), seconds)
        record.history.excluded += 1
        if record.leads.is_lost:
            self._metrics.troubles["leaders not followed"] += 1
            # It may only be in the middle of a long batch, so this is no warning.
            self._tell_seldom(
                "peer %s has accepted this one into a group %d times, and has not started it in time: it is not "
                "followed for the next %.0f s",
                leader,
                record.leads.failures,
                record.leads.rests_until - self._now(),
                about=leader,
            )

    def _is_beyond_its_budget(self, record: PeerRecord, seconds: float) -> bool:
        """Whether a leader has waited in vain for longer than an honest one does.

        The guard of an honest leader lets the peers of two hosts cost their share of the time, and no more.
        """
        share, now = 2 * SHARE_WASTED, self._now()
        record.waits_until = max(record.waits_until, now) + seconds / share
        return record.waits_until > now + 2 * seconds / share

    def note_delay(self, peer: PeerID, seconds: float) -> None:
        """Note a round that was cut short after ``seconds`` because this member sent too slowly."""
        record = self._see(peer)
        record.sends.note_failure(self._now(), seconds)
        if record.sends.is_lost:
            self._metrics.troubles["members too slow"] += 1
            self._warn_seldom(
                "%d rounds were cut short because peer %s sent too slowly: it is in no group for %.0f s. Is its line "
                "too slow, or its machine stuck?",
                record.sends.failures,
                peer,
                record.sends.rests_until - self._now(),
                about=peer,
            )

    def note_stuck(self, coordinator: PeerID, seconds: float) -> None:
        """Note a coordinator that has not ended a round for ``seconds`` although no member kept it waiting."""
        record = self._see(coordinator)
        record.leads.note_failure(self._now(), seconds, least=FAILURES_TO_LOSE_SHARE)
        record.history.excluded += 1
        self._metrics.troubles["leaders not followed"] += 1
        self._warn_seldom(
            "peer %s did not end a round that was complete, for %.0f s: it does not lead or coordinate for a while. "
            "Is its machine stuck, or its shoal changed?",
            coordinator,
            seconds,
            about=coordinator,
        )

    def note_stranger(self, host: object, nbytes: int = 0, *, connects: bool = False, is_dropped: bool = False) -> None:
        """Note a stranger's demand. New peer ids are free, so the peers of one host count as one."""
        now, name = self._now(), str(host)
        demands = self._metrics.strangers.pop(name, None) or Demands()
        demands.decay(0.5 ** ((now - self._strangers.get(name, now)) / HALF_LIFE))
        demands.connections += connects
        demands.dropped += is_dropped
        demands.nbytes += nbytes
        self._metrics.strangers[name], self._strangers[name] = demands, now

    # --- what follows -------------------------------------------------------------------------------------------------

    def share_of(self, peer: PeerID) -> float:
        """The fraction, from 0 to 1, of its normal share that a peer reduces."""
        reduces = self._book.find(peer).reduces
        if reduces.rests(self._now()):
            return 0.0
        return 0.5 ** min(reduces.failures, FAILURES_TO_LOSE_SHARE - 1)

    def may_lead(self, peer: PeerID) -> bool:
        """Whether this peer should follow another one as its leader."""
        record, now = self._book.find(peer), self._now()
        has_withheld = record.reduces.failures > 0 and now < record.others_lead_until
        return not (has_withheld or record.reduces.rests(now) or record.leads.rests(now))

    def find_too_slow(self) -> list[PeerID]:
        """Peers that should be in no group for a while, because no round with them ends in time."""
        return [peer for peer, record in self._book.members() if record.sends.rests(self._now())]

    def has_delivered(self, peer: PeerID) -> bool:
        """Whether a peer has been useful, so that slots are reserved for it."""
        history = self._book.find(peer).history
        return history.delivered > history.excluded
