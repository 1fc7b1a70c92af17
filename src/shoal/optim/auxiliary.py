"""A peer without data, which only helps others to average."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.base.clock import get_dht_time
from shoal.optim.state_jobs import let_go

if TYPE_CHECKING:
    from shoal.averaging import StepControl
    from shoal.optim.progress_tracker import ProgressTracker

logger = logging.getLogger(__name__)


class Auxiliary:
    """Takes part in all rounds of the others without data, and never keeps them waiting. Used only by the training
    thread.

    It has no batches to wait for. So it always looks for a group, for each kind of round, and is ready as soon as it
    has found one. It promises a late time, so that others lead.

    Args:
        searches: for each kind of round, begins to look for a group. Takes ``scheduled_time`` and ``timeout``, and
            returns a control that waits for a trigger.
        tracker: knows how far the swarm is.
        averaging_timeout: how long one search for a group lasts, in seconds.
        follow: called with the epoch of the swarm when it is a later one.
    """

    def __init__(
        self,
        searches: Sequence[Callable[..., StepControl]],
        tracker: ProgressTracker,
        averaging_timeout: float,
        follow: Callable[[int], None],
    ) -> None:
        self._searches, self._tracker, self._averaging_timeout = searches, tracker, averaging_timeout
        self._follow, self._epoch = follow, 0
        self._controls: list[StepControl | None] = [None] * len(searches)

    def step(self) -> None:
        """Start searches for groups that are not under way, and follow the swarm's epoch. Returns at once."""
        for index, search in enumerate(self._searches):
            control = self._controls[index]
            if control is None or control.done():
                self._controls[index] = self._look_for_group(search)
        epoch = self._tracker.global_epoch
        if epoch > self._epoch:
            self._epoch = epoch
            self._follow(epoch)
            with self._tracker.pause_updates():
                self._tracker.update_epoch(epoch)
            logger.debug("the swarm is at epoch %d", epoch)

    def _look_for_group(self, search: Callable[..., StepControl]) -> StepControl:
        # The peer that promised the earliest start leads, so this one promises a late start, which is still in time.
        late = get_dht_time() + 0.9 * self._averaging_timeout
        control = search(scheduled_time=late, timeout=self._averaging_timeout)
        control.weight = 0.0
        control.allow_allreduce()
        return control

    def let_go_of_rounds(self) -> None:
        """Look for no more groups, and finish the rounds that have begun."""
        controls, self._controls = self._controls, [None] * len(self._controls)
        let_go(controls, self._averaging_timeout)
