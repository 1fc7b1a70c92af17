"""Slots: when peers exchange which fragment, how they agree that a slot is over, and which of them come to its round.

A *slot* is the time up to one exchange, that of one fragment. Slots are numbered; slot k is for fragment
``k % fragments``. The whole swarm uses the same numbers, so a peer that hears of a later slot goes there and skips
those between. To the progress tracker, slots are epochs. The length of a slot is counted either in samples of all
peers, or in inner steps. Inner steps are not added up: the first peer that has made all of them ends the slot
(:class:`StepRule`).

If training stands still during rounds, only peers of one slot meet. If rounds overlap with training, a round may end
long after its slot, and peers a few slots apart may meet in the round of one fragment. An update that most of the run
does not have would be lost, or split the run. So no peer makes one alone while others train (:class:`Attendance`).
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from shoal.averaging import StepControl
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.optim.diloco.fragment_updates import Flight
from shoal.optim.diloco.messages import PARAMETERS
from shoal.optim.diloco.settings import OuterSettings
from shoal.optim.history.fork_choice import weights_of
from shoal.optim.history.journal import MOST
from shoal.optim.history.window import EPOCHS_AHEAD, is_behind, last_epoch_in_first_round
from shoal.optim.progress.board import FAR_AHEAD, EpochRule
from shoal.optim.progress.records import (
    Companion,
    GlobalTrainingProgress,
    LocalTrainingProgress,
    expected_members,
)
from shoal.optim.progress_tracker import ProgressTracker
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)

# Beyond all slots.
ANY_SLOT = MOST


def group_of(own: bytes, others: Iterable[bytes], slot: int, size: int) -> tuple[str, set[bytes]]:
    """The group in which a peer meets others in a slot.

    Groups are drawn again for each slot. All peers that know the same others draw the same groups. Otherwise fast peers
    would only meet each other, and two halves of a run would hardly mix.

    Args:
        own: this peer.
        others: all other peers, in any order.
        slot: number of the slot.
        size: of a group; the last one may be smaller.

    Returns:
        The bits under which the group meets, and its other members.
    """
    order = sorted({own, *others}, key=lambda peer: hashlib.sha256(slot.to_bytes(8) + peer).digest())
    number = order.index(own) // size
    return f"{slot % 2**8:08b}{number % 2**16:016b}", set(order[number * size : (number + 1) * size]) - {own}


@dataclass(frozen=True)
class Schedule:
    """Says how long each slot is. Exactly one of ``sync_every`` and ``target_batch_size`` is given.

    Raises:
        ValueError: both or none of them are given, or there are more fragments than steps between two exchanges.
    """

    fragments: int = 1
    """How many fragments the parameters have."""
    sync_every: int | None = None
    """Inner steps from one exchange of a fragment to the next one. Slots are evenly spread over these steps."""
    target_batch_size: int | None = None
    """Samples of all peers together in each slot."""

    def __post_init__(self) -> None:
        if (self.sync_every is None) == (self.target_batch_size is None):
            raise ValueError(
                "give either sync_every, the inner steps between two exchanges, or target_batch_size, the samples of "
                f"all peers between two exchanges: got {self.sync_every} and {self.target_batch_size}"
            )
        if self.fragments < 1:
            raise ValueError(f"there must be at least 1 fragment, got {self.fragments}")
        if self.sync_every is not None and self.sync_every < self.fragments:
            raise ValueError(
                f"{self.fragments} fragments do not fit into sync_every={self.sync_every} inner steps, one step each: "
                "use fewer fragments or exchange less often"
            )

    def __str__(self) -> str:
        is_counted = self.sync_every is None
        length = f"{self.target_batch_size} samples per slot" if is_counted else f"sync_every {self.sync_every}"
        return f"{self.fragments} fragments, {length}"

    def fragment_of(self, slot: int) -> int:
        """The fragment that is exchanged at the end of a slot."""
        return slot % self.fragments

    def due_at(self, slot: int) -> int:
        """After how many inner steps of the run a slot ends; 0 for the slot before the first one.

        Only with ``sync_every``. Each fragment is exchanged exactly every ``sync_every`` steps, even if the number of
        fragments does not divide that.
        """
        assert self.sync_every is not None, "with target_batch_size nobody knows how many steps a slot has"
        if slot < 0:
            return 0
        period, fragment = divmod(slot, self.fragments)
        return period * self.sync_every + (fragment + 1) * self.sync_every // self.fragments

    def steps_of(self, slot: int) -> int:
        """How many inner steps a slot has. Only with ``sync_every``."""
        return self.due_at(slot) - self.due_at(slot - 1)


@dataclass
class SlotCounter:
    """Where one peer is in the run: the slot, and what the peer has done in it."""

    schedule: Schedule
    slot: int = 0
    steps: int = 0
    """Inner steps of this peer in this slot."""
    samples: int = 0
    """Samples of this peer in this slot."""
    inner_steps: int = 0
    """All inner steps of this peer."""

    def count(self, samples: int) -> None:
        """This peer has made an inner step with this many samples."""
        self.steps += 1
        self.samples += samples
        self.inner_steps += 1

    @property
    def done(self) -> int:
        """What this peer has done in its slot, in the unit in which slots are counted."""
        return self.samples if self.schedule.sync_every is None else self.steps

    @property
    def is_full(self) -> bool:
        """Whether this peer has made all the steps of the slot. With ``target_batch_size`` it cannot tell by itself."""
        return self.schedule.sync_every is not None and self.steps >= self.schedule.steps_of(self.slot)

    def go_to(self, slot: int) -> None:
        """The slot is over, or the swarm is at a later one. What is done from now on belongs to ``slot``."""
        if slot != self.slot:
            self.slot, self.steps, self.samples = slot, 0, 0

    @property
    def position(self) -> int:
        """The position of learning rate schedules, the same in all peers at the same point of the run.

        With ``sync_every`` this is the number of inner steps of the run. It advances with this peer's steps, but not
        beyond the end of the slot. With ``target_batch_size`` it is the number of slots.
        """
        if self.schedule.sync_every is None:
            return self.slot
        begins, ends = self.schedule.due_at(self.slot - 1), self.schedule.due_at(self.slot)
        return min(begins + self.steps, ends)


# --- the end of a slot that is counted in inner steps -----------------------------------------------------------------


class StepRule(EpochRule):
    """Ends a slot when the first peer has made all its inner steps. That peer waits for the others to complete theirs,
    but not longer than its patience.

    Args:
        patience: how long to wait for others, in seconds.
        overlaps: whether others may be at the next slot although this peer has missed nothing.
    """

    adds_up = False

    def __init__(self, patience: float, *, overlaps: bool = False) -> None:
        self._patience, self._overlaps = patience, overlaps
        self.is_late = False
        """Whether the latest round failed here. Others may have met without this peer, and need not wait for it."""
        # Of the slot with this number: until when this peer may continue, by what it has heard so far.
        self._deadline: tuple[int, float] = (-1, math.inf)

    def share(self, target: int, num_peers: int) -> float:
        return target  # each peer makes all steps itself

    def summary(
        self, progress: GlobalTrainingProgress, records: Collection[LocalTrainingProgress], now: float
    ) -> GlobalTrainingProgress:
        target, ends = progress.target_batch_size, [math.inf]
        for record in records:
            left = target - record.samples_accumulated
            if left <= 0:
                ends.append(now)
            elif record.samples_per_second > 0:
                ends.append(max(now, record.time + left / record.samples_per_second))
        most = max((record.samples_accumulated for record in records), default=0)
        return replace(progress, samples_accumulated=most, eta_next_epoch=min(*ends, now + FAR_AHEAD))

    def end(
        self,
        progress: GlobalTrainingProgress,
        own: LocalTrainingProgress,
        called_end: Callable[[float], float],
        now: float,
    ) -> float:
        ahead = progress.epoch - own.epoch
        if own.samples_accumulated >= progress.target_batch_size or (ahead > 0 and not (self._overlaps and ahead == 1)):
            return now
        called = called_end(progress.eta_next_epoch)
        if ahead > 0:  # others are training on already, and may wait in the background
            called = min(called, now + self._patience)
        if self.is_late:  # it skips some steps to meet the others: with all of them it would be late again
            called = min(called, progress.eta_next_epoch)
        slot, known = self._deadline
        self._deadline = own.epoch, min(called, known if slot == own.epoch else math.inf)
        return max(now, self._deadline[1])

    def declared_end(self, end: float, own: LocalTrainingProgress, target: int, now: float, patience: float) -> float:
        return now + patience if own.samples_accumulated >= target else end


# --- which peers come -------------------------------------------------------------------------------------------------


class Attendance:
    """Predicts which peers come to rounds. Used only by the training thread.

    Args:
        tracker: knows the progress of all peers.
        settings: whether rounds overlap with training, and how long to wait for others.
        fragments: how many fragments there are.
    """

    def __init__(self, tracker: ProgressTracker, settings: OuterSettings, fragments: int) -> None:
        self._tracker, self._board, self._settings, self._fragments = tracker, tracker.board, settings, fragments
        # Peers that did not come to the last round they were expected in, with its slot.
        self._absent: Mapping[bytes, int] = MappingProxyType({})
        # The slot whose end this peer holds up for others, and since when.
        self._held: tuple[int, float] = (-1, 0.0)
        # The slot of others to which this peer last went back.
        self._went_back_to = -1
        self._warn_seldom = Seldom(logger.warning)

    # --- what has happened --------------------------------------------------------------------------------------------

    def note(self, flight: Flight, waited: float | None) -> None:
        """A round has ended.

        Args:
            waited: for how many seconds training stood still for it; ``None``: it failed here, but may have succeeded
                for others.
        """
        board, guard, result, now = self._board, self._board.guard, flight.result, get_dht_time()
        with board.lock:
            if isinstance(board.rule, StepRule):
                board.rule.is_late = waited is None
            if waited is None:
                guard.begin_to_wait((), now, 0.0)
                guard.note_round({}, now)
                return
            samples: dict[bytes, float] = {}
            if result is not None:
                guard.note_failures([peer.to_bytes() for peer in result.seen_failing], result.duration, now)
                done = {peer.to_bytes(): each for peer, each in zip(result.peers, flight.group.done, strict=True)}
                weights = weights_of(result)
                samples = {peer: done[peer] if weight else 0 for peer, weight in weights.items()}
                guard.note_weights(weights)
            self.note_members(flight, samples, now, waited)

    def note_members(self, flight: Flight, samples: Mapping[bytes, float], now: float, waited: float) -> None:
        """A round is over, in which each member has contributed this many samples; empty if this peer was alone."""
        board, slot, expected = self._board, flight.slot, {peer.to_bytes() for peer in flight.expected}
        known = {peer: missed for peer, missed in self._absent.items() if peer in board.companions}
        absent = {**known, **dict.fromkeys(expected, slot)}
        self._absent = {peer: missed for peer, missed in absent.items() if peer not in samples}
        board.guard.begin_to_wait(expected, now - (time.monotonic() - flight.began_at), waited)
        board.guard.note_round(samples, now, board.companions, slot)

    # --- the round at the end of a slot -------------------------------------------------------------------------------

    def last_slot(self, slot: int) -> int:
        """A peer beyond this slot does not come to the round that ends ``slot``."""
        return last_epoch_in_first_round(slot, overlaps=self._settings.overlaps)

    @property
    def reach(self) -> int:
        """The most slots between two peers that can meet in one round of a fragment.

        If rounds overlap with training, a peer that begins a round may meet one that has begun its next round of the
        same fragment. That one is ahead by as many slots as there are fragments, and may have ended one more slot.
        """
        return self._fragments + 1 if self._settings.overlaps else 0

    def expected(self, slot: int) -> set[PeerID]:
        """Other peers that will come to the round at the end of this slot."""
        return self.worth_waiting_for(
            self._tracker.expected_members(until_epoch=self.last_slot(slot)) | self._a_slot_behind(slot)
        )

    def _a_slot_behind(self, slot: int) -> set[PeerID]:
        """Peers one slot behind, which come to the round of this slot after they have ended theirs.

        Only if rounds overlap with training, and two slots in a row are for different fragments. Otherwise, peers that
        are a slot apart meet at once, and waiting for them could let two halves of a run continue side by side, one
        always a slot ahead.
        """
        if not self._settings.overlaps or self._fragments == 1 or self._settings.average == PARAMETERS:
            return set()
        behind = {PeerID(each.peer_id): slot for each in self._records() if each.epoch == slot - 1}
        return self._tracker.still_expected(behind)

    def voters(self, slot: int) -> set[PeerID]:
        """Other peers of which most must come to the round that ends this slot."""
        return self.electorate(get_dht_time(), slot - self.reach)

    def slot_to_go_back_to(self, slot: int) -> int | None:
        """The slot of the others, if this peer is so far ahead that they do not follow it; else ``None``.

        Nobody follows a client. If rounds overlap with training, two or more peers do not follow a single one. The
        outer parameters stay as they are: the next round decides which branch wins.
        """
        if self._settings.client_mode:
            last = max(self._slots_near(0), default=slot)
            is_too_far = is_behind(last, slot, 1)
        else:
            slots = self.slots_of_companions(get_dht_time()).values()
            last = max(slots, default=slot)
            # If they have not moved since this peer last went back to them, they do not train.
            is_alive = last > self._went_back_to
            is_too_far = self._settings.overlaps and len(slots) > 1 and is_behind(last, slot, EPOCHS_AHEAD) and is_alive
        if not is_too_far:
            return None
        self._went_back_to = last
        logger.info("this peer is at slot %d, and all others at most at %d: it goes back there", slot, last)
        return last

    def lets_others_catch_up(self, slot: int) -> bool:
        """Whether to give others that are a little behind some time to come to the round that ends this slot.

        If rounds overlap with training, a peer whose rounds nobody joins never waits. It would be the fastest, and
        leave the others behind.
        """
        if not self._settings.overlaps:
            return False
        near = self._slots_near(slot - EPOCHS_AHEAD)
        if not near or max(near) >= slot or self.expected(slot):
            return False
        if self._held[0] != slot:
            self._held = slot, time.monotonic()
        return time.monotonic() - self._held[1] < self._settings.straggler_patience

    def others_are_there(self, slot: int) -> bool:
        """Whether there are peers that train but miss the round that ends this slot, and make updates before or after.

        This includes peers that only this one cannot reach.
        """
        if self._tracker.expected_members(until_epoch=ANY_SLOT):
            return True
        if self.is_cut_off(get_dht_time()):
            self._warn_seldom(
                "this peer reaches nobody, although others have not left: it makes no update until they are back, or "
                "silent for a minute. Is it offline?"
            )
            return True
        if self._settings.client_mode:
            return bool(self._slots_near(0))  # nobody could download an update that a client makes alone
        return bool(self._slots_near(slot - EPOCHS_AHEAD if self._settings.overlaps else slot))

    def is_passed_over(self, slot: int, control: StepControl) -> bool:
        """Wait a while for a round that still looks for a group; returns whether most others are beyond it.

        Otherwise two halves of a run could wait for each other in the rounds of two fragments.
        """
        settings = self._settings
        if not settings.overlaps or settings.average == PARAMETERS:
            return False
        concurrent.futures.wait([control], settings.matchmaking_time)
        if control.done() or control.began_allreduce:
            return False
        last = slot + (self._fragments if settings.fragment_sync_delay is None else 1)
        others = self.voters(slot)
        return 2 * (1 + len(self._tracker.still_expected(dict.fromkeys(others, last)))) <= 1 + len(others)

    def _records(self) -> list[LocalTrainingProgress]:
        return self._board.companions_to_call(get_dht_time())

    def _slots_near(self, earliest: int) -> list[int]:
        """The slots of others that can be called and are at this slot or beyond it."""
        near = {PeerID(record.peer_id): record.epoch for record in self._records() if record.epoch >= earliest}
        return [near[peer] for peer in self._tracker.still_expected(dict.fromkeys(near, ANY_SLOT))]

    # --- which peers are there ----------------------------------------------------------------------------------------

    def everybody(self, now: float) -> set[bytes]:
        """All other known peers that can be reached, at any slot."""
        with self._board.lock:
            return self._reachable(now).keys() - self._board.strangers

    def electorate(self, now: float, earliest: int) -> set[PeerID]:
        """Other peers of which most must come to a round.

        These are all that may update what this peer updates, at any slot, and whether or not they are worth waiting
        for. Otherwise each of two halves of a run could believe that it has the majority: if they wait for nobody else,
        or if one is some slots ahead. A peer that missed a round it was expected in is not counted until it shows up,
        unless it advanced without this one. Newcomers are not counted while they may not join because other newcomers
        have cost too much time.

        Args:
            earliest: peers that this one has met count from this slot on; others, which may be newcomers, count from
                this peer's slot on.
        """
        board = self._board
        with board.lock:
            kin = board.kin(now)
            coming = expected_members(board.own.epoch, ANY_SLOT, kin, board.last_members, now)
            present = {peer for peer in coming if board.guard.has_time_for(peer, now)}
            met = {peer for peer, slot in self._slots_of_met(now).items() if slot >= earliest}
            return {PeerID(peer) for peer in present | met if not self._is_absent(peer)}

    def _is_absent(self, peer: bytes) -> bool:
        """Whether a peer was expected recently, and neither came nor, as far as it is believed, advanced."""
        slot = self._absent.get(peer)
        if slot is None:
            return False
        return self._board.companions[peer].record.epoch <= slot or not self._board.guard.is_proven(peer)

    def slots_of_companions(self, now: float) -> dict[bytes, int]:
        """The slots of others that can be called and were in a round with this peer."""
        with self._board.lock:
            return self._slots_of_met(now)

    def _slots_of_met(self, now: float) -> dict[bytes, int]:
        guard = self._board.guard
        return {peer: c.record.epoch for peer, c in self._reachable(now).items() if guard.has_met(peer)}

    def _reachable(self, now: float) -> dict[bytes, Companion]:
        companions = self._board.companions.items()
        return {peer: c for peer, c in companions if c.is_reachable(now) and not c.record.is_donor}

    def worth_waiting_for(self, peers: Collection[PeerID]) -> set[PeerID]:
        """The given peers that are worth waiting for."""
        with self._board.lock:
            found = self._board.guard.whom_to_wait_for({peer.to_bytes() for peer in peers}, get_dht_time())
            return set(map(PeerID, found))

    def is_cut_off(self, now: float) -> bool:
        """Whether this peer, which reaches nobody, is probably cut off, and the others are alive.

        It is if peers that it has met in rounds fell silent without a goodbye, and their systems did not refuse the
        call. If there is only one such peer, one of the two must continue: the one with the smaller id. Records of
        strangers prove nothing: anybody can publish records of peers that do not exist.

        Nobody can call a client, or download an update that it makes alone. So a client waits until the records of all
        others have expired, no matter how they fell silent.
        """
        board = self._board
        with board.lock:
            fell_silent = {
                peer: c
                for peer, c in board.companions.items()
                if c.unreachable_since is not None and c.expiration >= now and not c.record.is_donor
            }
            if board.own.client_mode:
                return bool(fell_silent)
            silent = [peer for peer, c in fell_silent.items() if not c.is_refused and board.guard.has_met(peer)]
            return len(silent) > 1 or any(peer < board.own.peer_id for peer in silent)
