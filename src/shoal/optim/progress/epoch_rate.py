"""How fast the run can be: from the epochs that this peer was in, how far others can have come while it was away."""

from __future__ import annotations

import math
import statistics
from collections import deque

# A peer that has been in no round for the time of this many epochs may have missed any number of them.
_EPOCHS_TO_BE_AWAY = 2
# The shortest epoch counts for so much less than the usual one at most: a liar may have ended one at once.
_MOST_HASTE = 4.0
# How many of the latest epochs tell how fast the run can be.
EPOCHS_TIMED = 16
# The others may be this many times as fast as they were.
_GENEROSITY = 2.0
# Lower bound of all durations, because rates are divided by them.
LEAST_SECONDS = 1e-3


class EpochRate:
    """The pace of the run, as one peer has seen it.

    Args:
        now: DHT time, in seconds, as in all methods.
    """

    def __init__(self, now: float) -> None:
        self.began_at = now
        """When this peer's epoch began."""
        self.trained_until = now
        """When it was ready for its latest round."""
        self.contact: tuple[int, float] | None = None
        """The epoch at which this peer last met others or took over a state, and when; ``None``: it is a newcomer."""
        self.is_first_epoch = True
        """It has made no step, and has taken over no state, since it began."""
        # Of the latest epochs: how many seconds each took, and how many of them were training.
        self._epochs: deque[tuple[float, float]] = deque(maxlen=EPOCHS_TIMED)

    def note_epoch(self, before: int, epoch: int, now: float, *, with_others: bool) -> None:
        """This peer has gone from one epoch to another.

        Args:
            with_others: in a round with others. If ``epoch`` is not the next one, this peer has taken over a state.
        """
        began_at, self.began_at, self.is_first_epoch = self.began_at, now, False
        is_next = epoch == before + 1
        if is_next and not with_others:
            return
        if is_next:
            self._epochs.append((now - began_at, max(self.trained_until - began_at, LEAST_SECONDS)))
        self.contact = epoch, now

    def begin_anew(self) -> None:
        """Know no more of the run than a newcomer does."""
        self.contact, self.is_first_epoch = None, True

    @property
    def usual_epoch(self) -> float:
        """Seconds that an epoch takes; infinite if this peer was in none."""
        return statistics.median(whole for whole, _ in self._epochs) if self._epochs else math.inf

    def reach(self, own: int, now: float) -> float:
        """The last epoch that others can have reached if they went on when this peer last met them.

        Args:
            own: this peer's epoch.
        """
        if self.contact is None or not self._epochs:
            return own
        epoch, since = self.contact
        away = now - since
        if away < _EPOCHS_TO_BE_AWAY * self.usual_epoch:
            return own
        seconds = [training for _, training in self._epochs]
        return epoch + _GENEROSITY * away / max(min(seconds), statistics.median(seconds) / _MOST_HASTE)
