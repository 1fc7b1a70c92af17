"""How far all peers are in a slot. If it is counted in inner steps, the first one that has made all of them ends it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shoal.base.clock import get_dht_time
from shoal.optim.diloco.in_flight import ANY_SLOT, ExpectedMembers
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.records import (
    Companion,
    GlobalTrainingProgress,
    LocalTrainingProgress,
    estimate_is_off,
    expected_members,
)
from shoal.optim.progress_tracker import ProgressTracker
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.dht import DHT
    from shoal.optim.diloco.schedule import Schedule
    from shoal.optim.diloco.settings import OuterSettings


class OuterBoard(ProgressBoard):
    """A board whose epochs are slots. Rounds may end long after their slots, and overlap."""

    # Peers that were expected in the last round for which they could have come, and did not come; and its slot.
    _absent: Mapping[bytes, int] = MappingProxyType({})
    is_late = False
    """Whether the latest round failed here. Others may have met without this peer, and need not wait for it."""

    def note_failed_round(self, slot: int, now: float) -> None:
        """The round at the end of a slot has failed here; others may have had it without this peer."""
        with self.lock:
            self.is_late = True
            self.guard.begin_to_wait((), now, 0.0)
            self.guard.note_round({}, now)

    def note_outer_round(self, samples: Mapping[bytes, float], now: float, expected: ExpectedMembers) -> None:
        """A round is over, see :meth:`Members.note_round <shoal.guard.policy.Members.note_round>`.

        Args:
            expected: who was.
        """
        with self.lock:
            self.is_late = False
            peers = {peer.to_bytes() for peer in expected.peers}
            known = {peer: slot for peer, slot in self._absent.items() if peer in self._companions}
            absent = {**known, **dict.fromkeys(peers, expected.slot)}
            self._absent = {peer: slot for peer, slot in absent.items() if peer not in samples}
            self.guard.begin_to_wait(peers, expected.since, expected.patience)
            self.guard.note_round(samples, now, self._companions, expected.slot)

    def set_steps(self, steps: int) -> None:
        """The slot that begins has so many steps. Only where slots are counted in these."""
        self._target_batch_size = steps

    def everybody(self, now: float) -> set[bytes]:
        """All other peers that are known and can be reached, whatever slot they are at."""
        with self.lock:
            self._drop_expired(now)
            present = {peer: companion for peer, companion in self._companions.items() if companion.is_reachable(now)}
            strangers = self.strangers()
            return {p for p, companion in present.items() if not companion.record.is_donor and p not in strangers}

    def electorate(self, now: float, earliest: int) -> set[bytes]:
        """Other peers that count when it is asked whether most have come to a round.

        These are all that may update what this peer updates, whatever slot they are at, and whether or not it is worth
        to wait for them. Otherwise two halves of a run could each be most of those who count: when they wait for nobody
        else, or when one of them is some slots ahead. Who was expected and did not come does not count until it comes,
        unless it has gone on without this peer. Nor do newcomers as long as they may not join, because others of them
        have cost too much time.

        Args:
            earliest: peers that this one has met count from this slot on; others, which may be newcomers, from this
                peer's slot on.
        """
        with self.lock:
            coming = expected_members(self.own.epoch, ANY_SLOT, self._kin(now), self._last_members, now)
            present = {peer for peer in coming if self.guard.has_time_for(peer, now)}
            met = {peer for peer, slot in self._slots_of_met(now).items() if slot >= earliest}
            return {peer for peer in present | met if not self._is_absent(peer)}

    def _is_absent(self, peer: bytes) -> bool:
        """Whether a peer was expected lately, and neither came nor went on, as far as this one believes it."""
        slot = self._absent.get(peer)
        if slot is None:
            return False
        return self._companions[peer].record.epoch <= slot or not self.guard.is_proven(peer)

    def slots_of_companions(self, now: float) -> dict[bytes, int]:
        """The slots of others that can be called and were in a round with this peer."""
        with self.lock:
            return self._slots_of_met(now)

    def _slots_of_met(self, now: float) -> dict[bytes, int]:
        present = {peer: c.record for peer, c in self._companions.items() if c.is_reachable(now)}
        return {peer: r.epoch for peer, r in present.items() if not r.is_donor and self.guard.has_met(peer)}

    def whom_to_wait_for(self, peers: set[bytes], now: float) -> set[bytes]:
        """See :meth:`Members.whom_to_wait_for <shoal.guard.policy.Members.whom_to_wait_for>`."""
        with self.lock:
            return self.guard.whom_to_wait_for(peers, now)

    def is_cut_off(self, now: float) -> bool:
        """Whether this peer, which reaches nobody, must be cut off, rather than all others be dead.

        Others with whom it was in a round fell silent lately, without a goodbye, and their system did not refuse the
        call. If there is only one of them, one of both must go on. Records of strangers say nothing: anybody can
        publish some that nobody answers for.

        Nobody can call a client, nor download what it has updated alone. So it waits until the records of all others
        have expired, whoever they are and however they fell silent.
        """
        with self.lock:
            fell_silent = {
                peer: c
                for peer, c in self._companions.items()
                if c.unreachable_since is not None and c.expiration >= now and not c.record.is_donor
            }
            if self.own.client_mode:
                return bool(fell_silent)
            silent = [peer for peer, c in fell_silent.items() if not c.is_refused and self.guard.has_met(peer)]
            return len(silent) > 1 or any(peer < self.own.peer_id for peer in silent)


class OuterTracker(ProgressTracker):
    """A tracker whose epochs are slots, which are counted in samples."""

    make_board = OuterBoard
    board: OuterBoard

    def electorate(self, earliest: int) -> set[PeerID]:
        """See :meth:`OuterBoard.electorate`."""
        return {PeerID(peer) for peer in self.board.electorate(get_dht_time(), earliest)}

    def whom_to_wait_for(self, peers: set[PeerID]) -> set[PeerID]:
        """Of several peers that may come, those that are worth it to wait for."""
        return {PeerID(peer) for peer in self.board.whom_to_wait_for({p.to_bytes() for p in peers}, get_dht_time())}


class SlotBoard(OuterBoard):
    """A board on which peers count their own inner steps, and do not add them up.

    Whoever has made all steps of the slot is ready. The others may complete theirs, but not for longer than the
    patience of the first one.
    """

    overlaps = False
    """Whether others may be at the next slot although this peer has missed nothing."""
    patience = 0.0
    """For so many seconds others are waited for."""
    # Of the slot with this number: until when this peer may go on, by what it has heard so far.
    _deadline: tuple[int, float] = (-1, math.inf)

    def rests_on_guesses(self, now: float) -> bool:
        """Nobody adds up steps."""
        return False

    @property
    def has_made_all(self) -> bool:
        """Whether this peer has made all steps of its slot."""
        return self.own.samples_accumulated >= self._target_batch_size

    def _summary_of(self, companions: Mapping[bytes, Companion], now: float) -> GlobalTrainingProgress:
        summary, own = super()._summary_of(companions, now), self.own
        others = [c.record for c in companions.values() if c.is_reachable(now) and c.record.epoch == summary.epoch]
        records = self.guard.limited(others, now)
        records += [own] if own.epoch == summary.epoch else []
        most = max((record.samples_accumulated for record in records), default=0)
        ends = [math.inf]
        for record in records:
            left = self._target_batch_size - record.samples_accumulated
            if left <= 0:
                ends.append(now)
            elif record.samples_per_second > 0:
                ends.append(max(now, record.time + left / record.samples_per_second))
        end = min(min(ends), now + 1e9)
        return replace(summary, samples_accumulated=most, eta_next_epoch=end)

    def is_misjudged(self, told: LocalTrainingProgress) -> bool:
        # Nobody adds up steps: what matters is when a peer will have made all of them.
        with self.lock:
            return estimate_is_off(told, self.own, self._target_batch_size, self.batch_size)

    def end_of_epoch(self, now: float) -> float:
        """DHT time at which this peer goes to its next slot, as far as it is known; infinite if nobody is ready."""
        with self.lock:
            kin = self._kin(now)
            progress = self._global = self._summary_of(kin, now)
            if self.has_made_all:
                return now
            if (ahead := progress.epoch - self.own.epoch) > 0 and not (self.overlaps and ahead == 1):
                return now
            called = self.guard.called_end(kin, self.own.epoch, progress.eta_next_epoch, now)
            if ahead > 0:  # others are training on already, and may wait in the background
                called = min(called, now + self.patience)
            if self.is_late:  # with fewer steps it meets them; with all of them it would be late again
                called = min(called, progress.eta_next_epoch)
            slot, known = self._deadline
            self._deadline = self.own.epoch, min(called, known if slot == self.own.epoch else math.inf)
            return max(now, self._deadline[1])

    def begin_update(self, now: float, patience: float, in_advance: bool = False) -> None:
        super().begin_update(now, patience, in_advance)
        if self.has_made_all:
            self._declared_end = now + patience


class SlotTracker(OuterTracker):
    """A tracker whose epochs are slots, and whose samples are inner steps.

    Args:
        args, options: see :class:`~shoal.optim.progress_tracker.ProgressTracker`. ``target_batch_size`` is the number
            of inner steps in the first slot.
        patience: for so many seconds others may go on when the first peer has made all steps.
        overlaps: whether others may be at the next slot although this peer has missed nothing.
    """

    make_board = SlotBoard
    board: SlotBoard

    def __init__(self, *args: Any, patience: float, overlaps: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.board.patience, self.board.overlaps = patience, overlaps

    @property
    def time_of_first(self) -> float:
        """DHT time at which the first peer is expected to have made all steps."""
        return self.board.global_progress(get_dht_time()).eta_next_epoch


def make_tracker(dht: DHT, run_id: str, schedule: Schedule, settings: OuterSettings, **options: Any) -> OuterTracker:
    """The tracker that counts what the slots of this schedule are counted in: samples of all peers, or inner steps."""
    if schedule.target_batch_size is not None:
        return OuterTracker(dht, run_id, schedule.target_batch_size, **options)
    patience, overlaps = settings.straggler_patience, settings.others_may_be_ahead
    return SlotTracker(dht, run_id, schedule.steps_of(0), patience=patience, overlaps=overlaps, **options)
