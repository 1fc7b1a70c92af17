"""How fast bytes arrive, and when to rest so that no more arrive than are wanted."""

from __future__ import annotations

import math
from collections import deque

# The speed of a download is measured over so many seconds.
SPEED_SECONDS = 10.0
# From this share of the rate on, the limit decides how fast the download is, and not the donors.
_SHARE_OF_LIMIT = 0.7
# After a pause of the donors, the bytes of so many seconds may come at once.
_BURST_SECONDS = 1.0


class RateMeter:
    """Measures how fast bytes arrive, and limits it.

    Args:
        now: the loop's time in seconds.
        rate: so many bytes in a second are wanted at most.
    """

    def __init__(self, now: float, rate: float = math.inf) -> None:
        self.began_at = now
        self.total = 0
        self._rate, self._enough_until = rate, now
        # Marks of the latest seconds: a time, and how many bytes had arrived before it.
        self._marks: deque[tuple[float, int]] = deque([(now, 0)])

    def anew(self, now: float) -> RateMeter:
        """Begin to measure again, with the same limit."""
        return RateMeter(now, self._rate)

    def add(self, nbytes: int, now: float) -> None:
        """Note that so many bytes have just arrived."""
        if now - self._marks[-1][0] >= SPEED_SECONDS / 16:
            self._marks.append((now, self.total))
            self._forget(now)
        self.total += nbytes
        self._enough_until = max(self._enough_until, now - _BURST_SECONDS) + nbytes / self._rate

    def _forget(self, now: float) -> None:
        while len(self._marks) > 1 and self._marks[1][0] <= now - SPEED_SECONDS:
            self._marks.popleft()

    def recent(self, now: float) -> float:
        """Bytes per second, over the last ``SPEED_SECONDS``."""
        self._forget(now)
        since, before = self._marks[0]
        return (self.total - before) / max(now - since, 1e-9)

    def seconds_to_rest(self, now: float) -> float:
        """For how many seconds no more bytes should be taken."""
        return max(0.0, self._enough_until - now)

    def is_at_limit(self, now: float) -> bool:
        """Whether more or other donors would not bring the bytes any sooner."""
        return self.recent(now) >= _SHARE_OF_LIMIT * self._rate
