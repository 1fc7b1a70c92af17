"""What this peer has seen others do, and what follows from it. What a peer says about another peer never counts.

Rounds and searches report here how each peer has done, and ask here for the consequences:

* who reduces: each failed round in a row halves a reducer's share; after ``FAILURES_TO_LOSE_SHARE`` it gets none;
* who leads: this peer does not follow a peer that has lost its share. Nor one that has accepted this peer that often in
  a row and did not start the group. Nor one that waits for peers of which this one knows nothing, and which do not
  come, for more of the time than its own guard allows. Nor, in a group of three or more, one whose averages did not
  come the last time: it would give itself its whole share. It can still be a member;
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
from collections.abc import Callable, Collection, Mapping

from shoal.base.bounded import Bounded
from shoal.base.logs import Seldom
from shoal.metrics import Demands, Metrics
from shoal.peers.book import FAILURES_TO_LOSE_SHARE, SHARE_WASTED, PeerBook, PeerRecord, Trial
from shoal.peers.identity import PeerID

logger = logging.getLogger(__name__)

# An observation counts half after this many seconds. Chosen, like the next one.
HALF_LIFE = 1800.0
# Hosts of strangers whose demands are counted; those seen last are kept.
MAX_STRANGERS = 256


class PeerScores:
    """The memory of one peer. Lives in its event loop.

    Args:
        metrics: shows what is known, and counts the warnings.
        now: the loop's time in seconds.
        book: where it is kept.
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
            "peer %s kept a round waiting for %.0f s: it reduces less, and leads only if nobody else can. Is its "
            "line too slow, or its machine stuck?",
            peer,
            seconds,
            about=peer,
        )

    def note_lead(self, leader: PeerID, seconds: float, *, started: bool, in_vain: bool = False) -> None:
        """A leader that accepted this peer into its group has, ``seconds`` later, started it or fallen silent.

        Args:
            in_vain: it has waited for somebody of whom this peer knows nothing, and who has not come.
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

        Its guard stops after it has waited for the peers of two hosts, until that is its share of the time for each.
        """
        share, now = 2 * SHARE_WASTED, self._now()
        record.waits_until = max(record.waits_until, now) + seconds / share
        return record.waits_until > now + 2 * seconds / share

    def note_delay(self, peer: PeerID, seconds: float) -> None:
        """A round was cut short after ``seconds`` because this member sent too slowly."""
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
        """A coordinator has not ended a round for ``seconds``, although nobody kept it waiting."""
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
        """A stranger has taken something. Peers cost nothing: those of one host count as one."""
        now, name = self._now(), str(host)
        demands = self._metrics.strangers.pop(name, None) or Demands()
        demands.decay(0.5 ** ((now - self._strangers.get(name, now)) / HALF_LIFE))
        demands.connections += connects
        demands.dropped += is_dropped
        demands.nbytes += nbytes
        self._metrics.strangers[name], self._strangers[name] = demands, now

    # --- what follows -------------------------------------------------------------------------------------------------

    def share_of(self, peer: PeerID) -> float:
        """The fraction, from 0 to 1, of its normal share that a peer is to reduce."""
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
        """Peers that should be in no group for a while, because no round with them comes to an end in time."""
        return [peer for peer, record in self._book.members() if record.sends.rests(self._now())]

    def has_delivered(self, peer: PeerID) -> bool:
        """Whether a peer has been useful, so that places are kept for it."""
        history = self._book.find(peer).history
        return history.delivered > history.excluded
