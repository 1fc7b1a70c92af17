"""When a peer needs the state of others: it has fallen behind, or its branch of a split run has lost.

Both optimizers decide by :func:`needs_state`, and pace their attempts with :class:`Retries`::

    training ─ needs_state ─► download and adopt (recovery/adopt.py) ─► training
                   ▲               │ fails, or brings nothing new
                   └─── Retries ◄──┘

A failed download is tried again at once, because a donor may have been between two epochs or about to leave. After a
few failures there is a backoff with doubling pauses, because each attempt burdens the donors: it reads all their
records and asks some of them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.base.clock import get_dht_time
from shoal.base.logs import words_of
from shoal.errors import ShoalError
from shoal.optim.history.fork_choice import ForkChoice
from shoal.optim.history.journal import Lineage
from shoal.optim.history.window import is_behind, window_of

if TYPE_CHECKING:
    from shoal.optim.global_step import GlobalStep
    from shoal.optim.grad_averager import GradientAverager
    from shoal.optim.progress_tracker import ProgressTracker
    from shoal.optim.state_averager import TrainingStateAverager

logger = logging.getLogger(__name__)

# How many times a download is tried in one step of the optimizer; the next step tries again. Chosen.
LOAD_ATTEMPTS = 3
# Seconds before the second attempt; the pause doubles with each further attempt. Chosen: donors may be between two
# epochs.
FIRST_LOAD_PAUSE = 0.5
# The most seconds in which a peer asks whether the side to which it gives way is still there. Chosen: one that is dead
# refuses two calls in less.
SECONDS_TO_ASK = 1.0
# This many failed downloads in a row are each retried at once. Chosen: a single failure may be chance.
QUICK_RETRIES = 3
# Seconds of the first pause after that, and of the longest one; each pause is twice the one before. Chosen.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
# The most seconds that one call waits. Chosen: meanwhile the download may become unnecessary, or the caller be closed.
LONGEST_WAIT = 0.5


def needs_state(own: int, swarm: int, most_behind: int = 0, *, has_lost: bool = False, starts_at: int = 0) -> bool:
    """Whether a peer must download the state of another one before it continues.

    Args:
        own: its epoch or slot.
        swarm: that of the swarm.
        most_behind: a peer that is this much behind can still train with the others.
        has_lost: it is on a branch that has lost.
        starts_at: a newcomer must not begin before this epoch or slot.
    """
    return has_lost or is_behind(own, swarm, most_behind) or is_behind(own, starts_at)


class Retries:
    """Paces the attempts of one thread.

    Args:
        closing: set when nobody needs the result any more.
        now: seconds of a monotonic clock.
    """

    def __init__(self, closing: threading.Event, now: Callable[[], float] = time.monotonic) -> None:
        self._closing, self._now = closing, now
        self._failures, self._due_at = 0, -math.inf
        self._downloads_in_a_row = 0
        # When the latest attempt began, and when the one before it ended. Between them this peer made a batch.
        self._began_at = self._ended_at = -math.inf

    def is_time(self) -> bool:
        """Whether to try now. If not, this waits for a moment, so that the caller can poll it."""
        left = self._due_at - self._now()
        if left <= 0:
            self._began_at = self._now()
            return True
        self._closing.wait(min(left, LONGEST_WAIT))
        return False

    def note(self, *, succeeded: bool) -> None:
        """An attempt has ended."""
        self._failures = 0 if succeeded else self._failures + 1
        self._downloads_in_a_row = 0 if succeeded else self._downloads_in_a_row
        doublings = self._failures - QUICK_RETRIES - 1
        pause = 0.0 if doublings < 0 else min(FIRST_PAUSE * 2.0 ** min(doublings, 30), LONGEST_PAUSE)
        self._ended_at = self._now()
        self._due_at = self._ended_at + pause

    def note_download(self) -> None:
        """A state was downloaded. It counts as a failure until a round with others shows that it was useful."""
        # The batch since then was made in vain, and is measured nowhere else.
        batch_seconds = self._began_at - self._ended_at
        self.note(succeeded=False)
        self._downloads_in_a_row += 1
        if self._downloads_in_a_row == QUICK_RETRIES:
            logger.warning(
                "this peer has downloaded the state %d times in a row without a step with others: its batches take "
                "%.1f s. Give it smaller ones, or all a larger matchmaking_time",
                self._downloads_in_a_row,
                batch_seconds,
            )


class Synchronization:
    """Brings a peer that is behind to the swarm's epoch. Used only by the training thread.

    Args:
        state_averager: receives the downloaded state.
        grad_averager: forgets its gradients after a download; ``None`` with local updates.
        tracker: knows how far the swarm is.
        global_step: has rounds under way, in which others may wait for this peer.
        averaging_timeout: the longest time to finish these rounds, in seconds.
        load_state_timeout: the longest time for a download, in seconds.
        closing: set when the optimizer shuts down.
    """

    def __init__(
        self,
        state_averager: TrainingStateAverager,
        grad_averager: GradientAverager | None,
        tracker: ProgressTracker,
        global_step: GlobalStep,
        averaging_timeout: float,
        load_state_timeout: float,
        closing: threading.Event,
    ) -> None:
        self._state_averager, self._grad_averager = state_averager, grad_averager
        self._tracker, self._global_step = tracker, global_step
        self._averaging_timeout, self._load_state_timeout = averaging_timeout, load_state_timeout
        self._closing, self._overlaps = closing, global_step.options.mode.overlaps
        self._strict_check_due = True
        self._has_told_what_is_lost = False
        self.retries = Retries(closing)
        """When the next download may begin."""
        # Others must not get this peer's state now, although the user allows it.
        self._withholds_state = False

    def is_needed(self) -> bool:
        """Whether this peer must download the state before it continues."""
        tracker = self._tracker
        if tracker.gives_way_to is not None:
            return True
        # If the run is split again, the user is warned again.
        self._has_told_what_is_lost = False
        own, starts_at = self._state_averager.local_epoch, 0
        if self._strict_check_due and tracker.fetched_global_progress_this_epoch.is_set():
            starts_at = self._epoch_to_begin_with()
            # Until others have called it, a newcomer knows only records, which may be seconds old: look again.
            self._strict_check_due = own < starts_at or not tracker.is_introduced
        swarm = tracker.global_epoch
        # Averaging repairs a single epoch, unless nobody is left to average with.
        most_behind = 0 if is_behind(own, swarm) and self._would_continue_alone() else 1
        return needs_state(own, swarm, most_behind, starts_at=starts_at)

    def _would_continue_alone(self) -> bool:
        """Whether nobody is left for the next step, although others train.

        Always false if rounds overlap with training, because others may be waiting for this peer in the round in
        flight.
        """
        if self._overlaps or not self._tracker.is_introduced:
            return False
        return self._tracker.expected_group_size == 1

    def _epoch_to_begin_with(self) -> int:
        """The epoch from which this peer must begin.

        This is the swarm's epoch. If rounds overlap with training, others may already have announced the next epoch
        while they wait for this peer in the round before. Then it is the epoch at which they began to wait for it.
        """
        if self._overlaps and self._tracker.is_introduced:
            return self._tracker.epoch_when_introduced
        return self._tracker.global_epoch

    def is_time(self) -> bool:
        """Whether to download now; after failures, the next download has to wait."""
        if not self.retries.is_time():
            return False
        if self._tracker.gives_way_to is None:
            own, swarm = self._state_averager.local_epoch, self._tracker.global_epoch
            logger.info("this peer is at epoch %d, the swarm at %d: downloading its state", own, swarm)
        return True

    def is_close(self) -> bool:
        """Whether this peer is at most one epoch behind."""
        return not is_behind(self._state_averager.local_epoch, self._tracker.global_epoch, 1)

    def download(self, **options: Any) -> bool:
        """Take over another peer's state.

        Args:
            options: of the download, such as ``timeout`` in seconds.

        Returns:
            Whether there was a donor whose state fits and is not older than this one.
        """
        self.end_other_work()
        options = {"timeout": self._load_state_timeout, **options}
        began_at = get_dht_time()
        with self._tracker.pause_updates():
            other_side = self._tracker.gives_way_to
            loaded = self._try_to_download(options) if other_side is None else self._give_way_to(other_side, options)
            if not loaded:
                self._tracker.note_vain_attempt(get_dht_time() - began_at)
                self._tracker.look_after_others()  # the peers that were ahead may be gone
                return False
            epoch = self._tracker.global_epoch
            lacks_a_step = other_side is None and not self._overlaps and self._state_averager.local_epoch == epoch - 1
            if lacks_a_step:
                # The swarm has moved on by one epoch during the download; averaging repairs that difference.
                self._state_averager.local_epoch = epoch
            self.start_over()
            if lacks_a_step and self._state_averager.allow_state_sharing:
                # Until that round its state differs from that of others at this epoch, and would look broken to them.
                self._state_averager.allow_state_sharing, self._withholds_state = False, True
        return True

    def note_attempt(self, *, loaded: bool) -> None:
        """This peer has tried to download the state because it was behind. Downloads that the user asked for do not
        count. After a few failures, or downloads that did not help, further ones become rare.

        Args:
            loaded: whether the download has succeeded.
        """
        # A download after a split of the run has another reason, and the user has been warned of that.
        if loaded and not self._has_told_what_is_lost:
            self.retries.note_download()
        else:
            self.retries.note(succeeded=False)

    def end_other_work(self) -> None:
        """Finish rounds with other peers and work in the background. A silent peer delays all of this by at most the
        time of one round."""
        ends_at = time.monotonic() + self._averaging_timeout
        self._global_step.let_go_of_rounds(self._averaging_timeout)
        self._state_averager.let_go_of_searches()
        self._state_averager.finish_jobs(max(1.0, ends_at - time.monotonic()))

    def resume(self) -> None:
        """This peer has loaded a checkpoint, which may be older than the state of the swarm."""
        self._tracker.adopt_lineage(Lineage(), self._state_averager.local_epoch)
        self.start_over()
        self._strict_check_due = True

    def start_over(self) -> None:
        """This peer has another state than before: forget its gradients and announce its epoch."""
        if self._grad_averager is not None:
            self._grad_averager.reset_accumulated_grads_()
        self._tracker.update_epoch(self._state_averager.local_epoch)
        self.begin_epoch()

    def begin_epoch(self, *, with_others: bool = False) -> None:
        """This peer is at a new epoch: from now on newcomers prefer it to donors that are behind.

        Args:
            with_others: others were in the round that led there.
        """
        if with_others:
            self.retries.note(succeeded=True)
        if self._withholds_state:
            self._state_averager.allow_state_sharing, self._withholds_state = True, False
        self._strict_check_due = not self._overlaps
        if not self._state_averager.client_mode:
            self._state_averager.state_sharing_priority = self._state_averager.local_epoch

    def _give_way_to(self, other_side: ForkChoice, options: Mapping[str, Any]) -> bool:
        """Take over the state of the winning side, even if it is at an earlier epoch, if that side is still there."""
        self._tracker.ask_others(SECONDS_TO_ASK)
        if self._tracker.gives_way_to is None:
            logger.debug("the other side of the run is gone: this peer keeps its own state")
            return False
        self._tell_what_is_lost(other_side)
        averager = self._state_averager
        shares_state = averager.allow_state_sharing
        if shares_state:
            # Each of two sides may believe that it gives way. Then neither must get the other's state: both look again.
            averager.allow_state_sharing = False
        try:
            return self._try_to_download({**options, "accept_older": True}, gives_way=True)
        finally:
            if shares_state:
                averager.allow_state_sharing = True

    def _tell_what_is_lost(self, other_side: ForkChoice) -> None:
        if self._has_told_what_is_lost:
            return
        self._has_told_what_is_lost = True
        epochs = self._tracker.epochs_given_up
        logger.warning(
            "the run had come apart: this peer, at epoch %d, and a side of %d, at epoch %d. This peer takes over "
            "their state: %d samples in %d epochs are lost",
            self._state_averager.local_epoch,
            len(other_side.winners),
            other_side.epoch,
            epochs * self._tracker.target_batch_size,
            epochs,
        )

    def _try_to_download(self, options: Mapping[str, Any], *, gives_way: bool = False) -> bool:
        """Try a few times, with pauses, because donors may be between two epochs or about to leave."""
        loaded, pause = False, FIRST_LOAD_PAUSE
        attempts = LOAD_ATTEMPTS if gives_way or self._tracker.knows_others else 1
        for attempt in range(attempts):
            if attempt > 0:
                if self._closing.wait(pause) or (gives_way and self._tracker.gives_way_to is None):
                    break
                pause *= 2
            try:
                loaded = bool(self._state_averager.load_state_from_peers(**options)) or loaded
            except (ShoalError, TimeoutError) as e:
                logger.warning("could not download the training state: %s", words_of(e))
            own, usual_lag = self._state_averager.local_epoch, window_of(overlaps=self._overlaps).behind
            if loaded and (gives_way or not is_behind(own, self._tracker.global_epoch, usual_lag)):
                break
            if gives_way:
                self._tracker.look_after_others()
        return loaded
