"""A peer without data of its own that helps others to average."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shoal.averaging import StepControl
from shoal.clock import get_dht_time
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.progress_tracker import ProgressTracker
from shoal.optim.round_watch import let_go
from shoal.optim.state_averager import TrainingStateAverager

logger = logging.getLogger(__name__)


class Auxiliary:
    """Takes part in whatever rounds the others make, and never keeps them waiting. Used by the training thread alone.

    It has nothing to wait for itself, so it is always looking for a group, for each kind of round, and ready as soon as
    there is one. Its promised time is late: others lead.

    Args:
        state_averager: for rounds of parameters; its epoch follows that of the swarm.
        grad_averager: for rounds of gradients, if there are any.
        tracker: knows how far the swarm is.
        averaging_timeout: seconds of one search for a group.
    """

    def __init__(
        self,
        state_averager: TrainingStateAverager,
        grad_averager: GradientAverager | None,
        tracker: ProgressTracker,
        averaging_timeout: float,
    ) -> None:
        self._state_averager, self._tracker, self._averaging_timeout = state_averager, tracker, averaging_timeout
        self._averagers: Sequence[GradientAverager | TrainingStateAverager] = (
            [state_averager] if grad_averager is None else [grad_averager, state_averager]
        )
        self._controls: list[StepControl | None] = [None] * len(self._averagers)

    def step(self) -> None:
        """See to it that this peer looks for groups; returns at once."""
        for index, averager in enumerate(self._averagers):
            control = self._controls[index]
            if control is None or control.done():
                self._controls[index] = self._look_for_group(averager)
        epoch = self._tracker.global_epoch
        if epoch > self._state_averager.local_epoch:
            self._state_averager.local_epoch = epoch
            with self._tracker.pause_updates():
                self._tracker.update_epoch(epoch)
            logger.debug("the swarm is at epoch %d", epoch)

    def _look_for_group(self, averager: GradientAverager | TrainingStateAverager) -> StepControl:
        late = get_dht_time() + 0.9 * self._averaging_timeout
        control = averager.schedule_step(scheduled_time=late, timeout=self._averaging_timeout)
        control.weight = 0.0
        control.allow_allreduce()
        return control

    def let_go_of_rounds(self) -> None:
        """Look for no more groups, and finish what has begun."""
        controls, self._controls = self._controls, [None] * len(self._averagers)
        for control in controls:
            let_go(control, self._averaging_timeout)
