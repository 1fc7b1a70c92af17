"""Keeping up with the swarm: notice that this peer is behind, and download the state of another one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.clock import get_dht_time
from shoal.errors import ShoalError
from shoal.optim.epochs import usual_lag
from shoal.optim.lineage import Lineage
from shoal.optim.sides import Verdict

if TYPE_CHECKING:
    from shoal.optim.global_step import GlobalStep
    from shoal.optim.grad_averager import GradientAverager
    from shoal.optim.progress_tracker import ProgressTracker
    from shoal.optim.state_averager import TrainingStateAverager

logger = logging.getLogger(__name__)

# Seconds for which the first step waits to learn how far the swarm is.
FIRST_FETCH_TIMEOUT = 5.0

LOAD_ATTEMPTS = 3
# Seconds before the second attempt to download a state; doubles with every further one.
FIRST_LOAD_PAUSE = 0.5


class Synchronization:
    """Brings a peer that is behind to the swarm's epoch. Used by the training thread alone.

    Args:
        state_averager: what is downloaded.
        grad_averager: what is forgotten then; ``None`` with local updates.
        tracker: knows how far the swarm is.
        global_step: has rounds under way, in which others may wait for this peer.
        averaging_timeout: seconds within which these rounds end.
        load_state_timeout: seconds for a download.
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
        self._closing, self._overlaps = closing, global_step.settings.overlaps
        self._usual_lag = usual_lag(overlaps=self._overlaps)
        self._strict_check_due = True
        self._has_looked = False
        self._has_told_what_is_lost = False

    def is_needed(self) -> bool:
        """Whether this peer must download the state before it goes on."""
        tracker, fetched = self._tracker, self._tracker.fetched_global_progress_this_epoch
        if not self._has_looked:
            self._has_looked = True
            fetched.wait(FIRST_FETCH_TIMEOUT)
        if tracker.gives_way_to is not None:
            return True
        # Should the run come apart again, that is told again.
        self._has_told_what_is_lost = False
        if self._strict_check_due and fetched.is_set():
            if self._state_averager.local_epoch < self._epoch_to_begin_with():
                return True
            # before others have told it directly, a newcomer knows only records, which may be seconds old
            self._strict_check_due = not tracker.is_introduced
        behind = tracker.global_epoch - self._state_averager.local_epoch
        return behind > 1 or (behind == 1 and self._would_go_on_alone())

    def _would_go_on_alone(self) -> bool:
        """Whether nobody is left to make the next step with, although others train.

        Where rounds overlap with training, the others may wait for this peer in the round under way.
        """
        if self._overlaps or not self._tracker.is_introduced:
            return False
        return self._tracker.expected_group_size == 1

    def _epoch_to_begin_with(self) -> int:
        """The swarm's epoch, as far as others have not begun it while they wait for this peer in an earlier round."""
        if self._overlaps and self._tracker.is_introduced:
            return self._tracker.epoch_when_introduced
        return self._tracker.global_epoch

    def is_close(self) -> bool:
        """Whether this peer is at most one epoch behind."""
        return self._state_averager.local_epoch >= self._tracker.global_epoch - 1

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
            loaded = self._try_to_download(**options) if other_side is None else self._give_way_to(other_side, options)
            if not loaded:
                self._tracker.note_vain_attempt(get_dht_time() - began_at)
                self._tracker.look_after_others()  # whoever was ahead may be gone
                return False
            if other_side is not None:
                self._begin_anew()
                return True
            epoch = self._tracker.global_epoch
            if self._usual_lag == 0 and self._state_averager.local_epoch == epoch - 1:
                # the swarm is faster than the download; averaging repairs the difference
                self._state_averager.local_epoch = epoch
            self._begin_anew()
        return True

    def end_other_work(self) -> None:
        """Finish what is under way with other peers, and in the background."""
        self._global_step.let_go_of_rounds(self._averaging_timeout)
        self._state_averager.let_go_of_searches()
        self._state_averager.finish_jobs(self._averaging_timeout)

    def resume(self) -> None:
        """This peer has the state of a checkpoint, which may be older than that of the swarm."""
        self._tracker.adopt_lineage(Lineage(), self._state_averager.local_epoch)
        self._begin_anew()
        self._strict_check_due = True

    def _begin_anew(self) -> None:
        """This peer has another state than before: forget its gradients and tell its epoch."""
        if self._grad_averager is not None:
            self._grad_averager.reset_accumulated_grads_()
        self._tracker.update_epoch(self._state_averager.local_epoch)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """This peer is at a new epoch: newcomers prefer it to those that are behind."""
        self._strict_check_due = self._usual_lag == 0
        if not self._state_averager.client_mode:
            self._state_averager.state_sharing_priority = self._state_averager.local_epoch

    def _give_way_to(self, other_side: Verdict, options: Mapping[str, Any]) -> bool:
        """Take over the state of another side of the run, also if it is at an earlier epoch."""
        self._tell_what_is_lost(other_side)
        averager, pause = self._state_averager, FIRST_LOAD_PAUSE
        shares_state = averager.allow_state_sharing
        if shares_state:
            # If they think that it is they who give way, both must look again.
            averager.allow_state_sharing = False
        try:
            for _ in range(LOAD_ATTEMPTS):
                if self._load(accept_older=True, **options):
                    return True
                self._tracker.look_after_others()
                if self._closing.wait(pause) or self._tracker.gives_way_to is None:
                    break
                pause *= 2
        finally:
            if shares_state:
                averager.allow_state_sharing = True
        return False

    def _tell_what_is_lost(self, other_side: Verdict) -> None:
        if self._has_told_what_is_lost:
            return
        self._has_told_what_is_lost = True
        epochs = self._tracker.epochs_given_up
        logger.warning(
            "the run had come apart: this peer, at epoch %d, and a side of %d, at epoch %d, have trained without each "
            "other. Their state is kept, because they had more weight in the last common step or are further. This "
            "peer downloads it, and the work of its side on %d samples, in %d epochs, is lost",
            self._state_averager.local_epoch,
            len(other_side.winners),
            other_side.epoch,
            epochs * self._tracker.target_batch_size,
            epochs,
        )

    def _load(self, **options: Any) -> bool:
        try:
            return bool(self._state_averager.load_state_from_peers(**options))
        except (ShoalError, TimeoutError) as e:
            logger.warning("could not download the training state: %s", str(e) or type(e).__name__)
            return False

    def _try_to_download(self, **options: Any) -> bool:
        """Try a few times, with pauses: donors may be between two epochs, or just leaving."""
        loaded, pause = False, FIRST_LOAD_PAUSE
        attempts = LOAD_ATTEMPTS if self._tracker.knows_others else 1
        for attempt in range(attempts):
            if attempt > 0:
                if self._closing.wait(pause):
                    break
                pause *= 2
            loaded = self._load(**options) or loaded
            if loaded and self._state_averager.local_epoch >= self._tracker.global_epoch - self._usual_lag:
                break
        return loaded
