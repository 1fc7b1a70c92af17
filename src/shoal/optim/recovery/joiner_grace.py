"""A peer that trains alone waits for those that download its state.

Alone, a peer with a small model may make ten epochs in a second. A download takes longer, so a newcomer would be behind
whenever it has one, and download the next. So a lone peer that has the samples of its epoch does not end it while
somebody downloads its state, or has just got it and is about to say that it takes part: both go on from one epoch.

This takes a twentieth of the time at most, whoever asks for the state: each second of an epoch gives some more time to
wait, until there is enough for a slow download.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from shoal.optim.members import SHARE_WASTED
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.optim.progress_tracker import ProgressTracker

LONGEST_HOLD = 30.0
"""How many seconds a peer waits at most at a time. It has so many at the beginning, too."""

LEAST_HOLD = 2.0
"""With less time than this left, it does not begin to wait, because hardly any newcomer would be there by then."""

SECONDS_BETWEEN_LOOKS = 0.05
"""How often a waiting peer looks whether it still has a reason to."""


def awaits_newcomers(tracker: ProgressTracker, epoch: int, last_epoch: int, newcomers: Collection[PeerID]) -> bool:
    """Whether a peer that is done with its epoch has a reason to wait.

    Args:
        tracker: knows whether others train.
        epoch: this peer's epoch.
        last_epoch: a peer beyond this epoch does not come to its first round.
        newcomers: who downloads its state, or has just got it.
    """
    if not newcomers or tracker.gives_way_to is not None or tracker.global_epoch > epoch:
        return False
    return not tracker.expected_members(until_epoch=last_epoch)


class JoinerGrace:
    """How long a lone peer has waited for newcomers, and whether it has time left to. Times are seconds of any clock.

    Args:
        now: when this peer began.
    """

    def __init__(self, now: float) -> None:
        self._seconds, self._since = LONGEST_HOLD, now
        self._began_at: float | None = None

    def lasts(self, now: float, *, has_reason: bool) -> bool:
        """Whether to wait from now on, or to wait on. Ask again after a moment, until the answer is no.

        Args:
            has_reason: somebody is on the way, and nobody else is there to train with.
        """
        if self._began_at is None:
            if not has_reason:
                return False
            seconds = min(LONGEST_HOLD, self._seconds + SHARE_WASTED * (now - self._since))
            if seconds < LEAST_HOLD:
                return False
            self._seconds, self._began_at = seconds, now
        left = self._seconds - (now - self._began_at)
        if has_reason and left > 0:
            return True
        # It may be less than nothing, because nobody asks at the very moment when the time is up.
        self._seconds, self._since, self._began_at = left, now, None
        return False
