"""Keeps a step that looks for a group informed about who is still coming."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Collection

from shoal.averaging import AveragingStage, StepControl
from shoal.errors import ShoalError
from shoal.optim.progress_tracker import ProgressTracker
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)


def usable(control: StepControl | None) -> bool:
    """Whether a step that was scheduled before can still be used."""
    return control is not None and not control.done() and not control.triggered


def log_failure(message: str, epoch: int, error: Exception) -> None:
    """Warn that a round failed: why, in words; with the traceback if it is none of the failures that must be expected.

    Args:
        message: with a place for the epoch and one for the reason.
    """
    reason, unexpected = str(error) or type(error).__name__, False
    if isinstance(error, concurrent.futures.CancelledError):
        reason = "the others have left or gone on"
    elif isinstance(error, TimeoutError):
        reason = "it took too long"
    elif not isinstance(error, ShoalError):
        unexpected = True
    logger.warning(message, epoch, reason, exc_info=error if unexpected else None)


class RoundWatch:
    """From now on the step knows how many members to wait for, and ends when nobody is left to wait for.

    Args:
        control: the step; watched until it is done.
        tracker: knows who is alive and at which epoch.
        among: the only peers that will come; default: whoever the tracker expects at this epoch.
        until_epoch: peers beyond this epoch have finished the round without this peer.
    """

    def __init__(
        self,
        control: StepControl,
        tracker: ProgressTracker,
        among: Collection[PeerID] | None = None,
        until_epoch: int | None = None,
    ) -> None:
        self._control, self._tracker, self._among, self._until_epoch = control, tracker, among, until_epoch
        tracker.watch(self._update)
        control.add_done_callback(lambda _: tracker.unwatch(self._update))
        self._update()

    def _update(self) -> None:
        control = self._control
        if control.done() or control.began_allreduce:
            return
        expected = self._tracker.expected_members(self._among, self._until_epoch)
        if expected:
            control.expected_group_size = 1 + len(expected)
        elif control.stage <= AveragingStage.LOOKING_FOR_GROUP:
            control.cancel()


def let_go(control: StepControl | None, timeout: float) -> None:
    """End a step that is not wanted any more without making its group wait.

    A group that is complete already would miss this peer, so it takes part there with weight 0.

    Args:
        timeout: seconds for that.
    """
    if control is None or control.done():
        return
    if control.stage <= AveragingStage.LOOKING_FOR_GROUP:
        control.cancel()
        return
    if not control.triggered:
        control.weight = 0.0
        control.allow_allreduce()
    try:
        concurrent.futures.wait([control], timeout)
    finally:
        control.cancel()
