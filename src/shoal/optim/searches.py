"""Searches for a group, which both optimizers begin before a round is due: watch one, withdraw from it, help others."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.averaging import AveragingStage, StepControl
from shoal.base.clock import get_dht_time
from shoal.base.logs import words_of
from shoal.errors import ShoalError
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.optim.progress_tracker import ProgressTracker

logger = logging.getLogger(__name__)


def usable(control: StepControl | None) -> bool:
    """Whether a scheduled step can still be used."""
    return control is not None and not control.done() and not control.triggered


def log_failure(message: str, epoch: int, error: Exception, *, may_be_late: bool = False) -> None:
    """Warn that a round failed, with the reason in words. An unexpected error is logged with its traceback.

    Args:
        message: format of the message, with a place for the epoch and one for the reason.
        epoch: the epoch that the round ends.
        error: what the round raised.
        may_be_late: a round that the others have had without this peer is no reason to warn: this peer catches up.
    """
    reason, unexpected, level = words_of(error), False, logging.WARNING
    if isinstance(error, concurrent.futures.CancelledError):
        reason, level = "the others have left or gone on", logging.INFO if may_be_late else level
    elif isinstance(error, TimeoutError):
        reason = "it took too long"
    elif not isinstance(error, ShoalError):
        unexpected = True
    logger.log(level, message, epoch, reason, exc_info=error if unexpected else None)


def let_go(controls: Iterable[StepControl | None], timeout: float) -> None:
    """Withdraw from scheduled steps without making their groups wait.

    A group that is complete would wait for this peer, so this peer takes part in it with weight 0.

    Args:
        controls: the steps; ``None`` is ignored.
        timeout: the longest time to take part in all of them together, in seconds.
    """
    begun = []
    for control in controls:
        if control is None or control.done():
            continue
        if control.stage <= AveragingStage.LOOKING_FOR_GROUP:
            control.cancel()
            continue
        if not control.triggered:
            control.weight = 0.0
            control.allow_allreduce()
        begun.append(control)
    try:
        concurrent.futures.wait(begun, timeout)
    finally:
        for control in begun:
            control.cancel()


def watch_search(
    control: StepControl,
    tracker: ProgressTracker,
    last_epochs: Mapping[PeerID, int] | None = None,
    electorate: Mapping[PeerID, int] | None = None,
) -> None:
    """Until a step is done, tell it how many members to wait for, and cancel it when no other peer will come.

    Args:
        control: the step.
        tracker: knows which peers are alive, and their epochs.
        last_epochs: the only peers that can come. A peer beyond the epoch given for it has finished the round without
            this peer. Default: the peers that the tracker expects.
        electorate: together with this peer, more than half of these must come; ``last_epochs`` says what the numbers
            mean. Default: none.
    """
    voters = electorate or {}
    majority = (1 + len(voters)) // 2 + 1

    def look() -> None:
        if control.done() or control.began_allreduce:
            return
        expected = tracker.expected_members() if last_epochs is None else tracker.still_expected(last_epochs)
        if expected and 1 + len(tracker.still_expected(voters)) >= majority:
            # Two halves of a run that expect only their own members would both be complete at once, and never meet.
            control.expect(expected, least=majority)
        elif control.stage <= AveragingStage.LOOKING_FOR_GROUP:
            control.cancel()

    tracker.watch(look)
    control.on_retry = look  # a peer that has left in the meantime will not come
    control.add_done_callback(lambda _: tracker.unwatch(look))
    look()


class Auxiliary:
    """Takes part in all rounds of the others without data, and never keeps them waiting. Used only by the training
    thread.

    It has no batches to wait for. So it always looks for a group, for each kind of round, and is ready as soon as it
    has found one. It promises a late time, so that others lead.

    Args:
        searches: for each kind of round, begins to look for a group. Takes ``scheduled_time`` and ``timeout``, and
            returns a control that waits for a trigger.
        averaging_timeout: how long one search for a group lasts, in seconds.
    """

    def __init__(self, searches: Sequence[Callable[..., StepControl]], averaging_timeout: float) -> None:
        self._searches, self._averaging_timeout = searches, averaging_timeout
        self._controls: list[StepControl | None] = [None] * len(searches)

    def look_for_groups(self) -> None:
        """Start the searches that are not under way. Returns at once."""
        for index, search in enumerate(self._searches):
            control = self._controls[index]
            if control is None or control.done():
                self._controls[index] = self._look_for_group(search)

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
