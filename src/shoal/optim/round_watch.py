"""Ends a peer's search for a group when the others have had their round, or are gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.averaging.control import AveragingStage, StepControl
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.optim.progress_tracker import ProgressTracker


class RoundWatch:
    """Tells an averaging step how many members to wait for, and cancels it when no other peer will come.

    Args:
        control: the step, which is watched until it is done.
        tracker: knows which peers are alive, and their epochs.
        last_epochs: the only peers that can come. A peer beyond the epoch given for it has finished the round without
            this peer. Default: the peers that the tracker expects.
        electorate: peers of which, with this one, more than half must come, likewise. Default: none.
    """

    def __init__(
        self,
        control: StepControl,
        tracker: ProgressTracker,
        last_epochs: Mapping[PeerID, int] | None = None,
        electorate: Mapping[PeerID, int] | None = None,
    ) -> None:
        self._control, self._tracker = control, tracker
        self._last_epochs, self._electorate = last_epochs, electorate or {}
        tracker.watch(self._update)
        control.on_retry = self._update  # those that have gone in the meantime will not come
        control.add_done_callback(lambda _: tracker.unwatch(self._update))
        self._update()

    def _update(self) -> None:
        control = self._control
        if control.done() or control.began_allreduce:
            return
        last_epochs, tracker = self._last_epochs, self._tracker
        expected = tracker.expected_members() if last_epochs is None else tracker.still_expected(last_epochs)
        if expected and self._can_be_most():
            # Two halves of a run that expect only their own members would both be complete at once, and never meet.
            control.expect(expected, least=self._majority)
        elif control.stage <= AveragingStage.LOOKING_FOR_GROUP:
            control.cancel()

    @property
    def _majority(self) -> int:
        """How many of the electorate and this peer are most of them."""
        return (1 + len(self._electorate)) // 2 + 1

    def _can_be_most(self) -> bool:
        return 1 + len(self._tracker.still_expected(self._electorate)) >= self._majority
