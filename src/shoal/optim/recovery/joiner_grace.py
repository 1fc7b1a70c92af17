"""A peer that trains alone waits for those that download its state.

Alone, a peer with a small model may make ten epochs in a second. A download takes longer, so a newcomer would be behind
whenever it has one, and download the next. So a lone peer that has the samples of its epoch does not end it while
somebody downloads its state, or has just got it and is about to say that it takes part: both go on from one epoch.

The time comes from the budget of :mod:`shoal.guard.budget`, whoever asks for the state.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.optim.progress_tracker import ProgressTracker

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
