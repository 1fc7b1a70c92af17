"""The exchanges of one peer with the others: they begin at the ends of slots, and are applied when due."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterable

from shoal.base.clock import get_dht_time
from shoal.errors import AllreduceException
from shoal.optim.diloco.checkpoint import OuterCheckpoint
from shoal.optim.diloco.fragment_updates import FragmentUpdates, OuterRound
from shoal.optim.diloco.messages import PARAMETERS
from shoal.optim.diloco.outer_averager import OuterAverager, tag_of
from shoal.optim.diloco.settings import OuterSettings
from shoal.optim.diloco.slots import Attendance, group_of
from shoal.optim.joint_optimizer import Auxiliary, let_go, log_failure, watch_search
from shoal.optim.progress_tracker import ProgressTracker
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)


class OuterRounds:
    """Makes rounds of fragments. Used only by the training thread.

    Args:
        tracker: knows the progress of all peers.
        averager: has the fragments, and exchanges them.
    """

    def __init__(self, settings: OuterSettings, tracker: ProgressTracker, averager: OuterAverager) -> None:
        self.settings, self.tracker, self.averager, donor = settings, tracker, averager, averager.donor
        self.counter, self.fragments, self.inner, self.lock = donor.counter, donor.fragments, donor.inner, donor.lock
        self.attendance = Attendance(tracker, settings, len(donor.fragments))
        """Predicts which peers come to rounds."""
        self.last: OuterRound | None = None
        """The outer update that was applied last."""
        self.has_trained = False
        """This peer has made inner steps, or has taken over a state."""

    def end_slot(self) -> None:
        """Begin the round that ends this slot, and go to the next one; or leave that to a later step."""
        slot, overlaps, attendance = self.counter.slot, self.settings.overlaps, self.attendance
        if (earlier := attendance.slot_to_go_back_to(slot)) is not None:
            with self.tracker.pause_updates():
                self.go_to(earlier)
            return
        if attendance.lets_others_catch_up(slot):
            return
        each = self.fragments[self.counter.schedule.fragment_of(slot)]
        self._land(each)  # the round before, if it is still under way
        with self.tracker.pause_updates():
            self.tracker.declare_epoch_over(self.settings.straggler_patience)
            expected, group = attendance.expected(slot), self._draw_group(each.number)
            last = attendance.last_slot(slot) if overlaps or group is not None else None
            coming = expected if group is None else group
            # If others train but none of them comes, nobody else would have this peer's update.
            if coming or self.settings.average == PARAMETERS or not attendance.others_are_there(slot):
                try:
                    self._take_off(each, slot, coming, last, is_drawn=group is not None)
                except BaseException:  # such as Ctrl-C: a flight without a control would become an update alone
                    each.give_up()
                    raise
            if not overlaps:
                self._land(each)
            self.go_to(slot + 1, expected)
        logger.log(self.settings.status_loglevel, "slot %d begins", self.counter.slot)

    def _draw_group(self, fragment: int) -> set[PeerID] | None:
        """The peers to meet at the end of this slot; ``None``: all others."""
        size, slot = self.averager.group_size, self.counter.slot
        if self.settings.average != PARAMETERS or size is None or self.counter.schedule.sync_every is None:
            return None
        others = self.attendance.everybody(get_dht_time())
        if len(others) < size:
            return None
        bits, members = group_of(self.tracker.board.own.peer_id, others, slot, size)
        self.averager.meet_under(fragment, bits)
        return {PeerID(member) for member in members}

    def go_to(self, slot: int, members: Iterable[PeerID] = ()) -> None:
        """Go to another slot, and tell the others. Call it inside ``pause_updates()``."""
        self.counter.go_to(slot)
        if self.counter.schedule.sync_every is not None:
            self.tracker.board.set_target(self.counter.schedule.steps_of(slot))
        self.tracker.update_epoch(slot, members=list(members))
        if not self.averager.client_mode:
            self.averager.state_sharing_priority = slot

    def begin_run(self) -> None:
        """Begin with the model's parameters: the user may have loaded others since this object was made."""
        if not self.has_trained:
            for each in self.fragments:
                each.begin_run()

    def helping(self) -> Auxiliary:
        """The part of a peer without data."""
        searches = [functools.partial(self.averager.help, each.number) for each in self.fragments]
        return Auxiliary(searches, self.settings.averaging_timeout)

    def restore(self, saved: OuterCheckpoint, timeout: float) -> None:
        """Continue from a checkpoint.

        Args:
            timeout: the longest time to leave the rounds under way, in seconds.
        """
        if saved.differences:
            logger.warning("the checkpoint is of a run with other settings: %s", saved.differences)
        self.let_go(timeout)
        counter, place = self.counter, saved.counter
        with self.tracker.pause_updates():
            for fragment, own in zip(saved.fragments, self.fragments, strict=True):
                fragment.put_in_place(own)
            self.go_to(place.slot)
            counter.steps, counter.samples, counter.inner_steps = place.steps, place.samples, place.inner_steps
            self.report()
        self.has_trained, self.last = True, None

    def report(self) -> None:
        """Tell the others what this peer has done in its slot."""
        self.tracker.report_local_progress(self.counter.slot, self.counter.done)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _take_off(
        self, each: FragmentUpdates, slot: int, expected: set[PeerID], last: int | None, *, is_drawn: bool
    ) -> None:
        """Begin a round with the expected peers.

        Args:
            last: a peer beyond this slot no longer comes; ``None``: this peer's slot.
            is_drawn: the group was drawn, so nobody else can come.
        """
        settings = self.settings
        # A newcomer counts if it has made half of the steps.
        half = -(-(self.counter.schedule.sync_every or 0) // 2)
        least, each.contribution.is_fresh = half if each.contribution.is_fresh else 0, False
        flight = each.begin(slot, least)
        if not expected:
            self.attendance.note(flight, 0.0)
            return
        if each.number == 0:
            self.averager.donor.extra.read(self.averager.extra)
        # A drawn group is never most of the run.
        needs_most = not is_drawn and settings.average != PARAMETERS
        electorate = expected | self.attendance.voters(slot) if needs_most else set()
        timeout = settings.averaging_timeout
        patience = min(settings.straggler_patience + settings.matchmaking_time, 0.9 * timeout)
        control = self.averager.step(
            gather=each.statement(1 + len(electorate or expected), self.counter.done).dump(),
            scheduled_time=get_dht_time() + patience,
            weight=flight.weight,
            allow_retries=not is_drawn,  # others would not find this peer a second time
            timeout=timeout,
            wait=False,
            tag=tag_of(each.number),
        )
        assert not isinstance(control, dict)
        flight.control, flight.expected = control, expected
        last_slots = None if last is None else dict.fromkeys(expected, last)
        watch_search(control, self.tracker, last_slots, dict.fromkeys(electorate, slot + self.attendance.reach))

    def apply_what_is_due(self) -> None:
        for each in self.fragments:
            flight = each.flight
            if flight is None:
                continue
            is_over = flight.control is None or flight.control.done()
            if flight.left == 0 or (flight.left is None and is_over and flight.steps_since > 0):
                self._land(each)

    def _land(self, each: FragmentUpdates) -> None:
        """Wait for the result of a round, if one is under way, and bring it into the model."""
        flight = each.flight
        if flight is None:
            return
        began_at = time.monotonic()
        if flight.control is not None:
            try:
                if self.attendance.is_passed_over(flight.slot, flight.control):
                    raise AllreduceException("most others have continued without it")
                flight.control.result(self.settings.averaging_timeout)
            except Exception as e:  # after any failure, training continues
                flight.control.cancel()
                if flight.control.began_allreduce or self.attendance.others_are_there(flight.slot):
                    self.attendance.note(flight, None)
                    log_failure("the round of slot %d has failed (%s): it is made up for", flight.slot, e)
                    each.give_up()
                    return
            except BaseException:
                flight.control.cancel()
                raise
        has_met_others = flight.control is not None and flight.control.round is not None
        if has_met_others:
            # If rounds overlap with training, absent peers hold it up less, or not at all.
            self.attendance.note(flight, time.monotonic() - began_at)
        each.journal.serves_newcomers = self.averager.is_giving
        done = each.land(flight.result)
        if not flight.message.is_finite:
            logger.warning("this peer's parameters were not finite: it continues from those of the swarm")
            each.reset_model()
            self.inner.forget_what_is_not_finite()
        if done is not None:
            if each.number == 0 and has_met_others:
                self.averager.donor.extra.write(self.averager.extra)
            self.last = done
            self._tell(done)

    def _tell(self, done: OuterRound) -> None:
        logger.log(
            self.settings.status_loglevel,
            "round %d of fragment %d: %d peers, %.2f s, %.0f kB%s",
            done.slot,
            done.fragment,
            len(done.peers),
            done.seconds,
            done.bytes_sent / 1e3,
            self._advice(done),
        )

    def _advice(self, done: OuterRound) -> str:
        """The delay that would have hidden a round from training, in words; empty if there is none, or if the round was
        hidden."""
        delay, every = self.settings.fragment_sync_delay, self.counter.schedule.sync_every
        step = self.tracker.board.batch_time
        if delay is None or not step or len(done.peers) == 1:
            return ""
        needed = math.ceil(done.seconds / step)
        return f"; fragment_sync_delay={needed} would hide it" if delay < needed < (every or math.inf) else ""

    def end_flights(self) -> None:
        for each in self.fragments:
            self._land(each)

    def let_go(self, timeout: float) -> None:
        """Leave all rounds without making others wait."""
        let_go([each.flight.control for each in self.fragments if each.flight is not None], timeout)
